// Element by element: each result is a fixed expression of its own inputs, so nothing here has an order to keep, except
// the tree over slices in fold, which follows the caller's plan. Products and sums are rounded one by one; fma only
// where written.
#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/rowwise.h"
#include "kernels/cuda/rowwise_each.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

bool same_shape(const DeviceMatrix& a, const DeviceMatrix& b) { return a.rows == b.rows && a.cols == b.cols; }

struct AddOp {
  DeviceMatrix a, b, out;
  template <int W>
  __device__ void at(int64_t row, int64_t column) const {
    const Lanes<W> x = load_lanes<W>(a.data + row * a.stride + column);
    const Lanes<W> y = load_lanes<W>(b.data + row * b.stride + column);
    store_lanes<W>(out.data + row * out.stride + column, add_lanes<W>(x, y));
  }
};

struct SiluMulOp {
  DeviceMatrix gate_up;
  EachOut out;
  template <int W>
  __device__ void at(int64_t row, int64_t column) const {
    const float* gate = gate_up.data + row * gate_up.stride + column;
    const Lanes<W> g = load_lanes<W>(gate);
    Lanes<W> x = load_lanes<W>(gate + gate_up.cols / 2);
#pragma unroll
    for (int i = 0; i < W; ++i) x.v[i] = __fmul_rn(silu(g.v[i]), x.v[i]);
    out.put<W>(row, column, x);
  }
};

struct SigmoidMulOp {
  DeviceMatrix x, gate;
  template <int W>
  __device__ void at(int64_t row, int64_t column) const {
    float* at = x.data + row * x.stride + column;
    Lanes<W> y = load_lanes<W>(at);
    const Lanes<W> g = load_lanes<W>(gate.data + row * gate.stride + column);
#pragma unroll
    for (int i = 0; i < W; ++i) y.v[i] = __fmul_rn(y.v[i], sigmoid(g.v[i]));
    store_lanes<W>(at, y);
  }
};

struct ScaledSiluOp {
  DeviceMatrix x;
  float scale;
  template <int W>
  __device__ void at(int64_t row, int64_t column) const {
    float* at = x.data + row * x.stride + column;
    Lanes<W> y = load_lanes<W>(at);
#pragma unroll
    for (int i = 0; i < W; ++i) y.v[i] = silu(__fmul_rn(y.v[i], scale));
    store_lanes<W>(at, y);
  }
};

struct ClearOp {
  DeviceMatrix x;
  template <int W>
  __device__ void at(int64_t row, int64_t column) const {
    store_lanes<W>(x.data + row * x.stride + column, Lanes<W>{});
  }
};

struct ToInputOp {
  DeviceMatrix x;
  DeviceInput out;
  template <int W>
  __device__ void at(int64_t row, int64_t column) const {
    store_lanes<W>(out.data + row * out.stride + column, load_lanes<W>(x.data + row * x.stride + column));
  }
};

struct FromInputOp {
  DeviceInput x;
  DeviceMatrix out;
  template <int W>
  __device__ void at(int64_t row, int64_t column) const {
    store_lanes<W>(out.data + row * out.stride + column, load_lanes<W>(x.data + row * x.stride + column));
  }
};

struct GatherOp {
  DeviceMatrix src;
  const int32_t* index;
  DeviceMatrix dst;
  template <int W>
  __device__ void at(int64_t row, int64_t column) const {
    store_lanes<W>(dst.data + row * dst.stride + column, load_lanes<W>(src.data + index[row] * src.stride + column));
  }
};

struct RopeTableOp {
  const int64_t* positions;
  const float* inv_freq;
  double factor;
  float* cos;
  float* sin;
  int64_t stride;
  template <int W>
  __device__ void at(int64_t row, int64_t column) const {
    static_assert(W == 1);
    double s, c;
    sincos(__dmul_rn(static_cast<double>(positions[row]), static_cast<double>(inv_freq[column])), &s, &c);
    cos[row * stride + column] = static_cast<float>(__dmul_rn(c, factor));
    sin[row * stride + column] = static_cast<float>(__dmul_rn(s, factor));
  }
};

