// Operations on latents (kernels/ops/latent_ops.h says what each computes): pooled rows, their choice, and attention
// over lists of cached rows. Nothing here reads the number of rows for a bit: a row, or a row and head, is computed by
// itself.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/row_cache.h"

namespace tensorfold {

/// Exactly one of the two has data.
struct DeviceOutput {
  DeviceMatrix f;
  DeviceInput b;
  int64_t rows() const { return f.data != nullptr ? f.rows : b.rows; }
  int64_t cols() const { return f.data != nullptr ? f.cols : b.cols; }
};

// Row by row (latent_rowwise.cu). ------------------------------------------------------------------------------------

void cuda_layer_norm(cudaStream_t stream, DeviceMatrix x, const float* weight, const float* bias, float eps,
                     const DeviceOutput& out);
void cuda_silu_mul_limited(cudaStream_t stream, DeviceMatrix gate_up, float limit, const DeviceOutput& out);
void cuda_rope_pairs(cudaStream_t stream, DeviceMatrix x, int64_t heads, int64_t head_dim, const float* cos,
                     const float* sin, int64_t pairs, int64_t stride, bool back);

// Cached rows. -------------------------------------------------------------------------------------------------------

/// PoolArgs (latent_pool.cu).
struct CudaPoolArgs {
  DeviceRowLayer from, into;
  int64_t tokens = 1;
  bool overlap = false;
  const float* bias = nullptr;
  const float* norm = nullptr;  // or null
  float eps = 0.0f;
  const float* inv_freq = nullptr;
  int64_t pairs = 0;
};
void cuda_pool_rows(cudaStream_t stream, const DeviceRows& rows, const CudaPoolArgs& args);

/// SelectArgs without candidates and blocks (latent_select.cu). Up to 128 heads; keys of an even number of values, up
/// to 128.
struct CudaSelectArgs {
  DeviceRowLayer keys;
  int64_t tokens = 1;  // of a window
  int64_t heads = 0;
  DeviceMatrix q;
  DeviceMatrix weights;
  float scale = 1.0f;
  float weight_scale = 1.0f;
  DeviceMatrix out;           // [rows, most], most at most kMostChosen
  void* workspace = nullptr;  // at least cuda_select_workspace() bytes (select_windows.h)
};
void cuda_select_rows(cudaStream_t stream, const DeviceRows& rows, const CudaSelectArgs& args);

/// LatentAttentionArgs (latent_attention.cu). Rows of up to 512 values, a multiple of 8. With `block` every group has
/// at most kMostBlockRows rows: the caller sees to that, also for the passes of a graph.
struct CudaLatentAttentionArgs {
  DeviceMatrix q;    // [rows, heads * width]
  DeviceOutput out;  // the same shape
  int64_t heads = 0;
  float scale = 1.0f;
  const float* sinks = nullptr;  // [heads] or null
  DeviceRowLayer latents;
  int64_t window = 0;
  DeviceRowLayer pooled;  // or no data
  int64_t tokens = 1;
  DeviceMatrix selected;  // [rows, most], or no data
  DeviceMatrix block;     // [rows, width], or no data
  float* workspace = nullptr;
};
inline constexpr int64_t kMostLatentWidth = 512;
inline constexpr int64_t kMostIndexWidth = 128, kMostIndexHeads = 128;  // of select_rows
/// Floats of workspace that a launch needs; of `args` only sizes are read.
int64_t cuda_latent_attention_workspace(const DeviceRows& rows, const CudaLatentAttentionArgs& args);
/// Rows of no group get zeros.
void cuda_latent_attention(cudaStream_t stream, const DeviceRows& rows, const CudaLatentAttentionArgs& args);

}  // namespace tensorfold
