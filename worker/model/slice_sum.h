// The sum over a cut contraction: the fixed tree of the exactness contract, section 2, over all ranks' slices.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

/// Adds the partial results of a contraction whose K is cut into slices. Implemented by the runtime, which knows the
/// ranks; a family only knows which slices it owns.
class SliceSum {
 public:
  virtual ~SliceSum() = default;
  /// residual += tree(partials of all `slices`), the same bits on every rank. `partials[i]` [rows, cols] (contiguous)
  /// is slice `first + i`; they are used as scratch. Errors: the exchange's (deadline, lost peer), naming the peer.
  virtual absl::Status add(int64_t slices, int64_t first, std::span<const Tensor> partials, Tensor residual) = 0;
};

/// Sees intermediate values, for the differential tester to name the first row, layer and op that differ.
class Trace {
 public:
  virtual ~Trace() = default;
  /// A forward pass begins; row r is position positions[r] of the sequence in slot slots[r].
  virtual void begin_pass(std::span<const int64_t> positions, std::span<const uint32_t> slots) = 0;
  /// `value` [rows, units * k]: unit u of the rows is global unit `first_unit + u` of `op`. Replicated values have one
  /// unit.
  virtual void record(int layer, const char* op, Tensor value, int64_t first_unit, int64_t units) = 0;
};

}  // namespace tensorfold
