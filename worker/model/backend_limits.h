// What a backend's kernels can compute of a model, asked before any weight is read.
#pragma once

#include "absl/status/status.h"
#include "kernels/ops/ops.h"
#include "worker/checkpoint/model_config.h"

namespace tensorfold {

/// Unimplemented, naming the first value of config.json that is beyond `limits` and the bound.
absl::Status within_limits(const ModelConfig& config, const Ops::Limits& limits, const std::string& backend);

}  // namespace tensorfold
