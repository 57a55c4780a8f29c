#include "worker/checkpoint/names.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "worker/checkpoint/stored_weights.h"
#include "worker/checkpoint/tensor_values.h"

namespace tensorfold {
namespace {

constexpr std::array<std::string_view, 6> kMainPrefixes = {
    "model.language_model.", "language_model.model.", "model.", "backbone.", "language_model.", ""};
constexpr std::array<std::string_view, 5> kHeadPrefixes = {"", "language_model.", "model.", "model.language_model.",
                                                           "language_model.model."};
constexpr std::array<std::string_view, 5> kMtpPrefixes = kHeadPrefixes;

// What a module's numbers are called, by format.
constexpr std::array<std::string_view, 3> kValueSuffixes = {".weight", ".weight_packed", ".trellis"};

bool starts_with_any(std::string_view text, std::span<const std::string_view> prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(), [&](std::string_view p) { return text.starts_with(p); });
}

// Norms of the MTP layer that follow the family's convention.
constexpr std::array<std::string_view, 10> kMtpNorms = {"mtp.norm.weight",
                                                        "mtp.hyper_connection_mixer.hc_norm.weight",
                                                        "mtp.layers.0.attn_hyper_connection.hc_norm.weight",
                                                        "mtp.layers.0.mlp_hyper_connection.hc_norm.weight",
                                                        "mtp.pre_fc_norm_embedding.weight",
                                                        "mtp.pre_fc_norm_hidden.weight",
                                                        "mtp.layers.0.input_layernorm.weight",
                                                        "mtp.layers.0.post_attention_layernorm.weight",
                                                        "mtp.layers.0.self_attn.q_norm.weight",
                                                        "mtp.layers.0.self_attn.k_norm.weight"};

// deepseek_v4's and deepseek_v41's names of what other families call gate_proj and so on.
std::string shortened(std::string_view path) {
  std::string out(path);
  for (const auto& [name, stored] : {std::pair<std::string_view, std::string_view>{"gate_proj", "w1"},
                                     {"up_proj", "w3"},
                                     {"down_proj", "w2"},
                                     {"gate.e_score_correction_bias", "gate.bias"}}) {
    const size_t at = out.find(name);
    if (at != std::string::npos && out[at - 1] == '.') out.replace(at, name.size(), stored);
  }
  return out;
}

std::string first_names(const TensorSource& source) {
  std::string out;
  for (size_t i = 0; i < std::min<size_t>(source.names().size(), 5); ++i) {
    out += (i > 0 ? ", " : "") + quoted_name(source.names()[i]);
  }
  return out.empty() ? "none" : out;
}

}  // namespace

std::string Layout::full_name(std::string_view path) const {
  if (path == "lm_head" || path.starts_with("lm_head.")) return head_ + std::string(path.substr(7));
  if (path.starts_with("mtp.")) return mtp_prefix_ + (short_names_ ? shortened(path) : std::string(path));
  if (path == "embed_tokens" || path.starts_with("embed_tokens.")) {
    return main_prefix_ + embedding_ + std::string(path.substr(12));
  }
  if (path == "norm" || path == "norm.weight") return main_prefix_ + final_norm_ + std::string(path.substr(4));
  if (short_names_) return main_prefix_ + shortened(path);
  return main_prefix_ + std::string(path);
}

bool Layout::zero_centred(std::string_view module) const {
  if (module.ends_with("linear_attn.norm")) return false;  // the gated norm is plain in every conversion
  return module.starts_with("mtp.") ? mtp_norms_.zero_centred : main_norms_.zero_centred;
}

Skip Layout::skip(std::string_view full_name) const {
  static constexpr std::array<std::string_view, 13> kVision = {"visual.",
                                                               "vision_tower.",
                                                               "vision_model.",
                                                               "multi_modal_projector.",
                                                               "vision_embed_tokens.",
                                                               "image_newline",
                                                               "embed_vision.",
                                                               "vision_projection.",
                                                               "vision.",
                                                               "aligner.",
                                                               "image_start",
                                                               "image_end",
                                                               "image_pad"};
  const std::string_view path = strip_prefixes(full_name);
  if (starts_with_any(path, kVision)) return Skip::kVision;
  const bool mtp = path.starts_with("mtp.") || (!mtp_layer_.empty() && path.starts_with(mtp_layer_));
  if (drafter_alone_) return mtp ? Skip::kNo : Skip::kDrafter;
  if (mtp && has_drafter_) return Skip::kDrafter;
  if (mtp && !has_mtp_) return Skip::kMtp;
  if (path.starts_with(head_module_ + ".") && tied_head_) return Skip::kTiedHead;
  if (path.ends_with("rotary_emb.inv_freq")) return Skip::kRopeCache;
  return Skip::kNo;
}

