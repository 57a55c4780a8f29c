// Blocks of drafted rows once more in double precision, as plain loops.
#pragma once

#include "kernels/ops/block_ops.h"
#include "kernels/reference/reference.h"

namespace tensorfold {

/// Of one block; dynamic [rows, taps * width / group].
RefMatrix ref_block_conv(const RefMatrix& x, const RefMatrix& dynamic, std::span<const float> base, int64_t taps,
                         int64_t group);
/// Of one block behind `cached` rows [cached, kv_heads * head_dim].
RefMatrix ref_block_attention(const RefMatrix& q, const RefMatrix& k, const RefMatrix& v, const RefMatrix& cached_k,
                              const RefMatrix& cached_v, std::span<const int32_t> kv_head_of, int64_t head_dim,
                              double scale, int64_t window);

}  // namespace tensorfold
