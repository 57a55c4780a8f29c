// How accumulators of a product become outputs.
#pragma once

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/matmul_format.cuh"

namespace tensorfold {

/// Writes the accumulators of a warp: kTiles tiles of 16 weight rows from `first_tile` by kRowTiles tiles of 8 rows of
/// the pass from `first_row`. Lane (g, t) has weight rows g and g + 8, rows of the pass 2t and 2t + 1, or, where the
/// kernel's columns are row_of_column(), t and t + 4 (kSpread).
template <bool kSpread = false, int kTiles, int kRowTiles>
__device__ __forceinline__ void store_accumulators(const MatmulView& view, MatmulEpilogue epilogue, int rows,
                                                   int first_tile, int first_row, int lane,
                                                   const float (&acc)[kTiles][kRowTiles][4]) {
  const int g = lane / 4;
  const bool plain = epilogue == MatmulEpilogue::kStore;
  const int first_col = first_tile * (plain ? 16 : 8) + g;
  const int left = view.out_cols - first_col;  // tiles that there are not begin beyond it
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = first_row + 8 * j + (kSpread ? lane % 4 + 4 * c : 2 * (lane % 4) + c);
      if (row >= rows) continue;
      const int64_t at = row * view.out_stride + first_col;
      if (plain) {
        float* out = static_cast<float*>(view.out) + at;
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          if (16 * m < left) out[16 * m] = acc[m][j][c];
          if (16 * m + 8 < left) out[16 * m + 8] = acc[m][j][2 + c];
        }
      } else {
        __nv_bfloat16* out = static_cast<__nv_bfloat16*>(view.out) + at;
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const float product = __fmul_rn(silu(acc[m][j][c]), acc[m][j][2 + c]);
          if (8 * m < left) out[8 * m] = __float2bfloat16_rn(product);
        }
      }
    }
  }
}

}  // namespace tensorfold