Layout Layout::of_drafter() const {
  Layout layout = *this;
  layout.drafter_alone_ = true;
  return layout;
}

absl::StatusOr<Layout> Layout::detect(const TensorSource& source) {
  Layout layout;
  if (absl::Status status = layout.find_prefixes(source); !status.ok()) return status;
  if (absl::Status status = layout.find_drafter(source); !status.ok()) return status;
  if (absl::Status status = layout.find_head(source); !status.ok()) return status;
  if (absl::Status status = layout.decide_norms(source); !status.ok()) return status;
  layout.count_skipped(source);
  return layout;
}

absl::Status Layout::find_prefixes(const TensorSource& source) {
  if (source.config().family == Family::kNemotronH) {
    embedding_ = "embeddings";
    final_norm_ = "norm_f";
    mtp_first_ = "mtp.layers.0.eh_proj.weight";
  }
  if (source.config().family == Family::kQwen4Exp) mtp_first_ = "mtp.fc_embedding.weight";
  short_names_ = is_deepseek(source.config().family);
  if (source.config().family == Family::kDeepseekV41) {
    notes_.push_back(
        "deepseek_v41 is unproven: it follows published descriptions and agrees with a reference of our own, never yet "
        "with a released checkpoint or another program (docs/families/deepseek_v41.md)");
  }
  const auto has_embedding = [&](std::string_view prefix) {
    return source.find(fmt::format("{}{}.weight", prefix, embedding_)) != nullptr;
  };
  if (short_names_) {  // saved with its original names, or with those of a later library
    head_module_ = "head";
    if (std::none_of(kMainPrefixes.begin(), kMainPrefixes.end(), has_embedding)) embedding_ = "embed";
  }
  std::vector<std::string_view> found;
  for (std::string_view prefix : kMainPrefixes) {
    if (has_embedding(prefix)) found.push_back(prefix);
  }
  if (found.empty()) {
    std::string tried;
    for (std::string_view prefix : kMainPrefixes)
      tried += fmt::format("{}{}{}.weight", tried.empty() ? "" : ", ", prefix, embedding_);
    return absl::InvalidArgumentError(
        fmt::format("{}: no embedding: none of the tensors {} is there; the first names are {}", source.dir(), tried,
                    first_names(source)));
  }
  if (found.size() > 1) {
    return absl::InvalidArgumentError(
        fmt::format("{}: two language models, under '{}' and '{}'; one is allowed", source.dir(), found[0], found[1]));
  }
  main_prefix_ = found[0];
  notes_.push_back(fmt::format("language model under '{}'", main_prefix_));

  if (source.config().family == Family::kGlm5Next) {
    mtp_layer_ = fmt::format("layers.{}.", source.config().layer_count());
    has_mtp_ = source.config().mtp_layers > 0 && source.find(full_name(mtp_layer_ + "eh_proj.weight")) != nullptr;
    if (has_mtp_) notes_.push_back(fmt::format("MTP layer under '{}{}'", main_prefix_, mtp_layer_));
    if (!has_mtp_ && source.config().mtp_layers > 0) notes_.push_back("no MTP layer in the weights");
    return absl::OkStatus();
  }

  const auto mtp = std::find_if(kMtpPrefixes.begin(), kMtpPrefixes.end(), [&](std::string_view prefix) {
    return source.find(std::string(prefix) + mtp_first_) != nullptr;
  });
  const bool counted = source.config().mtp_layers > 0;
  if (mtp != kMtpPrefixes.end() && counted) {
    has_mtp_ = true;
    mtp_prefix_ = *mtp;
    notes_.push_back(fmt::format("MTP layer under '{}mtp.'", mtp_prefix_));
  } else if (counted) {
    // Converters drop it; a part of one without its projection is a broken file.
    for (const std::string& name : source.names()) {
      if (strip_prefixes(name).starts_with("mtp.")) {
        return absl::InvalidArgumentError(fmt::format("{}: has {} but no {}: an MTP layer must be whole or absent",
                                                      source.dir(), quoted_name(name), mtp_first_));
      }
    }
    notes_.push_back("no MTP layer in the weights, though config.json counts one");
  }
  return absl::OkStatus();
}

