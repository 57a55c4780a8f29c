// The row-by-row operations: norms, sums over slices, activations, copies, rotation tables, candidates.
#pragma once

#include <span>

#include "kernels/cuda/device.h"
#include "kernels/numerics/tree.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

/// x [rows, heads * dim]: out = x * rsqrt(mean over dim of x^2 + eps) * weight[dim]. Exactly one of out_f and out_b has
/// data; out_f may be x.
void cuda_rms_norm(cudaStream_t stream, DeviceMatrix x, int64_t heads, const float* weight, float eps,
                   DeviceMatrix out_f, DeviceInput out_b);

/// Up to 16 parts [rows, cols] of equal stride, added as `steps` says (part[dst] += part[src], in order; the result is
/// part 0's). The parts themselves are not changed.
struct CudaTreeSum {
  const float* parts[16] = {};
  int64_t part_stride = 0;
  int part_count = 0;
  AddStep steps[16];
  int step_count = 0;
};
/// 8, 4, 2 or 1 if the plan leaves the balanced tree over all parts, as the contract draws it, in part 0; else 0.
int balanced_parts(const CudaTreeSum& sum);
/// residual += tree, then, if `weight` is not null, out = rms_norm(residual): one launch. rows small or large.
void cuda_sum_norm(cudaStream_t stream, const CudaTreeSum& sum, DeviceMatrix residual, const float* weight, float eps,
                   DeviceMatrix out_f, DeviceInput out_b);
/// For each root r < root_count: out[r] = the tree's value at part roots[r] after all steps (nodes to be sent).
void cuda_fold(cudaStream_t stream, const CudaTreeSum& sum, int64_t rows, int64_t cols, const int* roots,
               int root_count, DeviceMatrix* out);

void cuda_add(cudaStream_t stream, DeviceMatrix a, DeviceMatrix b, DeviceMatrix out);
/// gate_up [rows, 2n] -> out [rows, n].
void cuda_silu_mul(cudaStream_t stream, DeviceMatrix gate_up, DeviceMatrix out_f, DeviceInput out_b);
void cuda_sigmoid_mul(cudaStream_t stream, DeviceMatrix x, DeviceMatrix gate);
/// x = max(x, 0)^2, NaN kept.
void cuda_relu_squared(cudaStream_t stream, DeviceMatrix x);
/// x = silu(x * scale), in place.
void cuda_scaled_silu(cudaStream_t stream, DeviceMatrix x, float scale);
/// Rounds to bf16 (nearest even).
void cuda_to_input(cudaStream_t stream, DeviceMatrix x, DeviceInput out);
void cuda_from_input(cudaStream_t stream, DeviceInput x, DeviceMatrix out);
/// dst[i, :] = src[index[i], :]; index in device memory.
void cuda_gather_rows(cudaStream_t stream, DeviceMatrix src, const int32_t* index, DeviceMatrix dst);
void cuda_clear(cudaStream_t stream, DeviceMatrix x);
/// Ops::mean_streams.
void cuda_mean_streams(cudaStream_t stream, DeviceMatrix x, int64_t streams, DeviceMatrix out);
/// Ops::block_conv. Exactly one of out_f and out_b has data; neither may overlap x. Rows of no block get zeros.
struct CudaBlockConv {
  DeviceMatrix x;
  DeviceMatrix dynamic;
  const float* base = nullptr;
  int64_t taps = 0;
  int64_t group = 0;
  DeviceMatrix out_f;
  DeviceInput out_b;
};
void cuda_block_conv(cudaStream_t stream, const DeviceRows& rows, const CudaBlockConv& conv);
/// cos and sin [rows, pairs] of positions[r] * inv_freq[i] in float64, times factor, rounded once.
void cuda_rope_table(cudaStream_t stream, const int64_t* positions, int64_t rows, const float* inv_freq, int64_t pairs,
                     double factor, float* cos, float* sin, int64_t stride);
/// x [rows, heads * head_dim]: rotates dims (i, i + pairs) of each head in place.
void cuda_rope(cudaStream_t stream, DeviceMatrix x, int64_t heads, int64_t head_dim, const float* cos, const float* sin,
               int64_t pairs, int64_t stride);

/// The n best of each row, (logit descending, id ascending), ids counting from first_id; NaN sorts last. out
/// [rows, n] in device memory; rows with fewer than n columns are filled up with id -1. n <= kMaxCudaCandidates.
inline constexpr int64_t kMaxCudaCandidates = 4096;
/// Bytes of workspace that a launch needs.
int64_t cuda_candidates_workspace(int64_t rows, int64_t cols, int64_t n);
void cuda_candidates(cudaStream_t stream, DeviceMatrix logits, int32_t first_id, int64_t n, void* workspace,
                     Candidate* out);

/// Ops::best_draws: out [rows] in device memory, from keys [rows] there.
int64_t cuda_draws_workspace(int64_t rows, int64_t cols);
void cuda_draws(cudaStream_t stream, DeviceMatrix logits, int32_t first_id, const DrawKey* keys, void* workspace,
                Candidate* out);

}  // namespace tensorfold
