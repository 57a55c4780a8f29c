#include "worker/checkpoint/inspect.h"

#include <fmt/format.h>

#include <algorithm>

#include "worker/checkpoint/names.h"
#include "worker/checkpoint/stored_weights.h"

namespace tensorfold {
namespace {

// nemotron_h's blocks have one mixer each: the module's own names tell which.
std::string kind_of_mixer(std::string_view path) {
  const std::string_view part = path.substr(path.find(".mixer.") + 7);
  if (part.starts_with("experts.") || part.starts_with("switch_mlp.")) return "experts";
  if (part.starts_with("shared_experts.")) return "shared expert";
  if (part.starts_with("gate.")) return "router";
  if (part.starts_with("up_proj.") || part.starts_with("down_proj.")) return "mlp";
  for (const std::string_view name : {"q_proj.", "k_proj.", "v_proj.", "o_proj."}) {
    if (part.starts_with(name)) return "attention";
  }
  return "mamba2";
}

std::string kind_of(std::string_view path, Skip skip) {
  if (skip == Skip::kVision) return "vision";
  if (skip == Skip::kDrafter) return "drafter";
  if (skip != Skip::kNo) return "skipped";
  if (path.starts_with("mtp.")) return "mtp";
  if (path.starts_with("embed_tokens.") || path.starts_with("embeddings.") || path.starts_with("embed.")) {
    return "embedding";
  }
  if (path.starts_with("lm_head.") || path.starts_with("head.")) return "head";
  if (path.find("hc_") != std::string_view::npos) return "streams";
  if (path.find(".mixer.") != std::string_view::npos) return kind_of_mixer(path);
  if (path.find("ngram_embedding.") != std::string_view::npos ||
      path.find(".engram.embed.") != std::string_view::npos) {
    return "n-gram tables";
  }
  if (path.find(".engram.") != std::string_view::npos || path.find(".ple.") != std::string_view::npos) return "n-grams";
  if (path.find("hyper_connection") != std::string_view::npos) return "streams";
  if (path.find(".indexer.") != std::string_view::npos) return "indexer";
  const bool norm = path.ends_with("norm.weight") || path.ends_with("norm_f.weight");
  if (path.find(".linear_attn.") != std::string_view::npos) return "delta_net";
  if (norm) return "norms";
  if (path.find(".self_attn.") != std::string_view::npos || path.find(".attn.") != std::string_view::npos) {
    return "attention";
  }
  if (path.find(".mlp.experts.") != std::string_view::npos || path.find(".switch_mlp.") != std::string_view::npos ||
      path.find(".ffn.experts.") != std::string_view::npos) {
    return "experts";
  }
  if (path.find(".mlp.shared_expert") != std::string_view::npos && path.find("_gate.") == std::string_view::npos) {
    return "shared expert";
  }
  if (path.find(".ffn.shared_experts.") != std::string_view::npos) return "shared expert";
  if (path.find(".mlp.gate.") != std::string_view::npos || path.find(".ffn.gate.") != std::string_view::npos ||
      path.find(".shared_expert_gate.") != std::string_view::npos) {
    return "router";
  }
  if (path.find(".mlp.") != std::string_view::npos) return "mlp";
  return "other";
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return std::tolower(c); });
  return out;
}

// "a.b.weight" -> "a.b".
std::string module_of(std::string_view name) { return std::string(name.substr(0, name.rfind('.'))); }

