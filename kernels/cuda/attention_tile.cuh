// A warp's 16 queries against a block of 64 keys, as in FlashAttention-2 (Dao, 2023): scores, their softmax, and
// values. What attention_tile.cu and attention_block.cu share; attention.cu says the arithmetic.
#pragma once

#include "kernels/cuda/attention_kernels.cuh"

namespace tensorfold {

/// Addresses of a lane for ldmatrix within a [16 or more tokens][kDim] tile: units 2 j + {0, 1}; the other units lie
/// 128 bytes further for each 8, other tokens 16 rows.
template <int kDim>
struct LaneAddresses {
  static constexpr int kCount = kDim >= 64 ? 4 : kDim / 16;
  uint32_t at[kCount];
  __device__ __forceinline__ LaneAddresses(int token, int unit) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) at[j] = (token * (kDim / 8) + swizzled_unit<kDim>(token, 2 * j + unit)) * 16;
  }
  /// Step j of 16 values.
  __device__ __forceinline__ uint32_t step(int j) const { return at[j % kCount] + (j / kCount) * 128; }
};

/// scores[n][.] of 16 queries and 64 keys: each one chain over dims in steps of 16, ascending.
template <int kDim, bool kInRegisters>
__device__ __forceinline__ void score_block(float (&scores)[8][4], const uint32_t (*queries)[4], uint32_t query_tile,
                                            const LaneAddresses<kDim>& query_lanes, uint32_t keys,
                                            const LaneAddresses<kDim>& key_lanes) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[4];
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = queries[k][i];
    } else {
      load_matrices(a, query_tile + query_lanes.step(k));
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t b[4];
      load_matrices(b, keys + key_lanes.step(k) + n * 16 * kDim * 2);
      mma_m16n8k16(scores[2 * n], a, b[0], b[1]);
      mma_m16n8k16(scores[2 * n + 1], a, b[2], b[3]);
    }
  }
}

/// Scores become weights; state.max and the rescaling of what was summed so far.
__device__ __forceinline__ void softmax_block(float (&scores)[8][4], SoftmaxState (&state)[2], float factor,
                                              float (&rescale)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float block_max = kMinusInfinity;
#pragma unroll
    for (int n = 0; n < 8; ++n) block_max = fmaxf(block_max, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
    block_max = fmaxf(block_max, __shfl_xor_sync(0xffffffffu, block_max, 1));
    block_max = fmaxf(block_max, __shfl_xor_sync(0xffffffffu, block_max, 2));
    const float base = next_max(&state[half].max, block_max, factor, &rescale[half]);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      scores[n][2 * half] = weight(scores[n][2 * half], base, factor);
      scores[n][2 * half + 1] = weight(scores[n][2 * half + 1], base, factor);
    }
  }
}

/// What was summed so far, relative to a larger score.
template <int kTiles>
__device__ __forceinline__ void rescale_sums(SoftmaxState (&state)[2], float (&o)[kTiles][4],
                                             const float (&rescale)[2]) {
  state[0].sum = __fmul_rn(state[0].sum, rescale[0]);
  state[1].sum = __fmul_rn(state[1].sum, rescale[1]);
  if (!__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    o[t][0] = __fmul_rn(o[t][0], rescale[0]);
    o[t][1] = __fmul_rn(o[t][1], rescale[0]);
    o[t][2] = __fmul_rn(o[t][2], rescale[1]);
    o[t][3] = __fmul_rn(o[t][3], rescale[1]);
  }
}

/// o += P V and sums += P 1, over keys in steps of 16, ascending.
template <int kDim>
__device__ __forceinline__ void value_block(const float (&weights)[8][4], float (&o)[kDim / 8][4],
                                            SoftmaxState (&state)[2], uint32_t values,
                                            const LaneAddresses<kDim>& value_lanes) {
  float sums[4] = {state[0].sum, state[0].sum, state[1].sum, state[1].sum};
#pragma unroll
  for (int k = 0; k < kBlockKeys / 16; ++k) {
    const uint32_t a[4] = {pack_bf16(weights[2 * k][0], weights[2 * k][1]),
                           pack_bf16(weights[2 * k][2], weights[2 * k][3]),
                           pack_bf16(weights[2 * k + 1][0], weights[2 * k + 1][1]),
                           pack_bf16(weights[2 * k + 1][2], weights[2 * k + 1][3])};
    mma_m16n8k16(sums, a, kBf16One, kBf16One);
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t b[4];
      load_matrices_transposed(b, values + value_lanes.step(n) + k * 16 * kDim * 2);
      mma_m16n8k16(o[2 * n], a, b[0], b[1]);
      mma_m16n8k16(o[2 * n + 1], a, b[2], b[3]);
    }
  }
  state[0].sum = sums[0];
  state[1].sum = sums[2];
}

}  // namespace tensorfold
