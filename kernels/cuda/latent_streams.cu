// Residuals of several streams. Weighted sums are a column's own: the first product rounded, the others added by fma in
// ascending order. A row's weights are computed by one warp of each block that needs them, the same in all:
//   lane (j % 4) * 8 + k holds C[j, k], j < 4 in one register and j >= 4 in another; sums over k and over j ascend;
//   a line is divided by its sum with the hardware's reciprocal.
#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/latents.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rowwise_vec.cuh"
#include "kernels/numerics/check.h"
#include "kernels/ops/latent_ops.h"

namespace tensorfold {
namespace {

constexpr int kThreads = 256;
constexpr int kMost = static_cast<int>(kMostStreams);
static_assert(kMost == 8);
constexpr int64_t kMostGridRows = 65535;
constexpr unsigned kAll = 0xffffffffu;

struct Params {
  DeviceMatrix streams, mix, weights, out, zero, y;
  const float* scale;
  const float* base;
  int64_t width;
  float eps;
  int count, iterations;
};

// The mix' column i of a row as a logit.
__device__ __forceinline__ float logit(const Params& p, int64_t row, int i) {
  const int kind = min(i / p.count, 2);
  return __fadd_rn(__fmul_rn(p.mix.data[row * p.mix.stride + i], p.scale[kind]), p.base[i]);
}

// C of a lane's places, from its logits.
__device__ __forceinline__ void balance(const Params& p, int lane, float (&c)[2]) {
  const int n = p.count, k = lane % 8;
  const auto over_k = [&](float own, const auto& join) {  // of the lane's row j
    float all = __shfl_sync(kAll, own, 0, 8);
    for (int i = 1; i < n; ++i) all = join(all, __shfl_sync(kAll, own, i, 8));
    return all;
  };
  const auto add = [](float a, float b) { return __fadd_rn(a, b); };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (4 * h >= n) continue;
    const float most = over_k(c[h], [](float a, float b) { return fmaxf(a, b); });
    c[h] = __expf(__fsub_rn(c[h], most));
    c[h] = __fadd_rn(__fdividef(c[h], over_k(c[h], add)), p.eps);
  }
  const auto columns = [&] {
    float sum = __shfl_sync(kAll, c[0], k);
#pragma unroll
    for (int j = 1; j < kMost; ++j) {
      if (j < n) sum = __fadd_rn(sum, __shfl_sync(kAll, c[j / 4], j % 4 * 8 + k));
    }
    sum = __fadd_rn(sum, p.eps);
    c[0] = __fdividef(c[0], sum);
    c[1] = __fdividef(c[1], sum);
  };
  columns();
  for (int i = 1; i < p.iterations; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (4 * h < n) c[h] = __fdividef(c[h], __fadd_rn(over_k(c[h], add), p.eps));
    }
    columns();
  }
}

// pre of each stream into `pre`; the other weights into memory where `keeps`. A warp.
__device__ __forceinline__ void stream_weights(const Params& p, int64_t row, int lane, bool keeps, float* pre) {
  const int n = p.count;
  if (p.mix.data == nullptr) {
    if (lane < n) pre[lane] = __fdiv_rn(1.0f, static_cast<float>(n));
    return;
  }
  if (lane < n) pre[lane] = __fadd_rn(sigmoid(logit(p, row, lane)), p.eps);
  if (p.mix.cols == n || !keeps) return;
  float* weights = p.weights.data + row * p.weights.stride;
  if (lane < n) weights[lane] = __fmul_rn(sigmoid(logit(p, row, n + lane)), 2.0f);
  // Lanes beyond n in either direction hold copies of the last ones and are read by nobody.
  const int k = lane % 8;
  float c[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) c[h] = logit(p, row, 2 * n + min(lane / 8 + 4 * h, n - 1) * n + min(k, n - 1));
  balance(p, lane, c);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int j = lane / 8 + 4 * h;
    if (j < n && k < n) weights[n + j * n + k] = c[h];
  }
}

