#include "worker/checkpoint/model_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>

#include "worker/checkpoint/deepseek_v41_config.h"
#include "worker/checkpoint/json_fields.h"
#include "worker/checkpoint/latent_config.h"
#include "worker/checkpoint/nemotron_config.h"
#include "worker/checkpoint/qwen4_config.h"
#include "worker/checkpoint/rope_config.h"
#include "worker/checkpoint/safetensors.h"

namespace tensorfold {
namespace {

namespace fs = std::filesystem;
using boost::json::object;

struct FamilyRow {
  std::string_view model_type;
  Family family;
  std::vector<std::string_view> architectures;
};
const std::vector<FamilyRow>& family_rows() {
  static const std::vector<FamilyRow> rows = {
      {"llama", Family::kLlama, {"LlamaForCausalLM"}},
      {"qwen3", Family::kQwen3, {"Qwen3ForCausalLM"}},
      {"qwen3_moe", Family::kQwen3Moe, {"Qwen3MoeForCausalLM"}},
      {"qwen3_next", Family::kQwen3Next, {"Qwen3NextForCausalLM"}},
      {"qwen3_5", Family::kQwen3_5, {"Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"}},
      {"qwen3_5_text", Family::kQwen3_5, {"Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"}},
      {"qwen3_5_moe", Family::kQwen3_5Moe, {"Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"}},
      {"qwen3_5_moe_text", Family::kQwen3_5Moe, {"Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"}},
      {"nemotron_h", Family::kNemotronH, {"NemotronHForCausalLM"}},
      {"qwen4_exp", Family::kQwen4Exp, {"Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"}},
      {"qwen4_exp_text", Family::kQwen4Exp, {"Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"}},
      {"glm5_next", Family::kGlm5Next, {"Glm5NextForConditionalGeneration", "Glm5NextForCausalLM"}},
      {"glm5_next_text", Family::kGlm5Next, {"Glm5NextForCausalLM", "Glm5NextForConditionalGeneration"}},
      {"deepseek_v4", Family::kDeepseekV4, {"DeepseekV4ForCausalLM"}},
      {"deepseek_v41", Family::kDeepseekV41, {"DeepseekV41ForCausalLM"}},
      {"deepseek_v41_text", Family::kDeepseekV41, {"DeepseekV41ForCausalLM"}}};
  return rows;
}

absl::StatusOr<const FamilyRow*> find_family(const object& config, const std::string& label) {
  std::string known;
  for (const FamilyRow& row : family_rows()) known += fmt::format("{}{}", known.empty() ? "" : ", ", row.model_type);
  FieldReader fields(label, config);
  const std::string type = fields.string("model_type", "");
  if (!fields.ok()) return fields.status();
  if (type.empty()) {
    return absl::InvalidArgumentError(fmt::format("{}: model_type is missing; read are: {}", label, known));
  }
  const auto& rows = family_rows();
  const auto row = std::find_if(rows.begin(), rows.end(), [&](const FamilyRow& r) { return r.model_type == type; });
  if (row == rows.end()) {
    return absl::UnimplementedError(
        fmt::format("{}: model_type {} is not read here. Read are: {}", label, quoted_name(type), known));
  }
  const std::vector<std::string> architectures = fields.strings("architectures");
  if (!fields.ok()) return fields.status();
  for (const std::string& name : architectures) {
    if (std::find(row->architectures.begin(), row->architectures.end(), name) == row->architectures.end()) {
      return absl::UnimplementedError(fmt::format("{}: architecture {} of model_type {} is not read here. Read are: {}",
                                                  label, quoted_name(name), type, fmt::join(row->architectures, ", ")));
    }
  }
  return &*row;
}

// text_config of a composite configuration, or null for a flat one.
absl::StatusOr<const object*> find_text_config(const object& config, const FamilyRow& row, const std::string& label) {
  FieldReader fields(label, config);
  const object* text = fields.object("text_config");
  if (!fields.ok()) return fields.status();
  if (text == nullptr) return text;
  constexpr std::array<std::string_view, 5> kComposite = {"qwen3_5", "qwen3_5_moe", "qwen4_exp", "glm5_next",
                                                          "deepseek_v41"};
  if (std::find(kComposite.begin(), kComposite.end(), row.model_type) == kComposite.end()) {
    return absl::InvalidArgumentError(fmt::format("{}: model_type {} has a text_config; only {} are read with one",
                                                  label, row.model_type, fmt::join(kComposite, ", ")));
  }
  FieldReader inner(label, *text);
  const std::string wanted = std::string(row.model_type) + "_text";
  const std::string type = inner.string("model_type", wanted);
  if (!inner.ok()) return inner.status();
  if (type != wanted && type != row.model_type) {
    return absl::UnimplementedError(
        fmt::format("{}: text_config.model_type is {}; read is {}", label, quoted_name(type), wanted));
  }
  return text;
}

// Features that would change the numbers and that no reader here computes.
void refuse_features(FieldReader& fields, const ModelConfig& config) {
  for (const char* key :
       {"attention_bias", "mlp_bias", "use_sliding_window", "rope_interleaved", "mtp_use_dedicated_embeddings"}) {
    if (fields.boolean(key, false)) fields.refuse(key, "false (this is not computed here)");
  }
  const std::string act = fields.string("hidden_act", "silu");
  if (act != "silu" && act != "swish") fields.refuse("hidden_act", "silu");
  if (is_hybrid(config.family)) {
    if (!fields.boolean("attn_output_gate", true)) fields.refuse("attn_output_gate", "true");
    const std::string gate = fields.string("output_gate_type", "silu");
    const bool sigmoid = gate == "sigmoid" && config.family == Family::kQwen4Exp;
    if (gate != "silu" && gate != "swish" && !sigmoid) {
      fields.refuse("output_gate_type", config.family == Family::kQwen4Exp ? "silu, sigmoid" : "silu");
    }
  }
  for (const std::string_view key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    const bool routed = config.family == Family::kNemotronH || is_latent(config.family);
    if (has_experts(config.family) && routed == (key == "n_routed_experts")) continue;
    if (fields.integer(key, 0, 1 << 20, 0) > 0) {
      fields.refuse(key, fmt::format("0 ({} has no experts under this name)", config.model_type));
    }
  }
}

void parse_dimensions(FieldReader& fields, ModelConfig& config) {
  config.hidden_size = fields.integer("hidden_size", 1, 65536);
  // Where every layer has experts, files leave it out or hold a number that nothing uses.
  config.intermediate_size = fields.integer("intermediate_size", 1, 1 << 20,
                                            has_experts(config.family) ? std::optional<int64_t>(0) : std::nullopt);
  config.vocab_size = fields.integer("vocab_size", 1, 1 << 24);
  config.heads = fields.integer("num_attention_heads", 1, 1024);
  config.kv_heads = fields.integer("num_key_value_heads", 1, 1024, config.heads);
  if (!fields.ok()) return;
  if (config.heads % config.kv_heads != 0) {
    fields.refuse("num_key_value_heads", fmt::format("a divisor of num_attention_heads, which is {}", config.heads));
  }
  if (!fields.has("head_dim") && config.hidden_size % config.heads != 0) {
    fields.refuse("hidden_size",
                  fmt::format("a multiple of num_attention_heads, which is {}, if there is no head_dim", config.heads));
  }
  config.head_dim = fields.integer("head_dim", 2, 1024, config.hidden_size / config.heads);
  if (config.head_dim % 2 != 0 || config.head_dim < 2 || config.head_dim > 1024) {
    fields.refuse("head_dim", "an even number from 2 to 1024");
  }
  config.rms_norm_eps =
      fields.number(config.family == Family::kNemotronH ? "layer_norm_epsilon" : "rms_norm_eps", 0.0, 0.1);
  config.max_positions = fields.integer("max_position_embeddings", 1, 1 << 24);
}

void parse_layers(FieldReader& fields, ModelConfig& config) {
  const int64_t count = fields.integer("num_hidden_layers", 1, 1024);
  if (!fields.ok()) return;
  const bool hybrid = is_hybrid(config.family);
  const std::vector<std::string> types = fields.strings("layer_types");
  if (fields.has("layer_types") && static_cast<int64_t>(types.size()) != count) {
    fields.refuse("layer_types", fmt::format("{} names, as many as num_hidden_layers", count));
    return;
  }
  const int64_t interval = hybrid ? fields.integer("full_attention_interval", 1, 1024, 4) : 1;
  for (int64_t i = 0; i < count; ++i) {
    const std::string name = !types.empty() ? types[static_cast<size_t>(i)]
                                            : ((i + 1) % interval == 0 ? "full_attention" : "linear_attention");
    // The names that released files and two generations of writers have for the same layers.
    const bool sparse =
        (name == "qwen_sparse_attention" || name == "indexed_attention") && config.family == Family::kQwen4Exp;
    if (name == "full_attention" || sparse) {
      config.layers.push_back(LayerKind::kFullAttention);
    } else if (name == "linear_attention" && hybrid) {
      config.layers.push_back(LayerKind::kLinearAttention);
    } else {
      fields.fail(absl::UnimplementedError(fmt::format("{}[{}] is {}; allowed for {}: full_attention{}",
                                                       fields.where("layer_types"), i, quoted_name(name),
                                                       config.model_type, hybrid ? ", linear_attention" : "")));
      return;
    }
  }
}

// Which layers have experts, and what these are.
void parse_experts(FieldReader& fields, ModelConfig& config) {
  config.mlps.assign(config.layers.size(), MlpKind::kDense);
  if (!has_experts(config.family) || !fields.ok()) return;
  ExpertsConfig& experts = config.experts;
  const char* count_key = fields.has("num_experts") ? "num_experts" : "num_local_experts";
  experts.count = fields.integer(fields.has(count_key) ? count_key : "num_experts", 1, 4096);
  experts.per_token = fields.integer("num_experts_per_tok", 1, 32);
  experts.intermediate_size = fields.integer("moe_intermediate_size", 1, 1 << 20);
  // The classes' own defaults: only qwen3_moe leaves the weights as they are.
  experts.renormalise = fields.boolean("norm_topk_prob", config.family != Family::kQwen3Moe);
  if (config.family != Family::kQwen3Moe) {
    experts.shared_intermediate_size = fields.integer("shared_expert_intermediate_size", 1, 1 << 20);
  }
  const int64_t step = fields.integer("decoder_sparse_step", 1, 1024, 1);
  const std::vector<int64_t> dense = fields.integers("mlp_only_layers", 0, config.layer_count() - 1);
  if (!fields.ok()) return;
  if (experts.per_token > experts.count) {
    fields.refuse("num_experts_per_tok", fmt::format("at most {}, which is {}", count_key, experts.count));
  }
  for (int64_t i = 0; i < config.layer_count(); ++i) {
    const bool sparse = (i + 1) % step == 0 && std::find(dense.begin(), dense.end(), i) == dense.end();
    if (sparse) config.mlps[static_cast<size_t>(i)] = MlpKind::kExperts;
  }
  if (config.count(MlpKind::kDense) > 0 && config.intermediate_size == 0) {
    fields.refuse("intermediate_size", "1 to 1048576: decoder_sparse_step and mlp_only_layers leave dense layers");
  }
}

void parse_linear(FieldReader& fields, ModelConfig& config) {
  if (config.count(LayerKind::kLinearAttention) == 0) return;
  LinearAttentionConfig& linear = config.linear;
  linear.key_heads = fields.integer("linear_num_key_heads", 1, 1024);
  linear.value_heads = fields.integer("linear_num_value_heads", 1, 1024);
  linear.key_dim = fields.integer("linear_key_head_dim", 1, 1024);
  linear.value_dim = fields.integer("linear_value_head_dim", 1, 1024);
  // From 2: with one tap the two conversions' convolution layouts could not be told apart.
  linear.conv_kernel = fields.integer("linear_conv_kernel_dim", 2, 16);
  if (fields.ok() && linear.value_heads % linear.key_heads != 0) {
    fields.refuse("linear_num_value_heads",
                  fmt::format("a multiple of linear_num_key_heads, which is {}", linear.key_heads));
  }
  linear.fused = config.family == Family::kQwen3Next;
}

void parse_ties(FieldReader& fields, const object& top, const object* text, ModelConfig& config) {
  config.tie_word_embeddings = fields.boolean("tie_word_embeddings", false);
  if (text == nullptr || !fields.ok()) return;
  const boost::json::value* above = top.if_contains("tie_word_embeddings");
  const boost::json::value* inside = text->if_contains("tie_word_embeddings");
  if (above == nullptr || inside == nullptr || !above->is_bool() || !inside->is_bool()) return;
  config.tie_levels_disagree = above->get_bool() != inside->get_bool();
}

std::optional<int32_t> optional_id(FieldReader& fields, const char* key, const ModelConfig& config) {
  // -1 is how some files say "none".
  const int64_t id = fields.integer(key, -1, config.vocab_size - 1, -1);
  return id >= 0 ? std::optional<int32_t>(static_cast<int32_t>(id)) : std::nullopt;
}

void parse_tokens(FieldReader& fields, ModelConfig& config, std::set<int32_t>& eos) {
  for (int64_t id : fields.integers("eos_token_id", 0, config.vocab_size - 1)) eos.insert(static_cast<int32_t>(id));
}

absl::Status parse_generation(std::string_view text, ModelConfig& config, std::set<int32_t>& eos) {
  absl::StatusOr<object> generation = parse_json_object(text, "generation_config.json");
  if (!generation.ok()) return generation.status();
  FieldReader fields("generation_config.json", *generation);
  parse_tokens(fields, config, eos);
  if (!config.bos_token_id) config.bos_token_id = optional_id(fields, "bos_token_id", config);
  if (!config.pad_token_id) config.pad_token_id = optional_id(fields, "pad_token_id", config);
  return fields.status();
}

// What a folder holds, by the names of its files alone.
struct FolderFiles {
  std::vector<std::string> foreign;  // weights in formats that are not read
  bool safetensors = false;
};

absl::StatusOr<FolderFiles> list_folder(const std::string& dir) {
  std::error_code ec;
  if (!fs::is_directory(dir, ec)) {
    const bool gguf = dir.ends_with(".gguf");
    return gguf ? absl::UnimplementedError(fmt::format(
                      "{}: GGUF is not read here. Read are folders with config.json and {}", dir, formats_read()))
                : absl::NotFoundError(fmt::format("{}: no such model folder", dir));
  }
  FolderFiles files;
  constexpr int kMostEntries = 100'000;
  int entries = 0;
  for (fs::directory_iterator at(dir, ec), end; !ec && at != end && ++entries < kMostEntries; at.increment(ec)) {
    const std::string name = at->path().filename().string();
    const std::string extension = at->path().extension().string();
    if (extension == ".safetensors") files.safetensors = true;
    const bool foreign = extension == ".gguf" || extension == ".bin" || extension == ".pt" || extension == ".pth" ||
                         extension == ".ckpt" || extension == ".npz" || extension == ".onnx" || extension == ".h5" ||
                         extension == ".msgpack";
    if (foreign) files.foreign.push_back(name);
  }
  if (ec) return absl::InvalidArgumentError(fmt::format("{}: cannot be listed: {}", dir, ec.message()));
  std::sort(files.foreign.begin(), files.foreign.end());
  return files;
}

absl::Status check_folder(const std::string& dir, const FolderFiles& files) {
  if (!files.safetensors && !files.foreign.empty()) {
    return absl::UnimplementedError(
        fmt::format("{}: holds {}{} and no safetensors, which is not read here. Read are: {}", dir,
                    quoted_name(files.foreign.front()), files.foreign.size() > 1 ? " and others" : "", formats_read()));
  }
  // Some quantisers leave config.json alone and write their own file beside it.
  for (const char* name : {"quantize_config.json", "quant_config.json"}) {
    std::error_code ec;
    if (!fs::exists(fs::path(dir) / name, ec)) continue;
    std::string method;
    absl::StatusOr<std::string> text = read_text_file((fs::path(dir) / name).string(), kMaxConfigBytes);
    absl::StatusOr<object> config = text.ok() ? parse_json_object(*text, name) : absl::StatusOr<object>(text.status());
    if (config.ok()) {
      const boost::json::value* inner = config->if_contains("quantization");
      const object& at = inner != nullptr && inner->is_object() ? inner->as_object() : *config;
      for (const char* key : {"quant_algo", "quant_method", "bits", "w_bit"}) {
        if (const boost::json::value* value = at.if_contains(key))
          method += fmt::format(" {} {}", key, json_text(*value));
      }
    }
    return absl::UnimplementedError(
        fmt::format("{}: {} says that the weights are quantised{}, which is not read here. "
                    "Read are: {}",
                    dir, name, method.empty() ? "" : ":" + method, formats_read()));
  }
  return absl::OkStatus();
}

// Nothing where it does not apply, so that the hashes of other checkpoints stay as they are.
std::string yarn_text(const RopeConfig& rope) {
  if (rope.type != RopeType::kYarn) return "";
  return fmt::format("yarn fast={:a} slow={:a} truncate={} attention={:a} mscale={:a} all_dim={:a}\n", rope.beta_fast,
                     rope.beta_slow, rope.truncate, rope.attention_factor, rope.mscale, rope.mscale_all_dim);
}

// One line of canonical_text, or nothing for a dense family.
std::string experts_text(const ModelConfig& c) {
  if (c.experts.count == 0) return {};
  std::string kinds;
  for (MlpKind kind : c.mlps) kinds += kind == MlpKind::kExperts ? 'E' : (kind == MlpKind::kDense ? 'D' : '-');
  const ExpertsConfig& e = c.experts;
  std::string text = fmt::format("experts={},{},{},{},{} in {}\n", e.count, e.per_token, e.intermediate_size,
                                 e.shared_intermediate_size, e.renormalise, kinds);
  const ExpertsConfig plain;
  if (e.shared_gate != plain.shared_gate || e.sigmoid || e.choice_bias || e.scale != plain.scale || !e.gated) {
    text += fmt::format("router={},{},{:a} shared gate={} gated={}\n", e.sigmoid, e.choice_bias, e.scale, e.shared_gate,
                        e.gated);
  }
  if (e.sqrt_softplus) text += "scores=sqrt_softplus\n";
  return text;
}

std::string mamba2_text(const ModelConfig& c) {
  const Mamba2Config& m = c.mamba2;
  if (m.heads == 0) return {};
  return fmt::format("mamba2={},{},{},{},{},{},{:a},{:a}\n", m.heads, m.head_dim, m.groups, m.state, m.conv_kernel,
                     m.conv_bias, m.least_step, m.most_step);
}

char letter_of(LayerKind kind) {
  switch (kind) {
    case LayerKind::kFullAttention:
      return 'F';
    case LayerKind::kLinearAttention:
      return 'L';
    case LayerKind::kWindow:
      return 'W';
    case LayerKind::kWindowAndChosen:
      return 'C';
    case LayerKind::kWindowAndPooled:
      return 'P';
    case LayerKind::kMamba2:
      return 'M';
    case LayerKind::kNone:
      break;
  }
  return '-';
}

// modelopt's own file. Newer exports say the same in config.json; there lists of modules may be abridged, so only the
// formats must agree.
absl::Status read_hf_quant_config(const std::string& dir, QuantizationConfig& quantization) {
  const std::string path = (fs::path(dir) / "hf_quant_config.json").string();
  absl::StatusOr<std::string> text = read_text_file(path, kMaxConfigBytes);
  if (absl::IsNotFound(text.status())) return absl::OkStatus();
  if (!text.ok()) return text.status();
  absl::StatusOr<object> json = parse_json_object(*text, path);
  if (!json.ok()) return json.status();
  absl::StatusOr<QuantizationConfig> own = parse_hf_quant_config(*json, path);
  if (!own.ok()) return own.status();
  if (!quantization.any()) {
    quantization = *std::move(own);
    return absl::OkStatus();
  }
  if (own->kinds == quantization.kinds) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("{}: {} and config.json disagree on the formats of the weights", dir, "hf_quant_config.json"));
}

}  // namespace

