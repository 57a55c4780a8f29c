// Gated streams and attention over chosen keys once more in double precision, as plain loops.
#pragma once

#include "kernels/ops/stream_ops.h"
#include "kernels/reference/reference.h"

namespace tensorfold {

RefMatrix ref_mix_streams(const RefMatrix& x, const RefMatrix& gate, int64_t count);
RefMatrix ref_inject_streams(const RefMatrix& x, const RefMatrix& inject, const RefMatrix& y, int64_t count);
RefMatrix ref_gate_streams(const RefMatrix& key, const RefMatrix& query, const RefMatrix& value, int64_t count);
/// Over a whole sequence from the empty state; conv [channels * taps].
RefMatrix ref_short_conv(const ShortConvShape& shape, const RefMatrix& x, std::span<const float> conv);

/// Of one sequence from position 0: the pooled keys of its whole windows.
RefMatrix ref_pool_means(const RefMatrix& keys, int64_t tokens, std::span<const float> norm, double eps,
                         std::span<const float> inv_freq);
/// The windows that each row chooses, ascending. `margin`: the smallest gap between a chosen score and one left out.
std::vector<std::vector<int64_t>> ref_select_windows(const RefMatrix& q, const RefMatrix& pooled, int64_t heads,
                                                     int64_t tokens, int64_t most, double* margin);
/// Attention of each row over the tokens of its windows and those after the last whole one.
RefMatrix ref_sparse_attention(const RefMatrix& q, const RefMatrix& keys, const RefMatrix& values, int64_t heads,
                               int64_t head_dim, std::span<const int32_t> kv_head_of,
                               const std::vector<std::vector<int64_t>>& windows, int64_t tokens, double scale);

}  // namespace tensorfold
