// Where the gated delta net keeps things: the state block and which lane holds what of S. Index functions only, for
// kernels and tests alike.
#pragma once

#include "kernels/cuda/recurrence_layout.h"

namespace tensorfold {

/// A state block is v_heads heads of `head` floats, each complete in itself (value heads of one key head have q and k
/// inputs of their own), so that blocks of threads that work on different heads never meet. S comes first, as [dv][dk].
/// Offsets within a head, in floats.
struct DeltaStateLayout {
  int64_t rows = 0;        // [taps - 1 + max_window, row_floats]: the convolution's history, then the kept rows
  int64_t b = 0;           // [max_window], of the kept rows
  int64_t a = 0;           // [max_window, decays of a head]
  int64_t head = 0;        // floats of a head
  int32_t row_floats = 0;  // q, k of the key head and v of the head
};

/// `decays`: 1, or dk where each key channel has its own.
constexpr DeltaStateLayout delta_state_layout(int64_t dk, int64_t dv, int64_t taps, int64_t window,
                                              int64_t decays = 1) {
  DeltaStateLayout at;
  at.row_floats = static_cast<int32_t>(2 * dk + dv);
  at.rows = dv * dk;
  at.b = at.rows + (taps - 1 + window) * at.row_floats;
  at.a = at.b + round_to_four(window);
  at.head = (at.a + window * decays + 31) / 32 * 32;  // heads start at whole lines
  return at;
}

/// A lane of a stepping warp holds rows 32 m + 4 segment + e of its column: the float of one within the warp's columns.
TF_HOST_DEVICE inline int delta_lane_offset(int dk, int lane, int m, int e) {
  return lane_column(lane) * dk + m * 32 + lane_segment(lane) * 4 + e;
}

}  // namespace tensorfold
