// Causal attention over paged keys and values (bf16 or fp8), the step before it, and the cache itself. One arithmetic
// for prompt, verify and decode rows.
#pragma once

#include <memory>
#include <span>

#include "kernels/cuda/device.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

enum class CudaKvFormat : uint8_t {
  kBf16,
  kFp8,  // e4m3 with one power-of-two scale for each key or value vector of a head
};

class CudaKvCache : public KvCache {
 public:
  /// All zeros. Null with cuda_failure() set if the device has no memory left, or if head_dim is not a multiple of 16
  /// up to 256; heads are stored with 32, 64, 128 or 256 values, the next above. `stream` orders copies of pages.
  static std::unique_ptr<CudaKvCache> create(int64_t layers, int64_t pages, int64_t kv_heads, int64_t head_dim,
                                             CudaKvFormat format, cudaStream_t stream = nullptr);
  virtual int64_t layers() const = 0;
  virtual int64_t pages() const = 0;
  virtual int64_t kv_heads() const = 0;
  virtual int64_t head_dim() const = 0;
};

/// Norms (optional), rotation, and the keys and values into the cache, for one attention layer, in one launch.
struct CudaQkvArgs {
  DeviceMatrix q;  // [rows, heads * head_dim], changed in place to normed and rotated
  DeviceMatrix k;  // [rows, kv_heads * head_dim]; not changed
  DeviceMatrix v;  // [rows, kv_heads * head_dim]
  int64_t heads = 0;
  const float* q_norm = nullptr;  // [head_dim] or null
  const float* k_norm = nullptr;
  float eps = 1e-6f;
  const float* cos = nullptr;  // [rows, pairs]
  const float* sin = nullptr;
  int64_t pairs = 0;         // rotates dims i and i + pairs, i < pairs
  int64_t table_stride = 0;  // floats between rows of cos and sin
};
/// Padding rows (group_of -1) write nothing. What is cached is finite, so that a masked key adds nothing whatever it
/// was: NaN becomes 0, values beyond bf16 its largest.
void cuda_qkv(cudaStream_t stream, CudaKvCache& cache, int64_t layer, const DeviceRows& rows, const CudaQkvArgs& args);

struct CudaAttentionArgs {
  DeviceMatrix q;     // [rows, heads * head_dim]
  DeviceMatrix gate;  // same shape, or data null: out *= sigmoid(gate)
  DeviceInput out;    // bf16 [rows, heads * head_dim]
  int64_t heads = 0;
  int64_t head_dim = 0;
  std::span<const int32_t> kv_head_of;  // [heads], ascending; host memory, copied into the launch
  float scale = 1.0f;
  float* workspace = nullptr;  // at least cuda_attention_workspace() floats
};
/// Floats of workspace that a launch with these bounds, or with fewer rows or keys, needs on the current device.
int64_t cuda_attention_workspace(const DeviceRows& rows, int64_t heads, int64_t head_dim);
/// Rows of no group get zeros.
void cuda_attention(cudaStream_t stream, const CudaKvCache& cache, int64_t layer, const DeviceRows& rows,
                    const CudaAttentionArgs& args);

/// Ops::sparse_attention: of each row over the tokens of its windows in `selected` [rows, most], of `tokens` each, and
/// those after its last whole one. A row that chose all of its windows has cuda_attention's bits.
int64_t cuda_sparse_attention_workspace(const DeviceRows& rows, int64_t heads, int64_t head_dim, int64_t most,
                                        int64_t tokens);
void cuda_sparse_attention(cudaStream_t stream, const CudaKvCache& cache, int64_t layer, const DeviceRows& rows,
                           const CudaAttentionArgs& args, DeviceMatrix selected, int64_t tokens);

}  // namespace tensorfold
