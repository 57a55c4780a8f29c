// Where a Mamba2 layer keeps things: the state block. Index functions only, for kernels and tests alike.
#pragma once

#include "kernels/cuda/recurrence_layout.h"

namespace tensorfold {

/// A state block is `groups` parts of `group` floats, one for each group of heads, complete in itself. The S of its
/// heads come first, as [head_dim][state]. Offsets within a part, in floats.
struct Mamba2StateLayout {
  int64_t head = 0;        // floats of a head's S
  int64_t arrivals = 0;    // int32: blocks of the group that are done with a pass; zero between passes
  int64_t rows = 0;        // [taps - 1 + max_window, row_floats]: the convolution's history, then the kept rows
  int64_t dt = 0;          // [max_window, heads of the group], of the kept rows
  int64_t group = 0;       // floats of a part
  int32_t row_floats = 0;  // x of the group's heads | B | C, before the convolution
};

/// `together`: heads of a group.
constexpr Mamba2StateLayout mamba2_state_layout(int64_t together, int64_t head_dim, int64_t state, int64_t taps,
                                                int64_t window) {
  Mamba2StateLayout at;
  at.row_floats = static_cast<int32_t>(together * head_dim + 2 * state);
  at.head = head_dim * state;
  at.arrivals = together * at.head;
  at.rows = at.arrivals + 4;
  at.dt = at.rows + (taps - 1 + window) * at.row_floats;
  at.group = (at.dt + window * together + 31) / 32 * 32;  // parts start at whole lines
  return at;
}

}  // namespace tensorfold