absl::Status Layout::find_drafter(const TensorSource& source) {
  const DsparkConfig& config = source.config().dspark;
  if (config.stages == 0) return absl::OkStatus();
  const auto stages_under = [&](std::string_view prefix) {
    int64_t stages = 0;
    while (source.find(fmt::format("{}mtp.{}.attn.wq_a.weight", prefix, stages)) != nullptr) ++stages;
    return stages;
  };
  const auto prefix = std::find_if(kMtpPrefixes.begin(), kMtpPrefixes.end(),
                                   [&](std::string_view candidate) { return stages_under(candidate) > 0; });
  if (prefix == kMtpPrefixes.end()) {
    notes_.push_back("no draft stages (mtp.*) in the weights, though config.json has dspark_block_size");
    return absl::OkStatus();
  }
  mtp_prefix_ = *prefix;
  if (const int64_t found = stages_under(*prefix); found != config.stages) {
    return absl::InvalidArgumentError(
        fmt::format("{}: {} draft stages in the weights ({}mtp.0 to mtp.{}), by config.json there are {}: set {}",
                    source.dir(), found, mtp_prefix_, found - 1, config.stages,
                    source.config().family == Family::kDeepseekV41 ? "num_nextn_predict_layers" : "n_mtp_layers"));
  }
  has_drafter_ = true;
  notes_.push_back(fmt::format("block drafter of {} stages under '{}mtp.', read where draft.kind is dspark or auto",
                               config.stages, mtp_prefix_));
  return absl::OkStatus();
}

absl::Status Layout::find_head(const TensorSource& source) {
  const ModelConfig& config = source.config();
  const auto at = std::find_if(kHeadPrefixes.begin(), kHeadPrefixes.end(), [&](std::string_view prefix) {
    return std::any_of(kValueSuffixes.begin(), kValueSuffixes.end(), [&](std::string_view suffix) {
      return source.find(fmt::format("{}{}{}", prefix, head_module_, suffix)) != nullptr;
    });
  });
  const bool stored = at != kHeadPrefixes.end();
  tied_head_ = config.tie_levels_disagree ? !stored : config.tie_word_embeddings;
  if (config.tie_levels_disagree) {
    notes_.push_back(fmt::format("config.json's two tie_word_embeddings disagree; lm_head is {}, so the head is {}",
                                 stored ? "stored" : "not stored", tied_head_ ? "tied" : "its own"));
  }
  if (!tied_head_ && !stored) {
    return absl::InvalidArgumentError(
        fmt::format("{}: no tensor {}.weight (tried with prefixes '', language_model., model.), and "
                    "tie_word_embeddings is false; files: {}",
                    source.dir(), head_module_, source.file_list()));
  }
  if (!tied_head_) head_ = std::string(*at) + head_module_;
  if (tied_head_) head_ = main_prefix_ + embedding_;
  return absl::OkStatus();
}