std::string_view family_name(Family family) {
  switch (family) {
    case Family::kLlama:
      return "llama";
    case Family::kQwen3:
      return "qwen3";
    case Family::kQwen3Moe:
      return "qwen3_moe";
    case Family::kQwen3Next:
      return "qwen3_next";
    case Family::kQwen3_5:
      return "qwen3_5";
    case Family::kQwen3_5Moe:
      return "qwen3_5_moe";
    case Family::kNemotronH:
      return "nemotron_h";
    case Family::kQwen4Exp:
      return "qwen4_exp";
    case Family::kGlm5Next:
      return "glm5_next";
    case Family::kDeepseekV4:
      return "deepseek_v4";
    case Family::kDeepseekV41:
      return "deepseek_v41";
  }
  return "unknown";
}

bool is_hybrid(Family family) {
  return family == Family::kQwen3Next || family == Family::kQwen3_5 || family == Family::kQwen3_5Moe ||
         family == Family::kQwen4Exp;
}

bool is_deepseek(Family family) { return family == Family::kDeepseekV4 || family == Family::kDeepseekV41; }

bool is_latent(Family family) { return family == Family::kGlm5Next || is_deepseek(family); }

std::string_view precision_name(Precision precision) { return precision == Precision::kFull ? "full" : "checkpoint"; }

