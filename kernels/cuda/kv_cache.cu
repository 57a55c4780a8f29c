// The cache's memory, and the step that fills it.
//
// How qkv_kernel keeps the contract: a warp computes one head of one row and reads nothing of other rows. The norm's
// sum is 32 chains of fma, one a lane over dims lane, lane + 32, ..., then a tree over the lanes by exclusive or (16,
// 8, 4, 2, 1); value = (x * rsqrt(sum / head_dim + eps)) * weight; rotation x0 c - x1 s and x1 c + x0 s with one
// rounded product and one fma each. Keys and values are made finite (NaN: 0; beyond bf16: the largest bf16 of that
// sign) and rounded once.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <string>

#include "kernels/cuda/attention_layout.h"
#include "kernels/cuda/attention_mma.cuh"
#include "kernels/cuda/kv_cache.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/warp.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxDim = 256;

struct QkvParams {
  float* q;
  const float* k;
  const float* v;
  int64_t q_stride, k_stride, v_stride;
  const float* q_norm;
  const float* k_norm;
  const float* cos;
  const float* sin;
  int64_t table_stride;
  char* data;
  float* scales;
  const int32_t* group_of;
  const int64_t* positions;
  const DeviceGroup* groups;
  const int32_t* pages;
  int rows, heads, kv_heads, head_dim, padded_dim, pairs;
  float eps;
};

__device__ __forceinline__ float finite_bf16(float x) {
  constexpr float kLargest = 3.38953139e38f;
  if (x != x) return 0.0f;
  return fminf(fmaxf(x, -kLargest), kLargest);
}

__device__ __forceinline__ float sum_over_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

/// One vector from shared memory into its place in the cache; a lane writes 8 values.
template <bool kFp8>
__device__ void store_vector(const QkvParams& p, const float* values, int64_t block, int token, int lane) {
  const bool mine = lane * 8 < p.head_dim;
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = mine ? finite_bf16(values[lane * 8 + i]) : 0.0f;
  const int64_t first = (block * kBlockKeys + token) * p.padded_dim;
  const int place = swizzled_unit(p.padded_dim, token, lane) * 8;
  if constexpr (!kFp8) {
    if (!mine) return;
    const uint4 packed =
        make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
    *reinterpret_cast<uint4*>(p.data + (first + place) * 2) = packed;
  } else {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
    const int exponent = fp8_exponent(__float_as_uint(amax));
    const float inverse = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
    if (lane == 0) p.scales[block * kBlockKeys + token] = __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
    if (!mine) return;
    uint32_t word[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 pair = make_float2(__fmul_rn(x[i], inverse), __fmul_rn(x[i + 1], inverse));
      const uint32_t bits = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
      word[i >> 2] |= bits << ((i & 2) * 8);
    }
    *reinterpret_cast<uint2*>(p.data + first + place) = make_uint2(word[0], word[1]);
  }
}

template <bool kFp8>
__global__ void __launch_bounds__(kWarps * 32) qkv_kernel(const __grid_constant__ QkvParams p) {
  __shared__ float buffer[kWarps][kMaxDim];
  pdl_launch();
  const int warp = uniform_warp();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int units = p.heads + 2 * p.kv_heads;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  const int row = static_cast<int>(index / units);
  const int unit = static_cast<int>(index % units);
  int group = -1;
  int64_t position = 0, page = 0;
  if (row < p.rows) group = p.group_of[row];
  if (group >= 0) {
    position = p.positions[row];
    page = p.pages[p.groups[group].first_page + position / kBlockKeys];
  }
  const bool is_q = unit < p.heads;
  const bool is_v = unit >= p.heads + p.kv_heads;
  const float* weight = is_q ? p.q_norm : is_v ? nullptr : p.k_norm;
  float w[kMaxDim / 32];
#pragma unroll
  for (int e = 0; e < kMaxDim / 32; ++e) {
    const int d = lane + 32 * e;
    w[e] = weight != nullptr && d < p.head_dim ? weight[d] : 0.0f;
  }
  pdl_wait();
  if (group < 0) return;
  const int head = is_q ? unit : is_v ? unit - p.heads - p.kv_heads : unit - p.heads;
  const float* source = is_q ? p.q + row * p.q_stride : is_v ? p.v + row * p.v_stride : p.k + row * p.k_stride;
  source += static_cast<int64_t>(head) * p.head_dim;

  float x[kMaxDim / 32], cos[kMaxDim / 32], sin[kMaxDim / 32];
#pragma unroll
  for (int e = 0; e < kMaxDim / 32; ++e) {
    const int d = lane + 32 * e;
    x[e] = d < p.head_dim ? source[d] : 0.0f;
    cos[e] = sin[e] = 0.0f;
    if (is_v || d >= 2 * p.pairs) continue;
    const int64_t at = row * p.table_stride + (d < p.pairs ? d : d - p.pairs);
    cos[e] = p.cos[at];
    sin[e] = p.sin[at];
  }
  if (weight != nullptr) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < kMaxDim / 32; ++e) sum = __fmaf_rn(x[e], x[e], sum);
    sum = sum_over_warp(sum);
    const float factor = rsqrtf(__fadd_rn(__fdiv_rn(sum, static_cast<float>(p.head_dim)), p.eps));
