// The order of candidates as one integer.
#pragma once

#include <cstdint>

#include "kernels/numerics/host_device.h"

namespace tensorfold {

/// Larger for what comes first by (logit descending, column ascending). `bits` are the logit's; both zeros are equal,
/// NaNs come last. Never 0 for columns below 2^31, so 0 can stand for "none". No two columns have the same key, which
/// makes the order total: whatever finds the largest keys finds the same ones.
TF_HOST_DEVICE inline uint64_t candidate_key(uint32_t bits, int32_t column) {
  const uint32_t magnitude = bits & 0x7fffffffu;
  const bool negative = magnitude != 0 && bits != magnitude;
  uint32_t ordered = negative ? ~bits : magnitude | 0x80000000u;
  if (magnitude > 0x7f800000u) ordered = 0;
  return static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(column);
}

/// The column of a key.
TF_HOST_DEVICE inline int32_t candidate_column(uint64_t key) {
  return static_cast<int32_t>(~static_cast<uint32_t>(key));
}

}  // namespace tensorfold