absl::Status Layout::decide_norms(const TensorSource& source) {
  const ModelConfig& config = source.config();
  if (!config.zero_centred_norms) {
    main_norms_.reason = fmt::format("{} stores gamma", family_name(config.family));
    return absl::OkStatus();
  }
  const TensorInfo* first = nullptr;
  for (size_t i = 0; i < config.layers.size(); ++i) {
    if (config.layers[i] != LayerKind::kLinearAttention) continue;
    const TensorInfo* conv = source.find(full_name(fmt::format("layers.{}.linear_attn.conv1d.weight", i)));
    if (conv == nullptr) continue;  // its absence is reported when it is read
    const bool hf = conv->shape.size() == 3 && conv->shape[1] == 1 && conv->shape[2] == config.linear.conv_kernel;
    const bool mlx = conv->shape.size() == 3 && conv->shape[2] == 1 && conv->shape[1] == config.linear.conv_kernel;
    if (!hf && !mlx) {
      return absl::InvalidArgumentError(fmt::format(
          "{}: tensor {} is {}; allowed: [channels, 1, {}] or [channels, {}, 1]", source.dir(), quoted_name(conv->name),
          shape_text(conv->shape), config.linear.conv_kernel, config.linear.conv_kernel));
    }
    if (first != nullptr && mlx != mlx_layout_) {
      return absl::InvalidArgumentError(fmt::format("{}: {} is {} but {} is {}: two conversions in one checkpoint",
                                                    source.dir(), quoted_name(first->name), shape_text(first->shape),
                                                    quoted_name(conv->name), shape_text(conv->shape)));
    }
    mlx_layout_ = mlx;
    if (first == nullptr) first = conv;
  }
  main_norms_.zero_centred = !mlx_layout_;
  main_norms_.reason = first == nullptr ? "no convolution to tell by; taken as Hugging Face's gamma - 1"
                                        : fmt::format("{} is {}, {}", first->name, shape_text(first->shape),
                                                      mlx_layout_ ? "MLX's layout, whose converter stored gamma"
                                                                  : "Hugging Face's: gamma - 1");
  notes_.push_back("norms: " + main_norms_.reason);
  return has_mtp_ ? decide_mtp_norms(source) : absl::OkStatus();
}

// In Hugging Face's layout the MTP layer was written by the same hand as the model. MLX's converter drops it, so
// another tool put it back, with or without the 1: trained weights average near 0 when it is missing, near 1 when it is
// there. The median over the norms, because single ones are trained far away (a final norm of mean 0.76 has been seen).
absl::Status Layout::decide_mtp_norms(const TensorSource& source) {
  if (!mlx_layout_) {
    mtp_norms_ = {true, "as the model's"};
    return absl::OkStatus();
  }
  std::vector<double> means;
  for (std::string_view path : kMtpNorms) {
    const TensorInfo* tensor = source.find(full_name(path));
    if (tensor == nullptr || tensor->shape.size() != 1 || tensor->shape[0] == 0) continue;
    absl::StatusOr<std::vector<float>> values = read_floats(*tensor);
    if (!values.ok()) return values.status();
    means.push_back(std::accumulate(values->begin(), values->end(), 0.0) / static_cast<double>(values->size()));
  }
  if (means.empty()) {
    mtp_norms_ = {main_norms_.zero_centred, "no MTP norms to tell by"};
    return absl::OkStatus();
  }
  std::nth_element(means.begin(), means.begin() + static_cast<ptrdiff_t>(means.size() / 2), means.end());
  const double median = means[means.size() / 2];
  mtp_norms_.zero_centred = median < 0.5;
  mtp_norms_.reason = fmt::format("the median mean of {} MTP norms is {:.3f}: {}", means.size(), median,
                                  mtp_norms_.zero_centred ? "gamma - 1" : "gamma");
  notes_.push_back("MTP norms: " + mtp_norms_.reason);
  return absl::OkStatus();
}

void Layout::count_skipped(const TensorSource& source) {
  int64_t others = 0, activation_scales = 0;
  for (const std::string& name : source.names()) {
    const Skip why = skip(name);
    if (why == Skip::kNo && is_activation_scale(name)) ++activation_scales;
    if (why == Skip::kVision) {
      ++vision_tensors_;
      vision_bytes_ += static_cast<int64_t>(source.find(name)->data.size());
    } else if (why != Skip::kNo && why != Skip::kDrafter) {
      ++others;
    }
  }
  if (vision_tensors_ > 0) {
    notes_.push_back(fmt::format("{} vision tensors skipped ({} bytes): text only", vision_tensors_, vision_bytes_));
  }
  if (activation_scales > 0) {
    notes_.push_back(
        fmt::format("{} scales of activations not used: activations and the KV cache are not quantised by "
                    "the checkpoint's scales",
                    activation_scales));
  }
  if (others > 0)
    notes_.push_back(fmt::format("{} tensors skipped: tied head, uncounted MTP layer, rope caches", others));
}

}  // namespace tensorfold
