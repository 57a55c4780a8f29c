#include "worker/checkpoint/dflash_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>

#include "kernels/ops/block_ops.h"
#include "worker/checkpoint/json_fields.h"
#include "worker/checkpoint/rope_config.h"

namespace tensorfold {
namespace {

using boost::json::object;

constexpr int64_t kMostTaps = 64;
constexpr std::array<std::string_view, 2> kArchitectures = {"DFlashDraftModel", "DFlash2DraftModel"};

void parse_architecture(FieldReader& fields, DflashConfig& config) {
  const std::vector<std::string> names = fields.strings("architectures");
  if (!fields.ok()) return;
  if (names.size() != 1 || std::find(kArchitectures.begin(), kArchitectures.end(), names[0]) == kArchitectures.end()) {
    const std::string found = names.empty() ? std::string("missing") : fmt::format("'{}'", fmt::join(names, "', '"));
    fields.fail(absl::UnimplementedError(fmt::format("{} is {}, which is no drafter that is read here. Read are: {}",
                                                     fields.where("architectures"), found.substr(0, 128),
                                                     fmt::join(kArchitectures, ", "))));
    return;
  }
  config.second = names[0] == kArchitectures[1];
  config.model.family = Family::kQwen3;
  config.model.model_type = fields.string("model_type", "qwen3");
  if (config.model.model_type != "qwen3") fields.refuse("model_type", "qwen3");
}

void refuse_features(FieldReader& fields) {
  for (const char* key : {"attention_bias", "mlp_bias", "fc_layernorm", "is_causal"}) {
    if (fields.boolean(key, false)) fields.refuse(key, "false (this is not computed here)");
  }
  const std::string act = fields.string("hidden_act", "silu");
  if (act != "silu" && act != "swish") fields.refuse("hidden_act", "silu");
}

void parse_sizes(FieldReader& fields, DflashConfig& config, const std::string& label) {
  ModelConfig& model = config.model;
  model.hidden_size = fields.integer("hidden_size", 1, 65536);
  model.intermediate_size = fields.integer("intermediate_size", 1, 1 << 20);
  model.vocab_size = fields.integer("vocab_size", 1, 1 << 24);
  model.heads = fields.integer("num_attention_heads", 1, 1024);
  model.kv_heads = fields.integer("num_key_value_heads", 1, 1024, model.heads);
  const int64_t layers = fields.integer("num_hidden_layers", 1, 64);
  if (!fields.ok()) return;
  if (model.heads % model.kv_heads != 0) {
    fields.refuse("num_key_value_heads", fmt::format("a divisor of num_attention_heads, which is {}", model.heads));
  }
  if (!fields.has("head_dim") && model.hidden_size % model.heads != 0) {
    fields.refuse("hidden_size",
                  fmt::format("a multiple of num_attention_heads, which is {}, if there is no head_dim", model.heads));
  }
  model.head_dim = fields.integer("head_dim", 8, 1024, model.hidden_size / model.heads);
  if (fields.ok() && (model.head_dim % 8 != 0 || model.head_dim > 1024)) {
    fields.refuse("head_dim", "a multiple of 8 up to 1024");
  }
  model.rms_norm_eps = fields.number("rms_norm_eps", 0.0, 0.1);
  model.max_positions = fields.integer("max_position_embeddings", 1, 1 << 24);
  model.qk_norm = true;
  model.layers.assign(static_cast<size_t>(layers), LayerKind::kFullAttention);
  model.mlps.assign(static_cast<size_t>(layers), MlpKind::kDense);
  config.target_hidden = fields.integer("target_hidden_size", 1, 65536, model.hidden_size);
  if (!fields.ok()) return;
  model.rope = parse_rope(fields, model.family, model.head_dim, model.max_positions, label);
}

// Layers look back over a window or over everything.
void parse_windows(FieldReader& fields, DflashConfig& config) {
  const size_t layers = config.model.layers.size();
  const std::vector<std::string> types = fields.strings("layer_types");
  if (!fields.ok()) return;
  if (fields.has("layer_types") && types.size() != layers) {
    fields.refuse("layer_types", fmt::format("{} names, as many as num_hidden_layers", layers));
    return;
  }
  const bool slides = fields.boolean("use_sliding_window", false) && types.empty();
  // Without a list the first layers look at everything.
  const auto first_sliding = static_cast<size_t>(fields.integer("max_window_layers", 0, 1024, 0));
  for (size_t i = 0; i < layers && fields.ok(); ++i) {
    const std::string type =
        types.empty() ? (slides && i >= first_sliding ? "sliding_attention" : "full_attention") : types[i];
    if (type == "full_attention") {
      config.windows.push_back(0);
    } else if (type == "sliding_attention") {
      // A row always sees its whole block.
      config.windows.push_back(fields.integer("sliding_window", kMostBlockRows, 1 << 24));
    } else {
      fields.fail(absl::UnimplementedError(fmt::format("{}[{}] is {}; allowed: full_attention, sliding_attention",
                                                       fields.where("layer_types"), i, quoted_name(type))));
    }
  }
}

void parse_block(FieldReader& fields, DflashConfig& config) {
  config.block_size = fields.integer("block_size", 2, kMostBlockRows);
  config.mask_token_id = static_cast<int32_t>(fields.integer("mask_token_id", 0, config.model.vocab_size - 1));
  config.target_layers = fields.integers("target_layer_ids", 0, 1023);
  config.stated_target_layers = fields.integer("num_target_layers", 0, 1024, 0);
  if (!fields.ok()) return;
  const std::set<int64_t> different(config.target_layers.begin(), config.target_layers.end());
  if (config.target_layers.empty() || different.size() != config.target_layers.size() ||
      static_cast<int64_t>(config.target_layers.size()) > kMostTaps) {
    fields.refuse("target_layer_ids", fmt::format("1 to {} different layer numbers", kMostTaps));
  }
}

void parse_second(FieldReader& fields, DflashConfig& config) {
  if (!config.second) return;
  config.conv_taps = fields.integer("conv_kernel", 1, kMostBlockTaps);
  config.conv_group = fields.integer("conv_group", 1, config.model.hidden_size);
  config.selector_rank = fields.integer("selector_rank", 1, 65536);
  config.selector_candidates = fields.integer("selector_top_k", 1, 1024);
  config.output_multiplier = fields.number("output_multiplier", 1e-6, 1e6, 1.0);
  config.final_logit_softcapping = fields.number("final_logit_softcapping", 0.0, 1e6, 0.0);
  if (!fields.ok()) return;
  if (config.model.hidden_size % config.conv_group != 0) {
    fields.refuse("conv_group", fmt::format("a divisor of hidden_size, which is {}", config.model.hidden_size));
  }
  if (config.selector_candidates > config.model.vocab_size) {
    fields.refuse("selector_top_k", fmt::format("at most vocab_size, which is {}", config.model.vocab_size));
  }
}

absl::Status differs(const char* what, const std::string& drafter, const std::string& target) {
  return absl::FailedPreconditionError(
      fmt::format("the drafter does not fit its target: {}: the drafter has {}, the target {}", what, drafter, target));
}

}  // namespace

std::string canonical_text(const DflashConfig& c) {
  return canonical_text(c.model) +
         fmt::format(
             "dflash second={} block={} mask={} taps={} of {} hidden={} windows={} conv={},{} selector={},{} "
             "multiplier={:a} cap={:a}\n",
             c.second, c.block_size, c.mask_token_id, fmt::join(c.target_layers, ","), c.stated_target_layers,
             c.target_hidden, fmt::join(c.windows, ","), c.conv_taps, c.conv_group, c.selector_rank,
             c.selector_candidates, c.output_multiplier, c.final_logit_softcapping);
}

absl::StatusOr<DflashConfig> parse_dflash_config(std::string_view config_json, const std::string& label) {
  absl::StatusOr<object> top = parse_json_object(config_json, label);
  if (!top.ok()) return top.status();
  FieldReader outer(label, *top);
  const object* inner = outer.object("dflash_config");
  if (!outer.ok()) return outer.status();
  FieldReader fields(label, *top, inner, "dflash_config.");
  DflashConfig config;
  parse_architecture(fields, config);
  if (!fields.ok()) return fields.status();
  absl::StatusOr<QuantizationConfig> quantization = parse_quantization(*top, nullptr, label);
  if (!quantization.ok()) return quantization.status();
  config.model.quantization = *std::move(quantization);
  refuse_features(fields);
  parse_sizes(fields, config, label);
  if (!fields.ok()) return fields.status();
  parse_windows(fields, config);
  if (!fields.ok()) return fields.status();
  parse_block(fields, config);
  if (!fields.ok()) return fields.status();
  parse_second(fields, config);
  if (!fields.ok()) return fields.status();
  return config;
}

bool is_dflash_config(std::string_view config_json) {
  const absl::StatusOr<object> top = parse_json_object(config_json, "config.json");
  if (!top.ok()) return false;
  FieldReader fields("config.json", *top);
  const std::vector<std::string> names = fields.strings("architectures");
  return std::any_of(names.begin(), names.end(), [](const std::string& name) { return name.starts_with("DFlash"); });
}

absl::StatusOr<DflashConfig> read_dflash_config(const std::string& dir) {
  const std::string path = (std::filesystem::path(dir) / "config.json").string();
  absl::StatusOr<std::string> text = read_text_file(path, kMaxConfigBytes);
  if (!text.ok()) {
    return absl::Status(text.status().code(), fmt::format("drafter: {}", std::string(text.status().message())));
  }
  return parse_dflash_config(*text, path);
}

absl::Status check_dflash_fits(const DflashConfig& drafter, const ModelConfig& target) {
  const auto number = [](int64_t value) { return fmt::format("{}", value); };
  if (drafter.model.vocab_size != target.vocab_size) {
    return differs("vocab_size", number(drafter.model.vocab_size), number(target.vocab_size));
  }
  // Embedding and head are the target's, so the drafter's rows are as wide as they.
  if (drafter.model.hidden_size != target.hidden_size) {
    return differs("hidden_size", number(drafter.model.hidden_size), number(target.hidden_size));
  }
  if (drafter.target_hidden != target.hidden_size) {
    return differs("target_hidden_size", number(drafter.target_hidden), number(target.hidden_size));
  }
  if (drafter.stated_target_layers > 0 && drafter.stated_target_layers != target.layer_count()) {
    return differs("num_target_layers", number(drafter.stated_target_layers), number(target.layer_count()));
  }
  for (const int64_t layer : drafter.target_layers) {
    if (layer >= target.layer_count()) {
      return differs("target_layer_ids", fmt::format("layer {}", layer),
                     fmt::format("layers 0 to {}", target.layer_count() - 1));
    }
  }
  return absl::OkStatus();
}

}  // namespace tensorfold
