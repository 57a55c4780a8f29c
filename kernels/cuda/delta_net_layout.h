// Where the gated delta net keeps things: the state block, the workspace, and which columns a block of the recurrence
// owns. Index functions only, for kernels and tests alike.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define TF_DELTA_FN __host__ __device__ __forceinline__
#else
#define TF_DELTA_FN inline
#endif

namespace tensorfold {

inline constexpr int kDeltaUnit = 4;          // columns of S that a warp's lanes hold side by side
inline constexpr int kDeltaSegments = 8;      // lanes that share a column's rows
inline constexpr int kDeltaWarps = 4;         // warps of a block that step; as many again feed them
inline constexpr int kDeltaMaxTaps = 16;      // longest convolution
inline constexpr int kDeltaClockBits = 40;    // fraction bits of the decay clock (see delta_net_steps.cu)
inline constexpr int kDeltaRescaleBits = 46;  // S is rescaled where the clock passes a multiple of 2^6 octaves

/// Offsets into a state block, in floats. S comes unit after unit (4 columns), each as the lanes of a warp load it.
struct DeltaStateLayout {
  int64_t clock = 0;     // uint64 [units]: each unit its own copy, so that no block reads what another writes
  int64_t history = 0;   // [taps - 1, channels], oldest first
  int64_t kept_qkv = 0;  // [max_window, channels]
  int64_t kept_b = 0;    // [max_window, v_heads]
  int64_t kept_a = 0;    // [max_window, v_heads]
  int64_t floats = 0;
};

constexpr int64_t delta_round4(int64_t n) { return (n + 3) / 4 * 4; }

constexpr DeltaStateLayout delta_state_layout(int64_t units, int64_t dk, int64_t taps, int64_t channels,
                                              int64_t v_heads, int64_t window) {
  DeltaStateLayout at;
  at.clock = units * kDeltaUnit * dk;
  at.history = at.clock + delta_round4(2 * units);
  at.kept_qkv = at.history + (taps - 1) * channels;
  at.kept_b = at.kept_qkv + window * channels;
  at.kept_a = at.kept_b + window * v_heads;
  at.floats = delta_round4(at.kept_a + window * v_heads);
  return at;
}

/// Which units a block of the recurrence owns. A span is a run of value heads with one key head; blocks never cross it.
struct DeltaSplit {
  int32_t span_units = 0;
  int32_t block_units = 0;
  int32_t blocks_per_span = 0;
  int32_t blocks = 0;  // of one group
};

constexpr DeltaSplit delta_split(int32_t units, int32_t span_units, int32_t block_units) {
  DeltaSplit split;
  split.span_units = span_units;
  split.block_units = block_units;
  split.blocks_per_span = (span_units + block_units - 1) / block_units;
  split.blocks = units / span_units * split.blocks_per_span;
  return split;
}
/// First unit of a block, and how many it has.
TF_DELTA_FN int delta_block_first(const DeltaSplit& split, int block) {
  return block / split.blocks_per_span * split.span_units + block % split.blocks_per_span * split.block_units;
}
TF_DELTA_FN int delta_block_count(const DeltaSplit& split, int block) {
  const int left = split.span_units - block % split.blocks_per_span * split.block_units;
  return left < split.block_units ? left : split.block_units;
}
TF_DELTA_FN int delta_block_of(const DeltaSplit& split, int unit) {
  return unit / split.span_units * split.blocks_per_span + unit % split.span_units / split.block_units;
}

/// A lane of a stepping warp holds rows 32 m + 4 segment + e of its column. Neighbouring lanes have the same rows, so
/// that a half warp's 16-byte loads of k and q touch each bank once.
TF_DELTA_FN int delta_lane_column(int lane) { return (lane & 1) | (lane >> 4) << 1; }
TF_DELTA_FN int delta_lane_segment(int lane) { return lane >> 1 & 7; }
/// Float of S [unit] that lane holds as its row 32 m + 4 segment + e: lanes load 16 bytes side by side.
TF_DELTA_FN int delta_lane_offset(int lane, int m, int e) { return (m * 32 + lane) * 4 + e; }

}  // namespace tensorfold
