// Norms of rows and heads, and the sum over slices that comes before them.
//
// Order of arithmetic, a function of the vector's length `dim` alone. The columns are cut into 8 contiguous parts of
// P = 4 * ceil(dim / 32) (the last ones may be shorter or empty), a part into fours. Each four is one fma chain from +0
// in ascending order; the fours of a part, 32 at a time, are added over lane distances 16, 8, 4, 2, 1; those sums of 32
// in ascending order; and the 8 parts as ((0+1)+(2+3))+((4+5)+(6+7)). A missing four counts as +0, which changes no sum
// of squares. So a warp of 32 lanes may hold a whole head, a block a whole row, or 8 blocks one row: the bits are the
// same, and neither the number of rows nor the device comes into it.
// Then out = (x * rsqrt(sum / dim + eps)) * weight, each operation rounded.
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rowwise_norm.h"
#include "kernels/cuda/rowwise_vec.cuh"
#include "kernels/cuda/warp.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kColumnParts = 8;
constexpr int kMaxThreads = 512;  // a thread has one four of a part: rows of up to 16384
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kWarpDim = 256;        // up to here a warp holds a vector, two fours a lane
constexpr int kNone = 0, kAny = -1;  // values of kParts beside 1, 2, 4, 8

__host__ __device__ constexpr int part_columns(int dim) { return (dim + 31) / 32 * 4; }

struct NormArgs {
  CudaTreeSum sum;
  float* x = nullptr;  // residual, or the plain norm's input
  int64_t x_stride = 0;
  int heads = 1;
  int vectors = 0;  // of the warp kernel: rows * heads
  int dim = 0;
  const float* weight = nullptr;
  float eps = 0.0f;
  float* out_f = nullptr;
  int64_t out_f_stride = 0;
  __nv_bfloat16* out_b = nullptr;
  int64_t out_b_stride = 0;
};

template <int W>
__device__ __forceinline__ Lanes<4> load_four(const float* p) {
  if constexpr (W == 4) {
    return load_lanes<4>(p);
  } else {
    return {p[0], p[1], p[2], p[3]};
  }
}

template <int W, typename T>
__device__ __forceinline__ void store_four(T* p, const Lanes<4>& x) {
  if constexpr (W == 4) {
    store_lanes<4>(p, x);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) store_lanes<1>(p + i, Lanes<1>{x.v[i]});
  }
}

__device__ __forceinline__ float squares(const Lanes<4>& x) {
  float s = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) s = __fmaf_rn(x.v[i], x.v[i], s);
  return s;
}

__device__ __forceinline__ float add_over(float s, int distance) {
  return __fadd_rn(s, __shfl_xor_sync(0xffffffffu, s, distance));
}

__device__ __forceinline__ float inverse_rms(float sum, int dim, float eps) {
  return rsqrtf(__fadd_rn(__fdiv_rn(sum, static_cast<float>(dim)), eps));
}

template <int W>
__device__ __forceinline__ void store_normed(const NormArgs& a, int64_t row, int column, const Lanes<4>& x,
                                             float inverse, const Lanes<4>& weight) {
  Lanes<4> y;
#pragma unroll
  for (int i = 0; i < 4; ++i) y.v[i] = __fmul_rn(__fmul_rn(x.v[i], inverse), weight.v[i]);
  if (a.out_b != nullptr) store_four<W>(a.out_b + row * a.out_b_stride + column, y);
  if (a.out_f != nullptr) store_four<W>(a.out_f + row * a.out_f_stride + column, y);
}

template <int kParts, int W>
__device__ __forceinline__ Lanes<4> sum_value(const NormArgs& a, int64_t row, int column) {
  if constexpr (kParts == kNone) {
    return load_four<W>(a.x + row * a.x_stride + column);
  } else {
    float* at = a.x + row * a.x_stride + column;
    const Lanes<4> before = load_lanes_now<4>(at);
    Lanes<4> tree;
    if constexpr (kParts == kAny) {
      Lanes<4> part[16];
      any_tree<4>(a.sum, row * a.sum.part_stride + column, part);
      tree = part[0];
    } else {
      tree = balanced_tree<kParts, 4>(a.sum, row * a.sum.part_stride + column);
    }
    const Lanes<4> after = add_lanes<4>(before, tree);
    store_lanes<4>(at, after);
    return after;
  }
}

