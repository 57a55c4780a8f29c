// Operations on latents (kernels/ops/latent_ops.h says what each computes): residuals of several streams, pooled rows,
// their choice, and attention over lists of cached rows. Nothing here reads the number of rows for a bit: a row, or a
// row and head, is computed by itself.
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

// Streams (latent_streams.cu). ---------------------------------------------------------------------------------------

/// HyperArgs without carried weights.
struct CudaHyperArgs {
  DeviceMatrix streams;  // [rows, count * width]
  int64_t count = 0;
  DeviceMatrix mix;              // or no data
  const float* scale = nullptr;  // as many as the mix' kinds of columns
  const float* base = nullptr;
  float eps = 0.0f;
  int64_t iterations = 1;
  DeviceMatrix weights;
  DeviceMatrix out;
  DeviceMatrix zero;  // or no data
  DeviceMatrix y;
};
void cuda_hyper_collapse(cudaStream_t stream, const CudaHyperArgs& args);
void cuda_hyper_expand(cudaStream_t stream, const CudaHyperArgs& args);

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

/// SelectArgs without candidates and blocks (latent_select.cu). Keys of up to 128 values, a multiple of 8; up to 128
/// heads.
struct CudaSelectArgs {
  DeviceRowLayer keys;
  int64_t tokens = 1;  // of a window
  int64_t heads = 0;
  DeviceMatrix q;
  DeviceMatrix weights;
  float scale = 1.0f;
  float weight_scale = 1.0f;
  DeviceMatrix out;  // [rows, most], most at most kMostSelected
  void* workspace = nullptr;
};
inline constexpr int64_t kMostSelected = 4096;
/// Bytes of workspace that a launch with these bounds needs.
int64_t cuda_select_rows_workspace(const DeviceRows& rows, int64_t tokens, int64_t most);
void cuda_select_rows(cudaStream_t stream, const DeviceRows& rows, const CudaSelectArgs& args);

/// LatentAttentionArgs (latent_attention.cu). Rows of up to 512 values, a multiple of 8.
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
  float* workspace = nullptr;
};
inline constexpr int64_t kMostLatentWidth = 512;
/// Floats of workspace that a launch needs; of `args` only sizes are read.
int64_t cuda_latent_attention_workspace(const DeviceRows& rows, const CudaLatentAttentionArgs& args);
/// Rows of no group get zeros.
void cuda_latent_attention(cudaStream_t stream, const DeviceRows& rows, const CudaLatentAttentionArgs& args);

}  // namespace tensorfold
