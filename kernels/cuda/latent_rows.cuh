// Rows of a cache as the kernels of latents find them.
#pragma once

#include "kernels/cuda/latents.h"

namespace tensorfold {

/// The row that holds `position` of a sequence with this page table.
__device__ __forceinline__ float* latent_row(const DeviceRowLayer& layer, const int32_t* pages, int64_t position) {
  const int64_t page = pages[position / kPageTokens];
  const int of_page = static_cast<int>(position % kPageTokens) / layer.tokens;
  return layer.data + page * layer.page_floats + static_cast<int64_t>(of_page) * layer.width;
}

/// Fp32 or rounded, as the output is.
__device__ __forceinline__ void put_output(const DeviceOutput& out, int64_t row, int64_t column, float x) {
  if (out.f.data != nullptr) {
    out.f.data[row * out.f.stride + column] = x;
  } else {
    out.b.data[row * out.b.stride + column] = __float2bfloat16_rn(x);
  }
}

}  // namespace tensorfold