#pragma unroll
    for (int e = 0; e < kMaxDim / 32; ++e) {
      if (lane + 32 * e < p.head_dim) x[e] = __fmul_rn(__fmul_rn(x[e], factor), w[e]);
    }
  }
  float* own = buffer[warp];
#pragma unroll
  for (int e = 0; e < kMaxDim / 32; ++e) own[lane + 32 * e] = x[e];
  __syncwarp();
  if (!is_v) {
#pragma unroll
    for (int e = 0; e < kMaxDim / 32; ++e) {
      const int d = lane + 32 * e;
      if (d < p.pairs) {
        x[e] = __fmaf_rn(-own[d + p.pairs], sin[e], __fmul_rn(x[e], cos[e]));
      } else if (d < 2 * p.pairs) {
        x[e] = __fmaf_rn(own[d - p.pairs], sin[e], __fmul_rn(x[e], cos[e]));
      }
    }
  }
  if (is_q) {
    float* out = p.q + row * p.q_stride + static_cast<int64_t>(head) * p.head_dim;
#pragma unroll
    for (int e = 0; e < kMaxDim / 32; ++e) {
      const int d = lane + 32 * e;
      if (d < p.head_dim) out[d] = x[e];
    }
    return;
  }
  __syncwarp();
#pragma unroll
  for (int e = 0; e < kMaxDim / 32; ++e) own[lane + 32 * e] = x[e];
  __syncwarp();
  const int64_t block = cache_block(page, p.kv_heads, head) + (is_v ? 1 : 0);
  store_vector<kFp8>(p, own, block, static_cast<int>(position % kBlockKeys), lane);
}

}  // namespace

std::unique_ptr<CudaKvCache> CudaKvCache::create(int64_t layers, int64_t pages, int64_t kv_heads, int64_t head_dim,
                                                 CudaKvFormat format, cudaStream_t stream) {
  if (layers == 0) return std::make_unique<PagedKvCache>(0, pages, kv_heads, head_dim, format, stream);  // latents only
  if (padded_head_dim(head_dim) == 0) {
    const std::string what =
        "attention needs a head dimension that is a multiple of 8 and at most 256, not " + std::to_string(head_dim);
    cuda_ok(cudaErrorNotSupported, what.c_str());
    return nullptr;
  }
  constexpr int64_t kMost = int64_t{1} << 31;
  if (layers < 1 || pages < 1 || kv_heads < 1 || layers > 65536 || pages >= kMost || kv_heads > 256 ||
      layers * kv_heads * pages >= (int64_t{1} << 40)) {
    const std::string what = "key/value cache of " + std::to_string(layers) + " layers, " + std::to_string(pages) +
                             " pages and " + std::to_string(kv_heads) + " heads";
    cuda_ok(cudaErrorInvalidValue, what.c_str());
    return nullptr;
  }
  auto cache = std::make_unique<PagedKvCache>(layers, pages, kv_heads, head_dim, format, stream);
  if (!cache->allocate()) return nullptr;
  return cache;
}

PagedKvCache::PagedKvCache(int64_t layers, int64_t pages, int64_t kv_heads, int64_t head_dim, CudaKvFormat format,
                           cudaStream_t stream)
    : layers_(layers),
      pages_(pages),
      kv_heads_(kv_heads),
      head_dim_(head_dim),
      padded_dim_(padded_head_dim(head_dim)),
      format_(format),
      stream_(stream) {}

PagedKvCache::~PagedKvCache() {
  cudaFree(data_);
  cudaFree(scales_);
}

bool PagedKvCache::allocate() {
  const std::string what = "key/value cache of " + std::to_string(bytes()) + " bytes";
  if (!cuda_ok(cudaMalloc(&data_, static_cast<size_t>(payload_bytes())), what.c_str())) return false;
  if (!cuda_ok(cudaMemset(data_, 0, static_cast<size_t>(payload_bytes())), what.c_str())) return false;
  if (fp8()) {
    const size_t size = static_cast<size_t>(scale_floats()) * sizeof(float);
    if (!cuda_ok(cudaMalloc(&scales_, size), what.c_str())) return false;
    if (!cuda_ok(cudaMemset(scales_, 0, size), what.c_str())) return false;
  }
  // The caller's streams do not wait for the default stream, on which the memory is cleared.
  return cuda_ok(cudaStreamSynchronize(nullptr), what.c_str());
}

