// What qwen3 and its relative with experts share.
#pragma once

#include "worker/model/families.h"

namespace tensorfold {

/// Attention in every layer, with query and key norms; MLPs or experts as the configuration says.
absl::StatusOr<ModelShape> qwen3_shape(const ModelConfig& config, ShardSpec shard);
absl::StatusOr<std::unique_ptr<Model>> load_qwen3(LoadContext& load, const ModelShape& shape);

}  // namespace tensorfold