struct RopeOp {
  DeviceMatrix x;
  const float* cos;
  const float* sin;
  int64_t stride;
  int head_dim;
  int pairs;
  template <int W>
  __device__ void at(int64_t row, int64_t column) const {  // column: head * pairs + pair
    static_assert(W == 1);
    const int head = static_cast<int>(column) / pairs, pair = static_cast<int>(column) % pairs;
    float* low = x.data + row * x.stride + head * head_dim + pair;
    const float a = low[0], b = low[pairs], c = cos[row * stride + pair], s = sin[row * stride + pair];
    low[0] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
    low[pairs] = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
  }
};

struct Roots {
  int root[16];
  float* out[16];
  int64_t stride[16];
  int count;
};

template <int kParts>
struct FoldBalancedOp {  // kParts > 0: the balanced tree, one root
  CudaTreeSum sum;
  Roots roots;
  template <int W>
  __device__ void at(int64_t row, int64_t column) const {
    store_lanes<W>(roots.out[0] + row * roots.stride[0] + column,
                   balanced_tree<kParts, W>(sum, row * sum.part_stride + column));
  }
};

struct FoldOp {
  CudaTreeSum sum;
  Roots roots;
  template <int W>
  __device__ void at(int64_t row, int64_t column) const {
    Lanes<W> part[16];
    any_tree<W>(sum, row * sum.part_stride + column, part);
    for (int r = 0; r < roots.count; ++r) {
      store_lanes<W>(roots.out[r] + row * roots.stride[r] + column, part[roots.root[r]]);
    }
  }
};

template <typename Op>
void run_fold(cudaStream_t stream, const CudaTreeSum& sum, const Roots& roots, int64_t rows, int64_t cols, bool fours) {
  run_each(stream, "fold", rows, cols, fours, Op{sum, roots});
}

// For operations on single columns only: fours is never asked for, and must not be instantiated.
template <typename Op>
void run_singles(cudaStream_t stream, const char* what, int64_t rows, int64_t cols, const Op& op) {
  if (rows == 0 || cols == 0) return;
  const dim3 grid(static_cast<unsigned>((cols + kEachThreads - 1) / kEachThreads),
                  static_cast<unsigned>(rows < kMostGridRows ? rows : kMostGridRows));
  launch_kernel(each_column<1, Op>, grid, dim3(kEachThreads), 0, stream, what, op, rows, cols);
}

}  // namespace

void cuda_fold(cudaStream_t stream, const CudaTreeSum& sum, int64_t rows, int64_t cols, const int* roots,
               int root_count, DeviceMatrix* out) {
  check_tree(sum);
  kernel_check(root_count >= 0 && root_count <= sum.part_count, "fold: more roots than parts");
  if (root_count == 0) return;
  Roots all = {};
  all.count = root_count;
  bool fours = cols % 4 == 0 && by_fours(sum);
  for (int r = 0; r < root_count; ++r) {
    kernel_check(roots[r] >= 0 && roots[r] < sum.part_count, "fold: a root outside the parts");
    kernel_check(out[r].rows == rows && out[r].cols == cols, "fold: shapes differ");
    all.root[r] = roots[r];
    all.out[r] = out[r].data;
    all.stride[r] = out[r].stride;
    fours = fours && by_fours(out[r]);
  }
  const int balanced = root_count == 1 && roots[0] == 0 ? balanced_parts(sum) : 0;
  switch (balanced) {
    case 1:
      return run_fold<FoldBalancedOp<1>>(stream, sum, all, rows, cols, fours);
    case 2:
      return run_fold<FoldBalancedOp<2>>(stream, sum, all, rows, cols, fours);
    case 4:
      return run_fold<FoldBalancedOp<4>>(stream, sum, all, rows, cols, fours);
    case 8:
      return run_fold<FoldBalancedOp<8>>(stream, sum, all, rows, cols, fours);
    default:
      return run_fold<FoldOp>(stream, sum, all, rows, cols, fours);
  }
}

