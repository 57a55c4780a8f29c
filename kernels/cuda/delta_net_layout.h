// Where the gated delta net keeps things: the state block, shared memory, and which lane holds what of S. Index
// functions only, for kernels and tests alike.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define TF_DELTA_FN __host__ __device__ __forceinline__
#else
#define TF_DELTA_FN inline
#endif

namespace tensorfold {

inline constexpr int kDeltaChunk = 16;      // rows between two updates of S, counted from the sequence's first
inline constexpr int kDeltaTile = 16;       // columns of S (dv) that a warp holds
inline constexpr int kDeltaMaxTaps = 16;    // longest convolution
inline constexpr int kDeltaClockBits = 40;  // fraction bits of a decay's -log2

constexpr int64_t delta_round4(int64_t n) { return (n + 3) / 4 * 4; }

/// A state block is v_heads heads of `head` floats, each complete in itself, so that a block of threads that owns a
/// value head needs nothing that another writes. Offsets within a head, in floats.
///
/// S is the state after the last whole chunk of 16 committed rows. `rows` holds the inputs of the convolution since
/// then ([q | k | v] of the head, value heads of one key head each with q and k of their own): taps - 1 rows before the
/// chunk, up to 15 committed ones (`fill`), and the last window's tentative ones. A, b: likewise, without the first.
struct DeltaStateLayout {
  int64_t fill = 0;       // int32: committed rows after S
  int64_t rows = 0;       // [taps - 1 + 15 + max_window, row_floats], oldest first
  int64_t b = 0;          // [15 + max_window]
  int64_t a = 0;          // [15 + max_window]
  int64_t head = 0;       // floats of a head
  int32_t row_floats = 0;
  int32_t kept = 0;       // 15 + max_window
};

constexpr int64_t delta_tiles(int64_t dv) { return (dv + kDeltaTile - 1) / kDeltaTile; }

constexpr DeltaStateLayout delta_state_layout(int64_t dk, int64_t dv, int64_t taps, int64_t window) {
  DeltaStateLayout at;
  at.row_floats = static_cast<int32_t>(2 * dk + dv);
  at.kept = static_cast<int32_t>(kDeltaChunk - 1 + window);
  at.fill = delta_tiles(dv) * kDeltaTile * dk;
  at.rows = at.fill + 4;
  at.b = at.rows + (taps - 1 + at.kept) * at.row_floats;
  at.a = at.b + delta_round4(at.kept);
  at.head = at.a + delta_round4(at.kept);
  return at;
}

/// Two warps share a tile of 16 columns, each with half the rows (dk). A lane holds, of the half's rows 8 j .. 8 j + 7,
/// four values of S: those of mma_m16n8k16's accumulator, columns being the accumulator's rows.
TF_DELTA_FN int delta_lane_column(int lane, int e) { return lane / 4 + 8 * (e / 2); }
TF_DELTA_FN int delta_lane_row(int lane, int j, int e) { return 8 * j + 2 * (lane % 4) + e % 2; }
/// Float within S of value e of rows j.
TF_DELTA_FN int delta_lane_offset(int dk, int tile, int half, int lane, int j, int e) {
  return (((tile * 2 + half) * (dk / 16) + j) * 32 + lane) * 4 + e;
}

}  // namespace tensorfold
