// Norms, activations and rotations of models with latents. The layer norm is a warp a row: sums are 32 chains, one a
// lane over columns lane, lane + 32, ..., then a butterfly over the lanes (16, 8, 4, 2, 1); the differences from the
// mean are squared, not the values. The others are fixed expressions of an element's own inputs.
#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/latent_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kThreads = 256;
constexpr int kNormWarps = 4;

__device__ __forceinline__ float sum_over_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// x and out may be the same: a lane reads a column before it writes it, and nobody else's.
__global__ void __launch_bounds__(32 * kNormWarps)
    layer_norm_kernel(const DeviceMatrix x, const float* weight, const float* bias, float eps, const DeviceOutput out) {
  pdl_launch();
  pdl_wait();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kNormWarps + threadIdx.x / 32;
  if (row >= x.rows) return;
  const float* from = x.data + row * x.stride;
  const float count = static_cast<float>(x.cols);
  float sum = 0.0f, squares = 0.0f;
  for (int64_t i = lane; i < x.cols; i += 32) sum = __fadd_rn(sum, from[i]);
  const float mean = __fdiv_rn(sum_over_warp(sum), count);
  for (int64_t i = lane; i < x.cols; i += 32) {
    const float d = __fsub_rn(from[i], mean);
    squares = __fmaf_rn(d, d, squares);
  }
  const float factor = rsqrtf(__fadd_rn(__fdiv_rn(sum_over_warp(squares), count), eps));
  for (int64_t i = lane; i < x.cols; i += 32) {
    const float d = __fmul_rn(__fmul_rn(__fsub_rn(from[i], mean), factor), weight[i]);
    put_output(out, row, i, __fadd_rn(d, bias[i]));
  }
}

// blockIdx.y and on: rows.
__global__ void __launch_bounds__(kThreads)
    silu_mul_limited_kernel(const DeviceMatrix gate_up, float limit, const DeviceOutput out) {
  pdl_launch();
  pdl_wait();
  const int64_t n = gate_up.cols / 2, column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= n) return;
  for (int64_t row = blockIdx.y; row < gate_up.rows; row += gridDim.y) {
    const float* from = gate_up.data + row * gate_up.stride + column;
    float gate = from[0], up = from[n];
    gate = gate > limit ? limit : gate;  // NaN stays
    up = up > limit ? limit : up < -limit ? -limit : up;
    put_output(out, row, column, __fmul_rn(silu(gate), up));
  }
}

// A thread a pair: columns head * pairs + pair.
__global__ void __launch_bounds__(kThreads)
    rope_pairs_kernel(const DeviceMatrix x, int64_t head_dim, const float* cos, const float* sin, int64_t pairs,
                      int64_t stride, bool back) {
  pdl_launch();
  pdl_wait();
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t head = column / pairs, pair = column % pairs;
  if (head * head_dim >= x.cols) return;
  for (int64_t row = blockIdx.y; row < x.rows; row += gridDim.y) {
    float* at = x.data + row * x.stride + (head + 1) * head_dim - 2 * pairs + 2 * pair;
    const float a = at[0], b = at[1], c = cos[row * stride + pair], angle = sin[row * stride + pair];
    const float s = back ? -angle : angle;
    at[0] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
    at[1] = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
  }
}

dim3 columns_and_rows(int64_t columns, int64_t rows) {
  constexpr int64_t kMostGridRows = 65535;
  return dim3(static_cast<unsigned>((columns + kThreads - 1) / kThreads),
              static_cast<unsigned>(rows < kMostGridRows ? rows : kMostGridRows));
}

}  // namespace

void cuda_layer_norm(cudaStream_t stream, DeviceMatrix x, const float* weight, const float* bias, float eps,
                     const DeviceOutput& out) {
  kernel_check(out.rows() == x.rows && out.cols() == x.cols, "layer_norm: shapes differ");
  if (x.rows == 0) return;
  const dim3 grid(static_cast<unsigned>((x.rows + kNormWarps - 1) / kNormWarps));
  launch_kernel(layer_norm_kernel, grid, dim3(32 * kNormWarps), 0, stream, "layer norm", x, weight, bias, eps, out);
}

void cuda_silu_mul_limited(cudaStream_t stream, DeviceMatrix gate_up, float limit, const DeviceOutput& out) {
  kernel_check(gate_up.cols == 2 * out.cols() && gate_up.rows == out.rows() && limit > 0.0f,
               "silu_mul_limited: shapes differ");
  if (gate_up.rows == 0 || out.cols() == 0) return;
  launch_kernel(silu_mul_limited_kernel, columns_and_rows(out.cols(), gate_up.rows), dim3(kThreads), 0, stream,
                "limited silu", gate_up, limit, out);
}

void cuda_rope_pairs(cudaStream_t stream, DeviceMatrix x, int64_t heads, int64_t head_dim, const float* cos,
                     const float* sin, int64_t pairs, int64_t stride, bool back) {
  kernel_check(x.cols == heads * head_dim && 2 * pairs <= head_dim, "rope_pairs: shapes differ");
  if (x.rows == 0 || pairs == 0) return;
  launch_kernel(rope_pairs_kernel, columns_and_rows(heads * pairs, x.rows), dim3(kThreads), 0, stream, "rope of pairs",
                x, head_dim, cos, sin, pairs, stride, back);
}

}  // namespace tensorfold
