// See row_cache.h.
//
// Order of a mean, a function of the window's rows alone: each value first times 1 / tokens, the others added by fma,
// tokens ascending; sum of squares: lane d mod 32 has a chain over its values, ascending, lanes are added over
// distances 16, 8, 4, 2, 1; value * rsqrt(sum / width + eps) * weight; rotation as cuda_rope, angles in float64.
#include <string>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/row_cache.h"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kWarps = 4;
constexpr int kMostWidth = 1024;

struct WriteParams {
  DeviceRowLayer layer;
  const int32_t* group_of;
  const int64_t* positions;
  const DeviceGroup* groups;
  const int32_t* pages;
  DeviceMatrix values;
};

// The row of a position.
__device__ __forceinline__ float* row_of(const DeviceRowLayer& layer, const int32_t* pages, const DeviceGroup& group,
                                         int64_t position) {
  const int64_t page = pages[group.first_page + position / kPageTokens];
  return layer.data + page * layer.page_floats + position % kPageTokens / layer.tokens * layer.width;
}

// A warp a row.
__global__ void __launch_bounds__(kWarps * 32) write_kernel(const __grid_constant__ WriteParams p) {
  pdl_launch();
  pdl_wait();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= p.values.rows) return;
  const int g = p.group_of[row];
  if (g < 0) return;
  float* to = row_of(p.layer, p.pages, p.groups[g], p.positions[row]);
  const float* from = p.values.data + row * p.values.stride;
  for (int d = lane; d < p.layer.width; d += 32) to[d] = from[d];
}

struct MeansParams {
  DeviceRowLayer from, into;
  const int32_t* group_of;
  const int64_t* positions;
  const DeviceGroup* groups;
  const int32_t* pages;
  const float* norm;
  const float* inv_freq;
  float eps, share;
  int rows, pairs;
};

// A warp a row; rows that end no window have nothing to do.
__global__ void __launch_bounds__(kWarps * 32) means_kernel(const __grid_constant__ MeansParams p) {
  __shared__ float memory[kWarps][kMostWidth];
  pdl_launch();
  pdl_wait();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (row >= p.rows) return;
  const int g = p.group_of[row], tokens = p.into.tokens, width = p.into.width;
  if (g < 0) return;
  const int64_t position = p.positions[row];
  if ((position + 1) % tokens != 0) return;
  const int64_t first = position + 1 - tokens;
  const DeviceGroup group = p.groups[g];
  // A window lies in one page.
  const float* rows = row_of(p.from, p.pages, group, first);
  float* x = memory[warp];
  float squares = 0.0f;
  for (int d = lane; d < width; d += 32) {
    float sum = __fmul_rn(p.share, rows[d]);
    for (int t = 1; t < tokens; ++t) sum = __fmaf_rn(p.share, rows[t * width + d], sum);
    x[d] = sum;
    squares = __fmaf_rn(sum, sum, squares);
  }
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) squares = __fadd_rn(squares, __shfl_xor_sync(0xffffffffu, squares, step));
  const float factor = rsqrtf(__fadd_rn(__fdiv_rn(squares, static_cast<float>(width)), p.eps));
  for (int d = lane; d < width; d += 32) x[d] = __fmul_rn(__fmul_rn(x[d], factor), p.norm[d]);
  __syncwarp();
  float* out = row_of(p.into, p.pages, group, position);
  for (int d = lane; d < width; d += 32) {
    float value = x[d];
    if (d < 2 * p.pairs) {
      const int pair = d < p.pairs ? d : d - p.pairs;
      double sine, cosine;
      sincos(__dmul_rn(static_cast<double>(first), static_cast<double>(p.inv_freq[pair])), &sine, &cosine);
      const float s = static_cast<float>(sine), c = static_cast<float>(cosine);
      const float low = x[pair], high = x[pair + p.pairs];
      value = d < p.pairs ? __fsub_rn(__fmul_rn(low, c), __fmul_rn(high, s))
                          : __fadd_rn(__fmul_rn(high, c), __fmul_rn(low, s));
    }
    out[d] = value;
  }
}

unsigned blocks_of(int64_t rows) { return static_cast<unsigned>((rows + kWarps - 1) / kWarps); }

}  // namespace

CudaRowCache::CudaRowCache(std::span<const RowCacheLayer> layers, int64_t pages, cudaStream_t stream)
    : layers_(layers.begin(), layers.end()), pages_(pages), stream_(stream) {
  int64_t start = 0;
  for (size_t i = 0; i < layers_.size(); ++i) {
    kernel_check(layers_[i].width > 0 && layers_[i].tokens > 0 && kPageTokens % layers_[i].tokens == 0,
                 "row cache: a row stands for a divisor of a page's tokens");
    starts_.push_back(start);
    start += (pages * page_floats(i) + 3) / 4 * 4;  // layers begin at multiples of 16 bytes
  }
  starts_.push_back(start);
}

