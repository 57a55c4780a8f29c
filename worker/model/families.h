// The families that this build knows: one file each, found by model_type.
#pragma once

#include "worker/model/blocks.h"

namespace tensorfold {

/// What a family file offers.
struct FamilyEntry {
  Family family;
  const char* name;
  absl::StatusOr<ModelShape> (*shape)(const ModelConfig& config, ShardSpec shard);
  absl::StatusOr<std::unique_ptr<Model>> (*load)(LoadContext& load, const ModelShape& shape);
};

extern const FamilyEntry kLlamaEntry;        // llama.cc
extern const FamilyEntry kQwen3Entry;        // qwen3.cc
extern const FamilyEntry kQwen3MoeEntry;     // qwen3_moe.cc
extern const FamilyEntry kQwen3NextEntry;    // qwen3_next.cc
extern const FamilyEntry kQwen35Entry;       // qwen3_5.cc
extern const FamilyEntry kQwen35MoeEntry;    // qwen3_5_moe.cc
extern const FamilyEntry kNemotronHEntry;    // nemotron_h.cc
extern const FamilyEntry kQwen4ExpEntry;     // qwen4_exp.cc
extern const FamilyEntry kGlm5NextEntry;     // glm5_next.cc
extern const FamilyEntry kDeepseekV4Entry;   // deepseek_v4.cc
extern const FamilyEntry kDeepseekV41Entry;  // deepseek_v41.cc

/// How a family calls the modules whose columns are cut: paths in a layer.
struct ModuleNames {
  const char* attention_out;  // "self_attn.o_proj"
  const char* mlp;            // "mlp": of MLPs and experts
  const char* shared_expert;  // ".shared_expert": after the one before
};
ModuleNames module_names(const ModelConfig& config);

/// The largest quantisation group over all layers' `module` ("self_attn.o_proj"); 1 when none is quantised.
int64_t column_unit(const ModelConfig& config, const std::string& module);

/// Fills in what all decoders share: hidden size, vocabulary and its cut, MLP, expert and head cuts, this rank's
/// key/value heads.
absl::StatusOr<ModelShape> decoder_shape(const ModelConfig& config, ShardSpec shard);

/// Adds a dimension to the plan and refuses a world wider than its S, naming it.
absl::Status add_dimension(ModelShape& shape, const std::string& name, const Slices& slices, ShardSpec shard);

Slices head_slices(const ModelConfig& config);
Slices mlp_slices(const ModelConfig& config);
/// Expert columns and the shared expert's, cut into equally many slices: a slice holds a part of both.
Slices expert_slices(const ModelConfig& config);
Slices shared_expert_slices(const ModelConfig& config);
Slices vocab_slices(const ModelConfig& config);

}  // namespace tensorfold
