// Where keys, values and queries lie, and how queries are cut into tiles: index arithmetic shared by host and device,
// so that it can be tested without a GPU.
#pragma once

#include <cstdint>

#include "kernels/numerics/host_device.h"
#include "kernels/numerics/padded_heads.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

/// Keys are visited in blocks of one page, splits are whole blocks; both at absolute positions.
inline constexpr int kBlockKeys = static_cast<int>(kPageTokens);
inline constexpr int kSplitBlocks = static_cast<int>(kKeySplit / kPageTokens);
static_assert(kKeySplit % kPageTokens == 0 && kBlockKeys == 64);

/// A block is [64 tokens][dim] in units of 8 values. Where unit `unit` of token `token` lies in its row: eight
/// consecutive tokens' units of one index fall on the eight 16-byte columns of the shared memory banks, so that
/// ldmatrix has no conflicts. The cache holds blocks in this order already; copying them to shared memory is linear.
/// Adding 16 to the token, or 8 to the unit, moves the result by 0 and 8.
template <int kDim>
TF_HOST_DEVICE constexpr int swizzled_unit(int token, int unit) {
  return kDim >= 64 ? unit ^ (token & 7) : unit ^ ((token >> 1) & 3);
}
TF_HOST_DEVICE constexpr int swizzled_unit(int dim, int token, int unit) {
  return dim >= 64 ? swizzled_unit<64>(token, unit) : swizzled_unit<32>(token, unit);
}

/// First block of the key block of (page, kv head) in a layer, counted in blocks; the value block is the next one.
TF_HOST_DEVICE constexpr int64_t cache_block(int64_t page, int64_t kv_heads, int64_t kv_head) {
  return (page * kv_heads + kv_head) * 2;
}

/// Tiles of `tile_queries` queries for the queries (row, head) of one key/value head: how many there can be when `rows`
/// rows are cut into at most `max_groups` groups, whatever the groups are. Each group starts a new tile.
TF_HOST_DEVICE constexpr int64_t tile_slots(int64_t rows, int64_t max_groups, int64_t heads_per_kv,
                                            int64_t tile_queries) {
  const int64_t groups = max_groups < rows ? max_groups : rows;
  return (rows * heads_per_kv + (tile_queries - 1) * groups) / tile_queries;
}

/// The power of two (its exponent) that brings a vector with this largest magnitude into e4m3's range (448), within
/// what keeps every product of an e4m3 value and the scale a finite bf16 value without rounding.
TF_HOST_DEVICE constexpr int fp8_exponent(uint32_t amax_bits) {
  // amax = f 2^k with f in [0.5, 1); 448 = 0.875 2^9.
  const int k = static_cast<int>(amax_bits >> 23) - 126;
  const int exponent = k - 9 + ((amax_bits & 0x7fffffu) > 0x600000u ? 1 : 0);
  return exponent < -110 ? -110 : exponent > 119 ? 119 : exponent;
}

}  // namespace tensorfold
