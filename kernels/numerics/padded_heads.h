// How wide CUDA keeps a head of keys and values: for its cache, and for plans of memory.
#pragma once

#include <cstdint>

#include "kernels/numerics/host_device.h"

namespace tensorfold {

/// Values that a head takes in the cache and in the kernels: 32, 64, 128 or 256, the rest zeros; 0 if not supported.
TF_HOST_DEVICE constexpr int padded_head_dim(int64_t head_dim) {
  if (head_dim <= 0 || head_dim % 8 != 0 || head_dim > 256) return 0;
  return head_dim <= 32 ? 32 : head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}

}  // namespace tensorfold