// blockIdx.x: columns, W a thread. blockIdx.y and on: rows. Blocks of the first columns keep the weights.
template <int W>
__global__ void __launch_bounds__(kThreads) collapse_kernel(const __grid_constant__ Params p) {
  __shared__ float pre[kMost];
  pdl_launch();
  pdl_wait();
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * W;
  const bool here = column < p.width;
  for (int64_t row = blockIdx.y; row < p.out.rows; row += gridDim.y) {
    Lanes<W> x[kMost];
#pragma unroll
    for (int s = 0; s < kMost; ++s) {
      if (here && s < p.count) x[s] = load_lanes<W>(p.streams.data + row * p.streams.stride + s * p.width + column);
    }
    __syncthreads();  // of the row before
    if (threadIdx.x < 32) stream_weights(p, row, static_cast<int>(threadIdx.x), blockIdx.x == 0, pre);
    __syncthreads();
    if (!here) continue;
    Lanes<W> sum;
#pragma unroll
    for (int i = 0; i < W; ++i) sum.v[i] = __fmul_rn(pre[0], x[0].v[i]);
#pragma unroll
    for (int s = 1; s < kMost; ++s) {
#pragma unroll
      for (int i = 0; i < W; ++i) {
        if (s < p.count) sum.v[i] = __fmaf_rn(pre[s], x[s].v[i], sum.v[i]);
      }
    }
    store_lanes<W>(p.out.data + row * p.out.stride + column, sum);
    if (p.zero.data != nullptr) store_lanes<W>(p.zero.data + row * p.zero.stride + column, Lanes<W>{});
  }
}

template <int W>
__global__ void __launch_bounds__(kThreads) expand_kernel(const __grid_constant__ Params p) {
  __shared__ float weights[kMost * (1 + kMost)];
  pdl_launch();
  pdl_wait();
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * W;
  const bool here = column < p.width;
  const int n = p.count, thread = static_cast<int>(threadIdx.x);
  for (int64_t row = blockIdx.y; row < p.y.rows; row += gridDim.y) {
    __syncthreads();
    if (thread < n * (1 + n)) weights[thread] = p.weights.data[row * p.weights.stride + thread];
    __syncthreads();
    if (!here) continue;
    float* streams = p.streams.data + row * p.streams.stride + column;
    Lanes<W> x[kMost];
    const Lanes<W> y = load_lanes<W>(p.y.data + row * p.y.stride + column);
#pragma unroll
    for (int s = 0; s < kMost; ++s) {
      if (s < n) x[s] = load_lanes<W>(streams + s * p.width);
    }
    for (int k = 0; k < n; ++k) {
      Lanes<W> sum;
#pragma unroll
      for (int i = 0; i < W; ++i) sum.v[i] = __fmul_rn(weights[k], y.v[i]);
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        if (j >= n) continue;
        const float weight = weights[n + j * n + k];
#pragma unroll
        for (int i = 0; i < W; ++i) sum.v[i] = __fmaf_rn(weight, x[j].v[i], sum.v[i]);
      }
      store_lanes<W>(streams + k * p.width, sum);
    }
  }
}

Params params_of(const CudaHyperArgs& args, int64_t width) {
  Params p;
  p.streams = args.streams;
  p.mix = args.mix;
  p.weights = args.weights;
  p.out = args.out;
  p.zero = args.zero;
  p.y = args.y;
  p.scale = args.scale;
  p.base = args.base;
  p.width = width;
  p.eps = args.eps;
  p.count = static_cast<int>(args.count);
  p.iterations = static_cast<int>(args.iterations);
  return p;
}

dim3 grid_of(int64_t rows, int64_t width, bool fours) {
  const int64_t columns = kThreads * (fours ? 4 : 1);
  return dim3(static_cast<unsigned>((width + columns - 1) / columns),
              static_cast<unsigned>(rows < kMostGridRows ? rows : kMostGridRows));
}

}  // namespace

void cuda_hyper_collapse(cudaStream_t stream, const CudaHyperArgs& args) {
  if (args.out.rows == 0) return;
  const int64_t width = args.out.cols;
  const bool fours = width % 4 == 0 && by_fours(args.streams) && by_fours(args.out) && by_fours(args.zero);
  launch_kernel(fours ? collapse_kernel<4> : collapse_kernel<1>, grid_of(args.out.rows, width, fours), dim3(kThreads),
                0, stream, "streams into one", params_of(args, width));
}

void cuda_hyper_expand(cudaStream_t stream, const CudaHyperArgs& args) {
  if (args.y.rows == 0) return;
  const int64_t width = args.y.cols;
  const bool fours = width % 4 == 0 && by_fours(args.streams) && by_fours(args.y);
  launch_kernel(fours ? expand_kernel<4> : expand_kernel<1>, grid_of(args.y.rows, width, fours), dim3(kThreads), 0,
                stream, "one into streams", params_of(args, width));
}

}  // namespace tensorfold