void PagedKvCache::copy_page(int32_t from, int32_t to) {
  if (layers_ == 0) return;
  const auto copy = [&](char* base, int64_t page) {
    const size_t pitch = static_cast<size_t>(page * pages_), width = static_cast<size_t>(page);
    cuda_ok(cudaMemcpy2DAsync(base + to * page, pitch, base + from * page, pitch, width, static_cast<size_t>(layers_),
                              cudaMemcpyDeviceToDevice, stream_),
            "copy of a key/value page");
  };
  copy(data_, page_payload());
  if (fp8()) copy(reinterpret_cast<char*>(scales_), page_scales());
}

// All layers' payload, then all layers' scales.
void PagedKvCache::save_page(int32_t page, std::span<std::byte> into) const {
  kernel_check(static_cast<int64_t>(into.size()) == page_bytes(), "kv cache: save into another size");
  if (layers_ == 0) return;
  std::byte* to = into.data();
  const auto save = [&](const char* base, int64_t bytes) {
    const size_t width = static_cast<size_t>(bytes), rows = static_cast<size_t>(layers_);
    cuda_ok(cudaMemcpy2DAsync(to, width, base + page * bytes, static_cast<size_t>(bytes * pages_), width, rows,
                              cudaMemcpyDeviceToHost, stream_),
            "save of a key/value page");
    to += width * rows;
  };
  save(data_, page_payload());
  if (fp8()) save(reinterpret_cast<const char*>(scales_), page_scales());
  cuda_ok(cudaStreamSynchronize(stream_), "save of a key/value page");
}

void PagedKvCache::load_page(int32_t page, std::span<const std::byte> from) {
  kernel_check(static_cast<int64_t>(from.size()) == page_bytes(), "kv cache: load of another size");
  if (layers_ == 0) return;
  const std::byte* at = from.data();
  const auto load = [&](char* base, int64_t bytes) {
    const size_t width = static_cast<size_t>(bytes), rows = static_cast<size_t>(layers_);
    cuda_ok(cudaMemcpy2DAsync(base + page * bytes, static_cast<size_t>(bytes * pages_), at, width, width, rows,
                              cudaMemcpyHostToDevice, stream_),
            "load of a key/value page");
    at += width * rows;
  };
  load(data_, page_payload());
  if (fp8()) load(reinterpret_cast<char*>(scales_), page_scales());
  cuda_ok(cudaStreamSynchronize(stream_), "load of a key/value page");
}

void cuda_qkv(cudaStream_t stream, CudaKvCache& kv_cache, int64_t layer, const DeviceRows& rows,
              const CudaQkvArgs& args) {
  const PagedKvCache& cache = static_cast<const PagedKvCache&>(kv_cache);
  if (rows.rows <= 0) return;
  if (args.pairs < 0 || 2 * args.pairs > cache.head_dim() || layer < 0 || layer >= cache.layers() || args.heads < 0) {
    cuda_ok(cudaErrorInvalidValue, "keys and values into the cache: layer, heads or rotated dimensions out of range");
    return;
  }
  QkvParams p = {};
  p.q = args.q.data;
  p.k = args.k.data;
  p.v = args.v.data;
  p.q_stride = args.q.stride;
  p.k_stride = args.k.stride;
  p.v_stride = args.v.stride;
  p.q_norm = args.q_norm;
  p.k_norm = args.k_norm;
  p.cos = args.cos;
  p.sin = args.sin;
  p.table_stride = args.table_stride;
  p.data = cache.layer_data(layer);
  p.scales = cache.layer_scales(layer);
  p.group_of = rows.group_of;
  p.positions = rows.positions;
  p.groups = rows.groups;
  p.pages = rows.pages;
  p.rows = rows.rows;
  p.heads = static_cast<int>(args.heads);
  p.kv_heads = static_cast<int>(cache.kv_heads());
  p.head_dim = static_cast<int>(cache.head_dim());
  p.padded_dim = cache.padded_dim();
  p.pairs = static_cast<int>(args.pairs);
  p.eps = args.eps;
  const int64_t warps = static_cast<int64_t>(rows.rows) * (args.heads + 2 * cache.kv_heads());
  const dim3 grid(static_cast<unsigned>((warps + kWarps - 1) / kWarps));
  launch_kernel(cache.fp8() ? qkv_kernel<true> : qkv_kernel<false>, grid, dim3(kWarps * 32), 0, stream,
                "keys and values into the cache", p);
}

}  // namespace tensorfold