// One row (blockIdx.x / kBlocks) and head (blockIdx.y) by kBlocks blocks, 8 of a cluster or 1; a thread has one four of
// each of its block's column parts. The bound of one block an SM lets the compiler keep all loads in flight rather than
// save registers.
template <int kParts, int kBlocks, int W>
__global__ void __launch_bounds__(kMaxThreads, 1) norm_rows(const __grid_constant__ NormArgs a) {
  constexpr int kMine = kColumnParts / kBlocks;
  __shared__ float sums[kColumnParts][kMaxWarps + 1];  // one more: the parts of a warp's sums in different banks
  __shared__ uint64_t inbox;
  pdl_launch();
  // Neighbours must be running, inbox open, before anything is sent to them; the wait for that comes after the loads.
  const bool normed = a.weight != nullptr;
  if (kBlocks > 1 && normed) {
    if (threadIdx.x == 0) inbox_open(&inbox, kColumnParts * (blockDim.x / 32) * sizeof(float));
    cluster_arrive_unfenced();
  }
  const int64_t row = blockIdx.x / kBlocks;
  const int head = blockIdx.y * a.dim;
  const int first_part = kBlocks > 1 ? cluster_rank() : 0;
  const int width = part_columns(a.dim);
  const int four = 4 * static_cast<int>(threadIdx.x);
  const int warp = uniform_warp(), lane = threadIdx.x % 32, warps = blockDim.x / 32;
  auto column = [&](int i) { return (first_part + i) * width + four; };
  auto inside = [&](int i) { return four < width && column(i) < a.dim; };

  Lanes<4> weight{};
  if (kMine == 1 && normed && inside(0)) weight = load_four<W>(a.weight + column(0));
  pdl_wait();
  Lanes<4> x[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    x[i] = Lanes<4>{};
    if (inside(i)) x[i] = sum_value<kParts, W>(a, row, head + column(i));
  }
  if (!normed) return;

  if (kBlocks > 1) cluster_wait();
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    float s = squares(x[i]);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) s = add_over(s, distance);
    if (kBlocks > 1) {
      if (lane < kBlocks) inbox_send(&inbox, &sums[first_part][warp], lane, s);
    } else if (lane == 0) {
      sums[i][warp] = s;
    }
  }
  if (kBlocks > 1) {
    inbox_wait(&inbox);  // all that others send here has come then, so that this block may end before them
  } else {
    __syncthreads();
  }
  const int part = lane % kColumnParts;
  float total = sums[part][0];
  for (int w = 1; w < warps; ++w) total = __fadd_rn(total, sums[part][w]);
#pragma unroll
  for (int distance = 1; distance < kColumnParts; distance *= 2) total = add_over(total, distance);
  const float inverse = inverse_rms(total, a.dim, a.eps);
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    if (!inside(i)) continue;
    if (kMine > 1) weight = load_four<W>(a.weight + column(i));
    store_normed<W>(a, row, head + column(i), x[i], inverse, weight);
  }
}

// A vector of at most kWarpDim by one warp: lane 4 p + j has the fours j and j + 4 of part p. Their sum is the step of
// distance 4 of a part's tree (16 and 8 only add zeros to it); then 2 and 1, then the parts.
constexpr int kWarpsPerBlock = 4;
template <int W>
__global__ void __launch_bounds__(32 * kWarpsPerBlock) norm_short(const __grid_constant__ NormArgs a) {
  pdl_launch();
  const int vector = blockIdx.x * kWarpsPerBlock + uniform_warp(), lane = threadIdx.x % 32;
  const int64_t row = vector / a.heads;
  const int head = vector % a.heads * a.dim;
  const int width = part_columns(a.dim);
  const bool live = vector < a.vectors;
  Lanes<4> x[2] = {}, weight[2] = {};
  int column[2];
  bool inside[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int in_part = 4 * (lane % 4 + 4 * i);
    column[i] = lane / 4 * width + in_part;
    inside[i] = live && in_part < width && column[i] < a.dim;
    if (inside[i]) weight[i] = load_four<W>(a.weight + column[i]);
  }
  pdl_wait();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (inside[i]) x[i] = load_four<W>(a.x + row * a.x_stride + head + column[i]);
  }
  float s = __fadd_rn(squares(x[0]), squares(x[1]));
  s = add_over(s, 2);
  s = add_over(s, 1);
  s = add_over(s, 4);
  s = add_over(s, 8);
  s = add_over(s, 16);
  const float inverse = inverse_rms(s, a.dim, a.eps);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (inside[i]) store_normed<W>(a, row, head + column[i], x[i], inverse, weight[i]);
  }
}

template <int kParts, int W>
void launch_norm_rows(NormPath path, cudaStream_t stream, int64_t rows, const NormArgs& args, const char* what) {
  const int threads = (part_columns(args.dim) / 4 + 31) / 32 * 32;
  const bool clusters =
      norm_clusters_supported() && path != NormPath::kBlock && (path == NormPath::kCluster || rows < kNormBlockRows);
  const dim3 grid(static_cast<unsigned>(clusters ? kColumnParts * rows : rows), static_cast<unsigned>(args.heads));
  if (clusters) {
    launch_cluster_kernel(kColumnParts, norm_rows<kParts, kColumnParts, W>, grid, dim3(static_cast<unsigned>(threads)),
                          0, stream, what, args);
  } else {
    launch_kernel(norm_rows<kParts, 1, W>, grid, dim3(static_cast<unsigned>(threads)), 0, stream, what, args);
  }
}

