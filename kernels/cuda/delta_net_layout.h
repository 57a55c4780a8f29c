// Where the gated delta net keeps things: the state block and which lane holds what of S. Index functions only, for
// kernels and tests alike.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define TF_DELTA_FN __host__ __device__ __forceinline__
#else
#define TF_DELTA_FN inline
#endif

namespace tensorfold {

inline constexpr int kDeltaUnit = 4;      // columns of S that a warp's lanes hold side by side
inline constexpr int kDeltaSegments = 8;  // lanes that share a column's rows
inline constexpr int kDeltaMaxTaps = 16;  // longest convolution

constexpr int64_t delta_round4(int64_t n) { return (n + 3) / 4 * 4; }

/// A state block is v_heads heads of `head` floats, each complete in itself (value heads of one key head have q and k
/// inputs of their own), so that blocks of threads that work on different heads never meet. S comes first, as [dv][dk].
/// Offsets within a head, in floats.
struct DeltaStateLayout {
  int64_t arrivals = 0;    // int32: blocks of the head that are done with a pass; zero between passes
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
  at.arrivals = dv * dk;
  at.rows = at.arrivals + 4;
  at.b = at.rows + (taps - 1 + window) * at.row_floats;
  at.a = at.b + delta_round4(window);
  at.head = (at.a + window * decays + 31) / 32 * 32;  // heads start at whole lines
  return at;
}

/// A lane of a stepping warp holds rows 32 m + 4 segment + e of its column. Neighbouring lanes have the same rows, so
/// that a half warp's 16-byte loads of k and q touch each bank once.
TF_DELTA_FN int delta_lane_column(int lane) { return (lane & 1) | (lane >> 4) << 1; }
TF_DELTA_FN int delta_lane_segment(int lane) { return lane >> 1 & 7; }
/// Float within a unit's columns that lane holds as its row 32 m + 4 segment + e.
TF_DELTA_FN int delta_lane_offset(int dk, int lane, int m, int e) {
  return delta_lane_column(lane) * dk + m * 32 + delta_lane_segment(lane) * 4 + e;
}

}  // namespace tensorfold