void cuda_add(cudaStream_t stream, DeviceMatrix a, DeviceMatrix b, DeviceMatrix out) {
  kernel_check(same_shape(a, b) && same_shape(a, out), "add: shapes differ");
  run_each(stream, "add", a.rows, a.cols, a.cols % 4 == 0 && by_fours(a) && by_fours(b) && by_fours(out),
           AddOp{a, b, out});
}

void cuda_silu_mul(cudaStream_t stream, DeviceMatrix gate_up, DeviceMatrix out_f, DeviceInput out_b) {
  const int64_t n = gate_up.cols / 2;
  kernel_check(gate_up.cols % 2 == 0 && (out_f.data == nullptr || (out_f.cols == n && out_f.rows == gate_up.rows)) &&
                   (out_b.data == nullptr || (out_b.cols == n && out_b.rows == gate_up.rows)),
               "silu_mul: shapes differ");
  run_each(stream, "silu_mul", gate_up.rows, n, n % 4 == 0 && by_fours(gate_up) && by_fours(out_f) && by_fours(out_b),
           SiluMulOp{gate_up, each_out(out_f, out_b)});
}

void cuda_sigmoid_mul(cudaStream_t stream, DeviceMatrix x, DeviceMatrix gate) {
  kernel_check(same_shape(x, gate), "sigmoid_mul: shapes differ");
  run_each(stream, "sigmoid_mul", x.rows, x.cols, x.cols % 4 == 0 && by_fours(x) && by_fours(gate),
           SigmoidMulOp{x, gate});
}

void cuda_scaled_silu(cudaStream_t stream, DeviceMatrix x, float scale) {
  run_each(stream, "scaled_silu", x.rows, x.cols, x.cols % 4 == 0 && by_fours(x), ScaledSiluOp{x, scale});
}

void cuda_clear(cudaStream_t stream, DeviceMatrix x) {
  run_each(stream, "clear", x.rows, x.cols, x.cols % 4 == 0 && by_fours(x), ClearOp{x});
}

void cuda_to_input(cudaStream_t stream, DeviceMatrix x, DeviceInput out) {
  kernel_check(x.rows == out.rows && x.cols == out.cols, "to_input: shapes differ");
  run_each(stream, "to_input", x.rows, x.cols, x.cols % 4 == 0 && by_fours(x) && by_fours(out), ToInputOp{x, out});
}

void cuda_from_input(cudaStream_t stream, DeviceInput x, DeviceMatrix out) {
  kernel_check(x.rows == out.rows && x.cols == out.cols, "from_input: shapes differ");
  run_each(stream, "from_input", x.rows, x.cols, x.cols % 4 == 0 && by_fours(x) && by_fours(out), FromInputOp{x, out});
}

void cuda_gather_rows(cudaStream_t stream, DeviceMatrix src, const int32_t* index, DeviceMatrix dst) {
  kernel_check(src.cols == dst.cols, "gather_rows: shapes differ");
  run_each(stream, "gather_rows", dst.rows, dst.cols, dst.cols % 4 == 0 && by_fours(src) && by_fours(dst),
           GatherOp{src, index, dst});
}

void cuda_rope_table(cudaStream_t stream, const int64_t* positions, int64_t rows, const float* inv_freq, int64_t pairs,
                     double factor, float* cos, float* sin, int64_t stride) {
  run_singles(stream, "rope_table", rows, pairs, RopeTableOp{positions, inv_freq, factor, cos, sin, stride});
}

void cuda_rope(cudaStream_t stream, DeviceMatrix x, int64_t heads, int64_t head_dim, const float* cos, const float* sin,
               int64_t pairs, int64_t stride) {
  kernel_check(x.cols == heads * head_dim && 2 * pairs <= head_dim, "rope: shapes differ");
  run_singles(stream, "rope", x.rows, heads * pairs,
              RopeOp{x, cos, sin, stride, static_cast<int>(head_dim), static_cast<int>(pairs)});
}

}  // namespace tensorfold