absl::StatusOr<Precision> parse_precision(std::string_view name) {
  for (const Precision precision : {Precision::kCheckpoint, Precision::kFull}) {
    if (name == precision_name(precision)) return precision;
  }
  return absl::InvalidArgumentError(
      fmt::format("precision is {}; allowed: checkpoint, full", quoted_name(std::string(name))));
}

bool has_experts(Family family) {
  return family == Family::kQwen3Moe || family == Family::kQwen3Next || family == Family::kQwen3_5Moe ||
         family == Family::kNemotronH || family == Family::kQwen4Exp || is_latent(family);
}

int64_t ModelConfig::count(LayerKind kind) const { return std::count(layers.begin(), layers.end(), kind); }

int64_t ModelConfig::count(MlpKind kind) const { return std::count(mlps.begin(), mlps.end(), kind); }

std::string canonical_text(const ModelConfig& c) {
  std::string kinds;
  for (LayerKind kind : c.layers) kinds += letter_of(kind);
  const std::string quantization = canonical_text(c.quantization);
  return experts_text(c) + mamba2_text(c) + qwen4_text(c) + yarn_text(c.rope) + latent_text(c) + deepseek_v41_text(c) +
         fmt::format(
             "family={} hidden={} intermediate={} vocab={} heads={} kv_heads={} head_dim={} eps={:a} positions={}\n"
             "rope type={} theta={:a} dims={} factor={:a} low={:a} high={:a} original={}\n"
             "layers={} linear={},{},{},{},{} gate={} qk_norm={} zero_centred={} mtp={} tied={}{}\n"
             "eos={} bos={} pad={}\nquantization={}\n",
             family_name(c.family), c.hidden_size, c.intermediate_size, c.vocab_size, c.heads, c.kv_heads, c.head_dim,
             c.rms_norm_eps, c.max_positions, static_cast<int>(c.rope.type), c.rope.theta, c.rope.dims, c.rope.factor,
             c.rope.low_freq_factor, c.rope.high_freq_factor, c.rope.original_max_positions, kinds, c.linear.key_heads,
             c.linear.value_heads, c.linear.key_dim, c.linear.value_dim, c.linear.conv_kernel, c.attn_output_gate,
             c.qk_norm, c.zero_centred_norms, c.mtp_layers, c.tie_word_embeddings, c.tie_levels_disagree ? "?" : "",
             fmt::join(c.eos_token_ids, ","), c.bos_token_id.value_or(-1), c.pad_token_id.value_or(-1), quantization);
}