std::unique_ptr<CudaRowCache> CudaRowCache::create(std::span<const RowCacheLayer> layers, int64_t pages,
                                                   cudaStream_t stream) {
  std::unique_ptr<CudaRowCache> cache(new CudaRowCache(layers, pages, stream));
  const size_t bytes = static_cast<size_t>(cache->starts_.back()) * sizeof(float);
  const std::string what = "row cache of " + std::to_string(bytes) + " bytes";
  if (!cuda_ok(cudaMalloc(&cache->data_, bytes), what.c_str()) ||
      !cuda_ok(cudaMemset(cache->data_, 0, bytes), what.c_str())) {
    return nullptr;
  }
  // The caller's streams do not wait for the default stream, on which the memory is cleared.
  return cuda_ok(cudaStreamSynchronize(nullptr), what.c_str()) ? std::move(cache) : nullptr;
}

CudaRowCache::~CudaRowCache() { cudaFree(data_); }

int64_t CudaRowCache::page_bytes() const {
  int64_t floats = 0;
  for (size_t i = 0; i < layers_.size(); ++i) floats += page_floats(i);
  return floats * static_cast<int64_t>(sizeof(float));
}

DeviceRowLayer CudaRowCache::layer(int64_t layer) const {
  kernel_check(layer >= 0 && layer < layers(), "row cache: no such layer");
  const size_t i = static_cast<size_t>(layer);
  return {data_ + starts_[i], page_floats(i), static_cast<int32_t>(layers_[i].width),
          static_cast<int32_t>(layers_[i].tokens)};
}

void CudaRowCache::copy_page(int32_t from, int32_t to) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    cuda_ok(cudaMemcpyAsync(page_data(i, to), page_data(i, from), static_cast<size_t>(page_floats(i)) * sizeof(float),
                            cudaMemcpyDeviceToDevice, stream_),
            "copy of a page of rows");
  }
}

void CudaRowCache::save_page(int32_t page, std::span<std::byte> into) const {
  kernel_check(static_cast<int64_t>(into.size()) == page_bytes(), "row cache: save into another size");
  std::byte* to = into.data();
  for (size_t i = 0; i < layers_.size(); ++i) {
    const size_t bytes = static_cast<size_t>(page_floats(i)) * sizeof(float);
    cuda_ok(cudaMemcpyAsync(to, page_data(i, page), bytes, cudaMemcpyDeviceToHost, stream_), "save of a page of rows");
    to += bytes;
  }
  cuda_ok(cudaStreamSynchronize(stream_), "save of a page of rows");
}

void CudaRowCache::load_page(int32_t page, std::span<const std::byte> from) {
  kernel_check(static_cast<int64_t>(from.size()) == page_bytes(), "row cache: load of another size");
  const std::byte* at = from.data();
  for (size_t i = 0; i < layers_.size(); ++i) {
    const size_t bytes = static_cast<size_t>(page_floats(i)) * sizeof(float);
    cuda_ok(cudaMemcpyAsync(page_data(i, page), at, bytes, cudaMemcpyHostToDevice, stream_), "load of a page of rows");
    at += bytes;
  }
  cuda_ok(cudaStreamSynchronize(stream_), "load of a page of rows");
}

void cuda_row_write(cudaStream_t stream, DeviceRowLayer layer, const DeviceRows& rows, DeviceMatrix values) {
  kernel_check(layer.tokens == 1 && values.cols == layer.width && values.rows == rows.rows, "row_write: shapes differ");
  if (rows.rows <= 0) return;
  const WriteParams p = {layer, rows.group_of, rows.positions, rows.groups, rows.pages, values};
  launch_kernel(write_kernel, dim3(blocks_of(rows.rows)), dim3(kWarps * 32), 0, stream, "rows into the cache", p);
}

void cuda_pool_means(cudaStream_t stream, const DeviceRows& rows, const CudaPoolMeans& args) {
  kernel_check(args.from.tokens == 1 && args.from.width == args.into.width && args.into.width <= kMostWidth &&
                   args.pairs >= 0 && 2 * args.pairs <= args.into.width,
               "pool_means: shapes differ, or keys of more than 1024 values");
  if (rows.rows <= 0) return;
  const MeansParams p = {args.from,     args.into,
                         rows.group_of, rows.positions,
                         rows.groups,   rows.pages,
                         args.norm,     args.inv_freq,
                         args.eps,      1.0f / static_cast<float>(args.into.tokens),
                         rows.rows,     static_cast<int>(args.pairs)};
  launch_kernel(means_kernel, dim3(blocks_of(rows.rows)), dim3(kWarps * 32), 0, stream, "means of windows", p);
}

}  // namespace tensorfold