void set_outputs(DeviceMatrix out_f, DeviceInput out_b, NormArgs* args) {
  args->out_f = out_f.data;
  args->out_f_stride = out_f.stride;
  args->out_b = out_b.data;
  args->out_b_stride = out_b.stride;
}

void check_row(int64_t dim, int64_t heads, int64_t rows) {
  kernel_check(dim > 0 && dim % 4 == 0 && dim <= 4 * kMaxThreads * kColumnParts,
               "norm: the length must be a multiple of 4, at most 16384");
  kernel_check(heads > 0 && heads <= 65535 && rows * heads <= INT32_MAX / kColumnParts, "norm: too many vectors");
}

}  // namespace

bool norm_clusters_supported() { return pdl_supported(); }  // both came with compute capability 9

void cuda_rms_norm_by(NormPath path, cudaStream_t stream, DeviceMatrix x, int64_t heads, const float* weight, float eps,
                      DeviceMatrix out_f, DeviceInput out_b) {
  if (x.rows == 0) return;
  kernel_check(heads > 0 && x.cols % heads == 0, "rms_norm: shapes differ");
  check_row(x.cols / heads, heads, x.rows);
  kernel_check((out_f.data != nullptr) != (out_b.data != nullptr), "rms_norm: exactly one output");
  kernel_check(weight != nullptr, "rms_norm: no weight");
  NormArgs args;
  args.x = x.data;
  args.x_stride = x.stride;
  args.heads = static_cast<int>(heads);
  args.vectors = static_cast<int>(x.rows * heads);
  args.dim = static_cast<int>(x.cols / heads);
  args.weight = weight;
  args.eps = eps;
  set_outputs(out_f, out_b, &args);
  const bool fours = by_fours(x) && by_fours(out_f) && by_fours(out_b) && aligned_to(weight, 16);
  if (args.dim <= kWarpDim && path == NormPath::kAuto) {
    const dim3 grid(static_cast<unsigned>((args.vectors + kWarpsPerBlock - 1) / kWarpsPerBlock));
    launch_kernel(fours ? norm_short<4> : norm_short<1>, grid, dim3(32 * kWarpsPerBlock), 0, stream, "rms_norm", args);
  } else if (fours) {
    launch_norm_rows<kNone, 4>(path, stream, x.rows, args, "rms_norm");
  } else {
    launch_norm_rows<kNone, 1>(path, stream, x.rows, args, "rms_norm");
  }
}

void cuda_sum_norm_by(NormPath path, cudaStream_t stream, const CudaTreeSum& sum, DeviceMatrix residual,
                      const float* weight, float eps, DeviceMatrix out_f, DeviceInput out_b) {
  if (residual.rows == 0) return;
  check_row(residual.cols, 1, residual.rows);
  check_tree(sum);
  kernel_check(weight == nullptr || out_f.data != nullptr || out_b.data != nullptr, "sum_norm: no output");
  kernel_check(by_fours(sum) && by_fours(residual) && by_fours(out_f) && by_fours(out_b) && aligned_to(weight, 16),
               "sum_norm: rows must be aligned to 16 bytes");
  NormArgs args;
  args.sum = sum;
  args.x = residual.data;
  args.x_stride = residual.stride;
  args.dim = static_cast<int>(residual.cols);
  args.weight = weight;
  args.eps = eps;
  set_outputs(out_f, out_b, &args);
  switch (balanced_parts(sum)) {
    case 1:
      return launch_norm_rows<1, 4>(path, stream, residual.rows, args, "sum_norm");
    case 2:
      return launch_norm_rows<2, 4>(path, stream, residual.rows, args, "sum_norm");
    case 4:
      return launch_norm_rows<4, 4>(path, stream, residual.rows, args, "sum_norm");
    case 8:
      return launch_norm_rows<8, 4>(path, stream, residual.rows, args, "sum_norm");
    default:
      return launch_norm_rows<kAny, 4>(path, stream, residual.rows, args, "sum_norm");
  }
}

void cuda_rms_norm(cudaStream_t stream, DeviceMatrix x, int64_t heads, const float* weight, float eps,
                   DeviceMatrix out_f, DeviceInput out_b) {
  cuda_rms_norm_by(NormPath::kAuto, stream, x, heads, weight, eps, out_f, out_b);
}

void cuda_sum_norm(cudaStream_t stream, const CudaTreeSum& sum, DeviceMatrix residual, const float* weight, float eps,
                   DeviceMatrix out_f, DeviceInput out_b) {
  cuda_sum_norm_by(NormPath::kAuto, stream, sum, residual, weight, eps, out_f, out_b);
}

}  // namespace tensorfold