absl::StatusOr<ModelConfig> parse_config(std::string_view config_json, std::string_view generation_json,
                                         const std::string& label) {
  absl::StatusOr<object> top = parse_json_object(config_json, label);
  if (!top.ok()) return top.status();
  absl::StatusOr<const FamilyRow*> row = find_family(*top, label);
  if (!row.ok()) return row.status();
  absl::StatusOr<const object*> text = find_text_config(*top, **row, label);
  if (!text.ok()) return text.status();
  absl::StatusOr<QuantizationConfig> quantization = parse_quantization(*top, *text, label);
  if (!quantization.ok()) return quantization.status();

  ModelConfig config;
  config.family = (*row)->family;
  config.model_type = std::string((*row)->model_type);
  config.quantization = std::move(*quantization);
  config.qk_norm = config.family != Family::kLlama && config.family != Family::kNemotronH && !is_latent(config.family);
  config.attn_output_gate = config.zero_centred_norms = is_hybrid(config.family);
  FieldReader fields(label, *top, *text, "text_config.");
  if (!is_latent(config.family)) parse_dimensions(fields, config);
  if (!fields.ok()) return fields.status();
  refuse_features(fields, config);
  if (is_latent(config.family)) {
    parse_latent(fields, config);
  } else if (config.family == Family::kNemotronH) {
    parse_nemotron_h(fields, config);
  } else {
    parse_layers(fields, config);
    parse_experts(fields, config);
    parse_linear(fields, config);
    config.rope = parse_rope(fields, config.family, config.head_dim, config.max_positions, label);
    if (config.family == Family::kQwen4Exp) parse_qwen4_exp(fields, config);
  }
  // qwen3_next's and qwen4_exp's files ship the layer without counting it: the weights decide.
  if (is_hybrid(config.family)) {
    config.mtp_layers =
        fields.integer("mtp_num_hidden_layers", 0, 1,
                       config.family == Family::kQwen3Next || config.family == Family::kQwen4Exp ? 1 : 0);
  }
  parse_ties(fields, *top, *text, config);
  config.dtype = fields.string(fields.has("dtype") ? "dtype" : "torch_dtype", "");
  constexpr std::array<std::string_view, 4> kDtypes = {"", "bfloat16", "float16", "float32"};
  if (std::find(kDtypes.begin(), kDtypes.end(), config.dtype) == kDtypes.end()) {
    fields.refuse(fields.has("dtype") ? "dtype" : "torch_dtype", "bfloat16, float16, float32");
  }

  std::set<int32_t> eos;
  parse_tokens(fields, config, eos);
  if (*text != nullptr) {  // both levels count: the reader above took text_config's
    FieldReader above(label, *top);
    parse_tokens(above, config, eos);
    fields.fail(above.status());
  }
  config.bos_token_id = optional_id(fields, "bos_token_id", config);
  config.pad_token_id = optional_id(fields, "pad_token_id", config);
  if (!fields.ok()) return fields.status();
  if (!generation_json.empty()) {
    if (absl::Status status = parse_generation(generation_json, config, eos); !status.ok()) return status;
  }
  config.eos_token_ids.assign(eos.begin(), eos.end());
  return config;
}

absl::StatusOr<ModelConfig> read_config(const std::string& dir) {
  absl::StatusOr<FolderFiles> files = list_folder(dir);
  if (!files.ok()) return files.status();
  absl::StatusOr<std::string> text = read_text_file((fs::path(dir) / "config.json").string(), kMaxConfigBytes);
  if (!text.ok()) {
    // A folder of foreign weights without config.json is refused for what it is.
    absl::Status status = check_folder(dir, *files);
    return status.ok() ? text.status() : status;
  }
  absl::StatusOr<std::string> generation =
      read_text_file((fs::path(dir) / "generation_config.json").string(), kMaxConfigBytes);
  if (!generation.ok() && !absl::IsNotFound(generation.status())) return generation.status();
  absl::StatusOr<ModelConfig> config =
      parse_config(*text, generation.ok() ? std::string_view(*generation) : std::string_view(),
                   (fs::path(dir) / "config.json").string());
  if (!config.ok()) return config.status();
  if (absl::Status status = check_folder(dir, *files); !status.ok()) return status;
  if (absl::Status status = read_hf_quant_config(dir, config->quantization); !status.ok()) return status;
  return config;
}

}  // namespace tensorfold
