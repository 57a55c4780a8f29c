// Operations element by element: each result is a fixed expression of the inputs of its own row and column (or of its
// row and a few columns), so that who computes it changes nothing.
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rowwise_vec.cuh"

namespace tensorfold {

inline constexpr int kEachThreads = 256;
inline constexpr int64_t kMostGridRows = 65535;

/// Runs op.at<W>(row, column) for every W-th column of every row.
template <int W, typename Op>
__global__ void __launch_bounds__(kEachThreads) each_column(const __grid_constant__ Op op, int64_t rows, int64_t cols) {
  pdl_launch();
  pdl_wait();
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kEachThreads + threadIdx.x) * W;
  if (column >= cols) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) op.template at<W>(row, column);
}

/// `fours`: addresses and widths allow W = 4.
template <typename Op>
void run_each(cudaStream_t stream, const char* what, int64_t rows, int64_t cols, bool fours, const Op& op) {
  if (rows == 0 || cols == 0) return;
  const int64_t units = fours ? cols / 4 : cols;
  const dim3 grid(static_cast<unsigned>((units + kEachThreads - 1) / kEachThreads),
                  static_cast<unsigned>(rows < kMostGridRows ? rows : kMostGridRows));
  launch_kernel(fours ? each_column<4, Op> : each_column<1, Op>, grid, dim3(kEachThreads), 0, stream, what, op, rows,
                cols);
}

/// What an operation writes: fp32, or rounded to bf16.
struct EachOut {
  float* f = nullptr;
  __nv_bfloat16* b = nullptr;
  int64_t f_stride = 0;
  int64_t b_stride = 0;
  template <int W>
  __device__ void put(int64_t row, int64_t column, const Lanes<W>& x) const {
    if (f != nullptr) store_lanes<W>(f + row * f_stride + column, x);
    if (b != nullptr) store_lanes<W>(b + row * b_stride + column, x);
  }
};

inline EachOut each_out(const DeviceMatrix& f, const DeviceInput& b) { return {f.data, b.data, f.stride, b.stride}; }

}  // namespace tensorfold