void count_tensor(const TensorSource& source, const TensorInfo& tensor, Skip skip, ModelFacts& facts) {
  const auto bytes = static_cast<int64_t>(tensor.data.size());
  const std::string_view path = strip_prefixes(tensor.name);
  facts.bytes_by_kind[kind_of(path, skip)] += bytes;
  if (skip != Skip::kNo && skip != Skip::kDrafter) return;
  facts.weight_bytes += bytes;

  const std::string module = module_of(tensor.name);
  const bool quantised = source.find(module + ".scales") != nullptr;
  const std::optional<AffineFormat> format = source.config().quantization.of(module);
  const std::optional<StoredModule> stored = find_stored(source, module);
  int64_t values = tensor.elements();
  int64_t memory = bytes, device_memory = bytes;
  if (is_activation_scale(tensor.name)) {
    facts.bytes_by_format["activation scales, not used"] += bytes;
    values = memory = device_memory = 0;
  } else if (stored && !tensor.name.ends_with(".bias")) {
    const TensorInfo& own = *source.find(module + std::string(stored->values));
    facts.bytes_by_format[stored_label(*stored, own)] += bytes;
    if (stored->mlx) facts.column_unit = std::max<int64_t>(facts.column_unit, stored->block_cols);
    const bool counts = &own == &tensor;  // for the whole module
    values = counts ? stored_elements(*stored, own) : 0;
    memory = counts ? stored_memory_bytes(source, module, *stored, own, MemoryOf::kCpu) : 0;
    if (counts) facts.memory_by_kind["tables"] += stored_table_bytes(*stored);
    device_memory = counts ? stored_memory_bytes(source, module, *stored, own, MemoryOf::kCuda) : 0;
  } else if (quantised && format) {
    facts.bytes_by_format[fmt::format("mlx affine {}-bit g{}", format->bits, format->group)] += bytes;
    facts.column_unit = std::max<int64_t>(facts.column_unit, format->group);
    // Scales and biases are part of the values' encoding, not parameters.
    values = tensor.name.ends_with(".weight") ? bytes * 8 / format->bits : 0;
    device_memory = affine_device_bytes(*format, source.find(module + ".scales")->dtype, values);
  } else {
    facts.bytes_by_format[lower(dtype_name(tensor.dtype))] += bytes;
    // Matrices are bf16 there, vectors fp32.
    if (tensor.shape.size() == 2 && tensor.dtype == Dtype::kF32) device_memory = bytes / 2;
  }
  facts.memory_by_kind[kind_of(path, skip)] += memory;
  facts.device_memory_by_kind[kind_of(path, skip)] += device_memory;
  facts.parameters += values;
  if (skip == Skip::kDrafter) {
    facts.drafter_parameters += values;
  } else if (path.starts_with("mtp.")) {
    facts.mtp_parameters += values;
  }
}

}  // namespace

bool held_whole(std::string_view kind) {
  return kind == "embedding" || kind == "norms" || kind == "router" || kind == "streams" || kind == "indexer" ||
         kind == "tables";
}

absl::StatusOr<ModelFacts> inspect_tensors(const TensorSource& source) {
  absl::StatusOr<Layout> layout = Layout::detect(source);
  if (!layout.ok()) return layout.status();
  const ModelConfig& config = source.config();
  ModelFacts facts;
  facts.family = std::string(family_name(config.family));
  facts.model_type = config.model_type;
  for (const std::string& name : source.names()) {
    count_tensor(source, *source.find(name), layout->skip(name), facts);
  }
  facts.layers = config.layer_count();
  facts.full_attention_layers = config.count(LayerKind::kFullAttention);
  facts.linear_attention_layers = config.count(LayerKind::kLinearAttention);
  facts.mamba2_layers = config.count(LayerKind::kMamba2);
  facts.has_mtp = layout->has_mtp();
  facts.has_drafter = layout->has_drafter();
  facts.tied_head = layout->tied_head();
  facts.heads = config.heads;
  facts.kv_heads = config.kv_heads;
  facts.linear_key_heads = config.linear.key_heads;
  facts.linear_value_heads = config.linear.value_heads;
  facts.intermediate_size = config.intermediate_size;
  facts.vocab_size = config.vocab_size;
  facts.kv_values_per_token =
      2 * config.kv_heads * config.head_dim * (facts.full_attention_layers + (facts.has_mtp ? 1 : 0));
  const LinearAttentionConfig& linear = config.linear;
  const int64_t channels = 2 * linear.key_heads * linear.key_dim + linear.value_heads * linear.value_dim;
  facts.recurrent_values_per_sequence =
      facts.linear_attention_layers * (linear.value_heads * linear.key_dim * linear.value_dim +
                                       channels * std::max<int64_t>(linear.conv_kernel - 1, 0));
  const Mamba2Config& mamba = config.mamba2;
  const int64_t width = mamba.heads * mamba.head_dim;
  facts.recurrent_values_per_sequence +=
      facts.mamba2_layers *
      (width * mamba.state + (width + 2 * mamba.groups * mamba.state) * std::max<int64_t>(mamba.conv_kernel - 1, 0));
  facts.notes = layout->notes();
  return facts;
}

absl::StatusOr<ModelFacts> inspect(const Checkpoint& checkpoint) {
  absl::StatusOr<ModelFacts> facts = inspect_tensors(checkpoint);
  if (!facts.ok()) return facts;
  for (const SafetensorsFile& file : checkpoint.files()) facts->file_bytes += static_cast<int64_t>(file.file_bytes());
  facts->header_hash = checkpoint.header_hash();
  return facts;
}

absl::StatusOr<ModelFacts> inspect(const std::string& dir) {
  absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint = Checkpoint::open(dir);
  if (!checkpoint.ok()) return checkpoint.status();
  return inspect(**checkpoint);
}

}  // namespace tensorfold
