// What qwen3_5 and its relatives share.
#pragma once

#include "worker/model/families.h"

namespace tensorfold {

/// Gated delta nets and gated attention, MLPs or experts, and an MTP layer, as the configuration says.
absl::StatusOr<ModelShape> qwen3_5_shape(const ModelConfig& config, ShardSpec shard);
absl::StatusOr<std::unique_ptr<Model>> load_qwen3_5(LoadContext& load, const ModelShape& shape);

DeltaNetSpec qwen3_5_delta_net(const ModelConfig& config);

}  // namespace tensorfold
