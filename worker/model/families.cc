#include "worker/model/families.h"

#include <fmt/format.h>

#include <algorithm>

#include "worker/model/backend_limits.h"

namespace tensorfold {
namespace {

const FamilyEntry* const kFamilies[] = {&kLlamaEntry,    &kQwen3Entry,      &kQwen3MoeEntry,   &kQwen3NextEntry,
                                        &kQwen35Entry,   &kQwen35MoeEntry,  &kNemotronHEntry,  &kQwen4ExpEntry,
                                        &kGlm5NextEntry, &kDeepseekV4Entry, &kDeepseekV41Entry};

const FamilyEntry* find_family(Family family) {
  for (const FamilyEntry* entry : kFamilies) {
    if (entry->family == family) return entry;
  }
  return nullptr;
}

absl::Status unknown_family(const ModelConfig& config) {
  return absl::UnimplementedError(fmt::format("model_type \"{}\" has no family here", config.model_type));
}

}  // namespace

int64_t SlicePlan::widest_world() const {
  int64_t widest = kMaxSlices;
  for (const Dimension& dimension : dimensions) widest = std::min(widest, dimension.slices);
  return widest;
}

std::string SlicePlan::text() const {
  std::string text;
  for (const Dimension& dimension : dimensions) {
    text += fmt::format("{}{} {}/{}", text.empty() ? "" : ", ", dimension.name, dimension.units, dimension.slices);
  }
  return text;
}

std::vector<std::string> known_families() {
  std::vector<std::string> names;
  for (const FamilyEntry* entry : kFamilies) names.emplace_back(entry->name);
  return names;
}

absl::StatusOr<ModelShape> model_shape(const ModelConfig& config, ShardSpec shard) {
  const FamilyEntry* family = find_family(config.family);
  return family == nullptr ? unknown_family(config) : family->shape(config, shard);
}

absl::StatusOr<std::unique_ptr<Model>> load_model(const ModelConfig& config, WeightReader& reader, Ops& ops,
                                                  ShardSpec shard) {
  const FamilyEntry* family = find_family(config.family);
  if (family == nullptr) return unknown_family(config);
  if (config.experts.count > 0 && !ops.supports_experts()) {
    return absl::UnimplementedError(
        fmt::format("model_type {} has mixture-of-experts layers, which backend {} does not compute: run it with "
                    "backend cpu",
                    config.model_type, ops.fingerprint_name()));
  }
  if (is_latent(config.family) && !ops.supports_latents()) {
    return absl::UnimplementedError(
        fmt::format("model_type {} has attention over latents and a residual of several streams, which backend {} does "
                    "not compute: run it with backend cpu",
                    config.model_type, ops.fingerprint_name()));
  }
  if (config.family == Family::kDeepseekV41 && !(ops.supports_shared_latents() && ops.supports_gated_streams())) {
    return absl::UnimplementedError(
        fmt::format("model_type {} has pooled rows that layers share, activations of small formats and engram tables, "
                    "which backend {} does not compute: run it with backend cpu",
                    config.model_type, ops.fingerprint_name()));
  }
  if (config.gated_streams.count > 0 && !ops.supports_gated_streams()) {
    return absl::UnimplementedError(
        fmt::format("model_type {} has a residual of gated streams and attention over chosen keys, which backend {} "
                    "does not compute: run it with backend cpu",
                    config.model_type, ops.fingerprint_name()));
  }
  if (absl::Status s = within_limits(config, ops.limits(), ops.fingerprint_name()); !s.ok()) return s;
  absl::StatusOr<ModelShape> shape = family->shape(config, shard);
  if (!shape.ok()) return shape.status();
  if (!shape->row_layers.empty() && !ops.supports_row_caches()) {
    return absl::UnimplementedError(fmt::format(
        "model_type {} keeps rows beside keys and values (latents, indexer keys), which backend {} does not "
        "compute: run it with backend cpu",
        config.model_type, ops.fingerprint_name()));
  }
  for (const StateShape& state : shape->recurrent) {
    const std::string wrong = ops.state_error(state);
    if (wrong.empty()) continue;
    return absl::UnimplementedError(
        fmt::format("model_type {} has recurrent layers that backend {} does not compute "
                    "({}): run it with backend cpu",
                    config.model_type, ops.fingerprint_name(), wrong));
  }
  LoadContext load = {config, reader, ops, shard};
  return family->load(load, *shape);
}

ModuleNames module_names(const ModelConfig& config) {
  if (config.family == Family::kNemotronH) return {"mixer.o_proj", "mixer", ".shared_experts"};
  if (config.family == Family::kGlm5Next) return {"self_attn.o_proj", "mlp", ".shared_experts"};
  if (is_deepseek(config.family)) return {"attn.wo_b", "ffn", ".shared_experts"};
  return {"self_attn.o_proj", "mlp", ".shared_expert"};
}

int64_t column_unit(const ModelConfig& config, const std::string& module) {
  int64_t unit = 1;
  const auto look = [&](const std::string& path) {
    const std::optional<AffineFormat> format = config.quantization.of(path);
    if (format.has_value()) unit = std::max<int64_t>(unit, format->group);
  };
  for (int64_t layer = 0; layer < config.layer_count(); ++layer) look(fmt::format("layers.{}.{}", layer, module));
  if (config.mtp_layers > 0) {
    look("mtp.layers.0." + module);
    look("mtp.layers.1." + module);
    look(fmt::format("layers.{}.{}", config.layer_count(), module));
  }
  return unit;
}

Slices head_slices(const ModelConfig& config) {
  if (config.latent.out_groups > 0) {  // groups of heads are projected together
    return cut_dimension(config.latent.out_groups, config.latent.out_rank,
                         column_unit(config, module_names(config).attention_out));
  }
  return cut_dimension(config.heads, config.head_dim, column_unit(config, module_names(config).attention_out));
}

namespace {

int64_t mlp_column_unit(const ModelConfig& config) {
  return column_unit(config, fmt::format("{}.down_proj", module_names(config).mlp));
}

}  // namespace

Slices mlp_slices(const ModelConfig& config) {
  const int64_t unit = mlp_column_unit(config);
  return make_slices(config.intermediate_size / unit);
}

namespace {

// How experts may be named: one module each, or stacked ones.
int64_t expert_column_unit(const ModelConfig& config) {
  const std::string mlp = module_names(config).mlp;
  const char* down = is_deepseek(config.family) ? "w2" : "down_proj";
  int64_t unit = 1;
  for (const char* stacked : {".experts.down_proj", ".switch_mlp.down_proj", ".switch_mlp.fc2"}) {
    unit = std::max(unit, column_unit(config, mlp + stacked));
  }
  // Only entries for single modules tell one expert from another.
  const int64_t named = config.quantization.modules.empty() ? 1 : config.experts.count;
  for (int64_t e = 0; e < named; ++e) {
    unit = std::max(unit, column_unit(config, fmt::format("{}.experts.{}.{}", mlp, e, down)));
  }
  return unit;
}

int64_t shared_column_unit(const ModelConfig& config) {
  const ModuleNames names = module_names(config);
  const char* down = is_deepseek(config.family) ? "w2" : "down_proj";
  return column_unit(config, fmt::format("{}{}.{}", names.mlp, names.shared_expert, down));
}

// S of both: what the units of each divide by.
int64_t expert_slice_count(const ModelConfig& config) {
  const ExpertsConfig& experts = config.experts;
  int64_t count = make_slices(experts.intermediate_size / expert_column_unit(config)).count;
  if (experts.shared_intermediate_size > 0) {
    count = std::min(count, make_slices(experts.shared_intermediate_size / shared_column_unit(config)).count);
  }
  return count;
}

absl::Status add_mlp(const ModelConfig& config, ModelShape& shape, ShardSpec shard) {
  const int64_t group = mlp_column_unit(config);
  if (config.intermediate_size % group != 0) {
    return absl::InvalidArgumentError(fmt::format("intermediate_size {} does not end on a quantisation group of {}",
                                                  config.intermediate_size, group));
  }
  return add_dimension(shape, group == 1 ? "mlp columns" : "mlp column groups", mlp_slices(config), shard);
}

absl::Status add_experts(const ModelConfig& config, ModelShape& shape, ShardSpec shard) {
  struct Part {
    const char* key;
    const char* name;
    int64_t columns, unit;
  };
  const ExpertsConfig& experts = config.experts;
  std::vector<Part> parts = {
      {"moe_intermediate_size", "expert column", experts.intermediate_size, expert_column_unit(config)}};
  if (experts.shared_intermediate_size > 0) {
    parts.push_back(
        {experts.shared_gate ? "shared_expert_intermediate_size" : "moe_intermediate_size * n_shared_experts",
         "shared expert column", experts.shared_intermediate_size, shared_column_unit(config)});
  }
  for (const Part& part : parts) {
    if (part.columns % part.unit == 0) continue;
    return absl::InvalidArgumentError(
        fmt::format("{} {} does not end on a quantisation group of {}", part.key, part.columns, part.unit));
  }
  for (const Part& part : parts) {
    const std::string name = fmt::format("{}{}", part.name, part.unit == 1 ? "s" : " groups");
    const Slices slices = {part.columns / part.unit, expert_slice_count(config)};
    if (absl::Status s = add_dimension(shape, name, slices, shard); !s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace

Slices expert_slices(const ModelConfig& config) {
  return {config.experts.intermediate_size / expert_column_unit(config), expert_slice_count(config)};
}

Slices shared_expert_slices(const ModelConfig& config) {
  return {config.experts.shared_intermediate_size / shared_column_unit(config), expert_slice_count(config)};
}

Slices vocab_slices(const ModelConfig& config) { return make_slices(config.vocab_size); }

absl::Status add_dimension(ModelShape& shape, const std::string& name, const Slices& slices, ShardSpec shard) {
  if (shard.world > slices.count) {
    return absl::InvalidArgumentError(
        fmt::format("{} ranks are too many for this model: its {} {} cut into {} slice{}, so the widest world is {}",
                    shard.world, slices.units, name, slices.count, slices.count == 1 ? "" : "s", slices.count));
  }
  shape.slices.dimensions.push_back({name, slices.units, slices.count});
  return absl::OkStatus();
}

absl::StatusOr<ModelShape> decoder_shape(const ModelConfig& config, ShardSpec shard) {
  if (shard.world < 1 || shard.world > kMaxSlices || shard.rank < 0 || shard.rank >= shard.world) {
    return absl::InvalidArgumentError(
        fmt::format("rank {} of {}: a world has 1 to {} ranks", shard.rank, shard.world, kMaxSlices));
  }
  ModelShape shape;
  shape.hidden = config.hidden_size;
  shape.vocab = config.vocab_size;
  shape.layers = config.layer_count();
  shape.context_length = config.max_positions;
  shape.head_dim = config.head_dim;
  const char* heads = config.latent.out_groups > 0 ? "groups of attention heads" : "attention heads";
  if (absl::Status s = add_dimension(shape, heads, head_slices(config), shard); !s.ok()) return s;
  if (config.count(MlpKind::kDense) > 0) {
    if (absl::Status s = add_mlp(config, shape, shard); !s.ok()) return s;
  }
  if (config.experts.count > 0) {
    if (absl::Status s = add_experts(config, shape, shard); !s.ok()) return s;
  }
  if (absl::Status s = add_dimension(shape, "vocabulary rows", vocab_slices(config), shard); !s.ok()) return s;
  const AttentionSpec attention = {
      .heads = config.heads, .kv_heads = config.kv_heads, .head_dim = config.head_dim, .slices = head_slices(config)};
  shape.kv_heads = kv_share(attention, make_cut(attention.slices, shard)).count;
  const Cut vocabulary = make_cut(vocab_slices(config), shard);
  shape.first_vocab_id = vocabulary.first_unit();
  shape.local_vocab = vocabulary.unit_count();
  return shape;
}

}  // namespace tensorfold
