// WorldSum for tensors in GPU memory: partials are folded, nodes travel and the tree is finished in the order of the
// backend's stream, so that a whole pass is enqueued (or one graph) without the host in between.
#pragma once

#include <memory>

#include "kernels/ops/ops.h"
#include "worker/runtime/world_sum.h"

namespace tensorfold {

/// Null if `ops` is no CUDA backend.
std::unique_ptr<WorldSum> make_device_sum(Ops& ops);

}  // namespace tensorfold
