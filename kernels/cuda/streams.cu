// See streams.h.
//
// Orders. gate: elements of a stream go in fours, four j to thread j mod 256; a thread's are one fma chain, ascending;
// lanes are added over distances 16, 8, 4, 2, 1, then the 8 warps ascending. collapse: weights by one thread each, sums
// of C's lines ascending; then each column by one thread, streams ascending.
#include <cmath>

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/rowwise_each.cuh"
#include "kernels/cuda/streams.h"
#include "kernels/numerics/check.h"
#include "kernels/ops/latent_ops.h"
#include "kernels/ops/stream_ops.h"

namespace tensorfold {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMost = static_cast<int>(kMostStreams);
static_assert(kMostStreams == kMostGatedStreams);

struct MixOp {
  const float* x_f;
  const __nv_bfloat16* x_b;
  int64_t x_stride;
  DeviceMatrix gate;
  int64_t width;
  int count;
  float share;
  EachOut out;
  template <int W>
  __device__ void at(int64_t row, int64_t column) const {
    Lanes<W> sum{};
    for (int s = 0; s < count; ++s) {
      const int64_t from = s * width + column;
      const Lanes<W> x =
          x_f != nullptr ? load_lanes<W>(x_f + row * x_stride + from) : load_lanes<W>(x_b + row * x_stride + from);
      const Lanes<W> g = load_lanes<W>(gate.data + row * gate.stride + from);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const float weight = sigmoid(g.v[i]);
        sum.v[i] = s == 0 ? __fmul_rn(weight, x.v[i]) : __fmaf_rn(weight, x.v[i], sum.v[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < W; ++i) sum.v[i] = __fmul_rn(sum.v[i], share);
    out.put<W>(row, column, sum);
  }
};

struct InjectOp {
  DeviceMatrix x, inject, y;
  int64_t width;
  int count;
  float share;
  template <int W>
  __device__ void at(int64_t row, int64_t column) const {
    const Lanes<W> add = load_lanes<W>(y.data + row * y.stride + column);
    for (int s = 0; s < count; ++s) {
      const float weight = __fmul_rn(2.0f, sigmoid(__fmul_rn(inject.data[row * inject.stride + s], share)));
      float* at = x.data + row * x.stride + s * width + column;
      Lanes<W> value = load_lanes<W>(at);
#pragma unroll
      for (int i = 0; i < W; ++i) value.v[i] = __fmaf_rn(weight, add.v[i], value.v[i]);
      store_lanes<W>(at, value);
    }
  }
};

struct GateParams {
  DeviceMatrix key, query, value, out;
  int width;
  float root;
  bool fours;
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// blockIdx.x: row; blockIdx.y: stream.
__global__ void __launch_bounds__(kThreads) gate_kernel(const __grid_constant__ GateParams p) {
  __shared__ float sums[kWarps];
  pdl_launch();
  pdl_wait();
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x, offset = static_cast<int64_t>(blockIdx.y) * p.width;
  const float* key = p.key.data + row * p.key.stride + offset;
  const float* query = p.query.data + row * p.query.stride + offset;
  float sum = 0.0f;
  for (int d = 4 * thread; d < p.width; d += 4 * kThreads) {
    float a[4], b[4];
    if (p.fours) {
      const Lanes<4> k = load_lanes<4>(key + d), q = load_lanes<4>(query + d);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = k.v[i];
        b[i] = q.v[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = d + i < p.width ? key[d + i] : 0.0f;
        b[i] = d + i < p.width ? query[d + i] : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = __fmaf_rn(a[i], b[i], sum);
  }
  sum = warp_sum(sum);
  if (thread % 32 == 0) sums[thread / 32] = sum;
  __syncthreads();
  float total = sums[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) total = __fadd_rn(total, sums[w]);

  const float score = __fdiv_rn(total, p.root);
  const float magnitude = score < 0.0f ? -score : score;
  const float bent = __fsqrt_rn(magnitude < 1e-6f ? 1e-6f : magnitude);
  // 0 stays 0, NaN stays NaN.
  const float gate = sigmoid(score < 0.0f ? -bent : (score > 0.0f ? bent : __fmul_rn(score, bent)));
  const float* value = p.value.data + row * p.value.stride;
  float* out = p.out.data + row * p.out.stride + offset;
  if (p.fours) {
    for (int d = 4 * thread; d < p.width; d += 4 * kThreads) {
      Lanes<4> v = load_lanes<4>(value + d);
#pragma unroll
      for (int i = 0; i < 4; ++i) v.v[i] = __fmul_rn(gate, v.v[i]);
      store_lanes<4>(out + d, v);
    }
  } else {
    for (int d = thread; d < p.width; d += kThreads) out[d] = __fmul_rn(gate, value[d]);
  }
}

struct CollapseParams {
  DeviceMatrix streams, mix, weights, zero, carried;
  const float* scale;
  const float* base;
  EachOut out;
  float eps;
  int count, width, iterations;
};

// C [n, n] in shared memory, an element a thread: each line's elements over the line's sum + eps. `along` and `across`:
// between a line's elements, and between lines.
__device__ __forceinline__ void balance_lines(float* c, int n, int element, bool rows, float eps) {
  float value = 0.0f;
  if (element < n * n) {
    const int line = rows ? element / n * n : element % n, along = rows ? 1 : n;
    float sum = c[line];
    for (int i = 1; i < n; ++i) sum = __fadd_rn(sum, c[line + i * along]);
    value = __fdiv_rn(c[element], __fadd_rn(sum, eps));
  }
  __syncthreads();
  if (element < n * n) c[element] = value;
  __syncthreads();
}

// A row's C: softmax of each row of logits + eps, then columns and rows in turn.
__device__ __forceinline__ void balance(const CollapseParams& p, const float* logits, float* c, int thread) {
  const int n = p.count;
  if (thread < n * n) {
    const float* line = logits + thread / n * n;
    float largest = line[0], sum = 0.0f;
    for (int i = 1; i < n; ++i) largest = fmaxf(largest, line[i]);
    for (int i = 0; i < n; ++i) sum = __fadd_rn(sum, __expf(__fsub_rn(line[i], largest)));
    c[thread] = __fadd_rn(__fdiv_rn(__expf(__fsub_rn(logits[thread], largest)), sum), p.eps);
  }
  __syncthreads();
  balance_lines(c, n, thread, false, p.eps);
  for (int i = 1; i < p.iterations; ++i) {
    balance_lines(c, n, thread, true, p.eps);
    balance_lines(c, n, thread, false, p.eps);
  }
}

// A block a row.
__global__ void __launch_bounds__(kThreads) collapse_kernel(const __grid_constant__ CollapseParams p) {
  __shared__ float logits[kMost * (2 + kMost)];
  __shared__ float c[kMost * kMost];
  __shared__ float pre[kMost];
  pdl_launch();
  pdl_wait();
  const int thread = static_cast<int>(threadIdx.x), n = p.count;
  const int64_t row = blockIdx.x;
  const bool mixed = p.mix.data != nullptr, whole = mixed && p.mix.cols > n;
  if (mixed && thread < p.mix.cols) {
    logits[thread] =
        __fadd_rn(__fmul_rn(p.mix.data[row * p.mix.stride + thread], p.scale[min(thread / n, 2)]), p.base[thread]);
  }
  __syncthreads();
  if (thread < n) {
    float own = mixed ? __fadd_rn(sigmoid(logits[thread]), p.eps) : __fdiv_rn(1.0f, static_cast<float>(n));
    if (p.carried.data != nullptr) {
      float* carried = p.carried.data + row * p.carried.stride + thread;
      const float before = *carried;
      if (mixed) *carried = own;
      own = before;
    }
    pre[thread] = own;
  }
  if (whole) {
    float* post = p.weights.data + row * p.weights.stride;
    if (thread < n) post[thread] = __fmul_rn(2.0f, sigmoid(logits[n + thread]));
    balance(p, logits + 2 * n, c, thread);
    if (thread < n * n) post[n + thread] = c[thread];
  }
  __syncthreads();
  const float* streams = p.streams.data + row * p.streams.stride;
  for (int d = thread; d < p.width; d += kThreads) {
    float sum = __fmul_rn(pre[0], streams[d]);
    for (int s = 1; s < n; ++s) sum = __fmaf_rn(pre[s], streams[static_cast<int64_t>(s) * p.width + d], sum);
    p.out.put<1>(row, d, Lanes<1>{sum});
    if (p.zero.data != nullptr) p.zero.data[row * p.zero.stride + d] = 0.0f;
  }
}

struct ExpandOp {
  DeviceMatrix streams, weights, y;
  int64_t width;
  int count;
  template <int W>
  __device__ void at(int64_t row, int64_t column) const {
    const float* post = weights.data + row * weights.stride;
    float* first = streams.data + row * streams.stride + column;
    const Lanes<W> block = load_lanes<W>(y.data + row * y.stride + column);
    Lanes<W> x[kMost];
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      if (j < count) x[j] = load_lanes<W>(first + j * width);
    }
    for (int k = 0; k < count; ++k) {
      Lanes<W> sum;
#pragma unroll
      for (int i = 0; i < W; ++i) sum.v[i] = __fmul_rn(post[k], block.v[i]);
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        if (j >= count) continue;
        const float weight = post[count + j * count + k];
#pragma unroll
        for (int i = 0; i < W; ++i) sum.v[i] = __fmaf_rn(weight, x[j].v[i], sum.v[i]);
      }
      store_lanes<W>(first + k * width, sum);
    }
  }
};

bool same_shape(const DeviceMatrix& a, const DeviceMatrix& b) { return a.rows == b.rows && a.cols == b.cols; }
bool counted(int64_t count) { return count >= 1 && count <= kMost; }

}  // namespace

void cuda_mix_streams(cudaStream_t stream, const CudaMixStreams& args) {
  const bool wide = args.x_f.data != nullptr;
  const int64_t rows = wide ? args.x_f.rows : args.x_b.rows, cols = wide ? args.x_f.cols : args.x_b.cols;
  const int64_t width = args.out_f.data != nullptr ? args.out_f.cols : args.out_b.cols;
  const int64_t out_rows = args.out_f.data != nullptr ? args.out_f.rows : args.out_b.rows;
  kernel_check(counted(args.count) && cols == args.count * width && args.gate.cols == cols && args.gate.rows == rows &&
                   out_rows == rows,
               "mix_streams: shapes differ");
  const MixOp op = {args.x_f.data,
                    args.x_b.data,
                    wide ? args.x_f.stride : args.x_b.stride,
                    args.gate,
                    width,
                    static_cast<int>(args.count),
                    1.0f / static_cast<float>(args.count),
                    each_out(args.out_f, args.out_b)};
  const bool fours = width % 4 == 0 && by_fours(args.x_f) && by_fours(args.x_b) && by_fours(args.gate) &&
                     by_fours(args.out_f) && by_fours(args.out_b);
  run_each(stream, "mix_streams", rows, width, fours, op);
}

void cuda_inject_streams(cudaStream_t stream, DeviceMatrix x, DeviceMatrix inject, int64_t count, DeviceMatrix y) {
  kernel_check(
      counted(count) && x.cols == count * y.cols && inject.cols == count && inject.rows == x.rows && y.rows == x.rows,
      "inject_streams: shapes differ");
  const InjectOp op = {x, inject, y, y.cols, static_cast<int>(count), 1.0f / static_cast<float>(count)};
  run_each(stream, "inject_streams", x.rows, y.cols, y.cols % 4 == 0 && by_fours(x) && by_fours(y), op);
}

void cuda_gate_streams(cudaStream_t stream, DeviceMatrix key, DeviceMatrix query, DeviceMatrix value, int64_t count,
                       DeviceMatrix out) {
  kernel_check(counted(count) && key.cols == count * value.cols && same_shape(key, query) && same_shape(key, out) &&
                   value.rows == key.rows,
               "gate_streams: shapes differ");
  if (key.rows == 0) return;
  GateParams p = {key, query, value, out, static_cast<int>(value.cols), 0.0f, false};
  p.root = std::sqrt(static_cast<float>(value.cols));
  p.fours = value.cols % 4 == 0 && by_fours(key) && by_fours(query) && by_fours(value) && by_fours(out);
  const dim3 grid(static_cast<unsigned>(key.rows), static_cast<unsigned>(count));
  launch_kernel(gate_kernel, grid, dim3(kThreads), 0, stream, "gate_streams", p);
}

void cuda_hyper_collapse(cudaStream_t stream, const CudaHyper& args) {
  const int64_t n = args.count, rows = args.streams.rows;
  const int64_t width = args.out_f.data != nullptr ? args.out_f.cols : args.out_b.cols;
  const bool unmixed = args.mix.data == nullptr, whole = !unmixed && args.mix.cols == n * (2 + n);
  kernel_check(counted(n) && args.streams.cols == n * width && (unmixed || whole || args.mix.cols == n) &&
                   (unmixed || args.mix.rows == rows) &&
                   (!whole || (args.weights.cols == n * (1 + n) && args.weights.rows == rows)) &&
                   (args.zero.data == nullptr || (args.zero.rows == rows && args.zero.cols == width)) &&
                   (args.carried.data == nullptr || (args.carried.rows == rows && args.carried.cols == n)),
               "hyper_collapse: shapes differ");
  if (rows == 0) return;
  CollapseParams p = {args.streams,
                      args.mix,
                      args.weights,
                      args.zero,
                      args.carried,
                      args.scale,
                      args.base,
                      each_out(args.out_f, args.out_b),
                      args.eps,
                      static_cast<int>(n),
                      static_cast<int>(width),
                      static_cast<int>(args.iterations)};
  launch_kernel(collapse_kernel, dim3(static_cast<unsigned>(rows)), dim3(kThreads), 0, stream, "hyper_collapse", p);
}

void cuda_hyper_expand(cudaStream_t stream, const CudaHyper& args) {
  const int64_t n = args.count, width = args.y.cols;
  kernel_check(counted(n) && args.streams.cols == n * width && args.streams.rows == args.y.rows &&
                   args.weights.cols == n * (1 + n) && args.weights.rows == args.y.rows,
               "hyper_expand: shapes differ");
  const ExpandOp op = {args.streams, args.weights, args.y, width, static_cast<int>(n)};
  run_each(stream, "hyper_expand", args.y.rows, width, width % 4 == 0 && by_fours(args.streams) && by_fours(args.y),
           op);
}

}  // namespace tensorfold
