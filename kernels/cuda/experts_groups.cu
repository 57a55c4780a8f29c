// A counting sort of pairs by expert, and the sums over slots.
//
// Every block counts all pairs (integers, so that the order of adding them tells nothing) and places those of its own 8
// experts, a warp an expert, in the order of pairs. So blocks need not wait for one another.
#include <algorithm>

#include "kernels/cuda/experts_groups.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rowwise_vec.cuh"
#include "kernels/numerics/check.h"
#include "kernels/ops/ops.h"

namespace tensorfold {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr unsigned kAll = 0xffffffffu;

struct GroupArgs {
  const float* ids = nullptr;
  int64_t ids_stride = 0;
  int32_t pairs = 0;
  int32_t slots = 0;
  int32_t experts = 0;
  int32_t chunk_rows = 0;
  ExpertLists lists;
};

__device__ __forceinline__ int expert_of(const GroupArgs& a, int pair) {
  if (pair >= a.pairs) return -1;
  const float id = a.ids[pair / a.slots * a.ids_stride + pair % a.slots];
  return id >= 0.0f && id < static_cast<float>(a.experts) ? static_cast<int>(id) : -1;
}

// Sums over the warps before a thread and over its own warp up to it, exclusive.
__device__ __forceinline__ int2 before_me(int2 mine, int2* exchange) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int2 upto = mine;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int x = __shfl_up_sync(kAll, upto.x, distance), y = __shfl_up_sync(kAll, upto.y, distance);
    if (lane >= distance) upto.x += x, upto.y += y;
  }
  if (lane == 31) exchange[warp] = upto;
  __syncthreads();
  int2 before = make_int2(upto.x - mine.x, upto.y - mine.y);
  for (int w = 0; w < warp; ++w) before.x += exchange[w].x, before.y += exchange[w].y;
  return before;
}

__global__ void __launch_bounds__(kThreads) group_kernel(const __grid_constant__ GroupArgs a) {
  extern __shared__ int counts[];  // [experts]
  __shared__ int2 exchange[kWarps];
  __shared__ int2 first[kWarps];  // place and chunk of the block's experts
  pdl_launch();
  for (int e = threadIdx.x; e < a.experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  pdl_wait();
#pragma unroll 4
  for (int pair = threadIdx.x; pair < a.pairs; pair += kThreads) {
    const int expert = expert_of(a, pair);
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  const auto chunks_of = [&](int n) { return (n + a.chunk_rows - 1) / a.chunk_rows; };
  const int own = static_cast<int>(blockIdx.x) * kWarps;
  const int each = (a.experts + kThreads - 1) / kThreads;
  const int from = min(static_cast<int>(threadIdx.x) * each, a.experts), to = min(from + each, a.experts);
  int2 mine = make_int2(0, 0);
  for (int e = from; e < to; ++e) mine.x += counts[e], mine.y += chunks_of(counts[e]);
  int2 at = before_me(mine, exchange);
  for (int e = from; e < to; ++e) {
    if (e >= own && e < own + kWarps) first[e - own] = at;
    at.x += counts[e];
    at.y += chunks_of(counts[e]);
  }
  if (blockIdx.x == 0 && threadIdx.x == kThreads - 1) *a.lists.chunk_count = at.y;
  __syncthreads();
  const int lane = threadIdx.x % 32, expert = own + static_cast<int>(threadIdx.x) / 32;
  if (expert >= a.experts || counts[expert] == 0) return;
  const int2 begin = first[expert - own];
  const int count = counts[expert];
  for (int c = lane; c < chunks_of(count); c += 32) {
    const int done = c * a.chunk_rows;
    a.lists.chunks[begin.y + c] = {expert, begin.x + done, min(a.chunk_rows, count - done), 0};
  }
  int place = begin.x;
#pragma unroll 4
  for (int base = 0; base < a.pairs; base += 32) {
    const bool here = expert_of(a, base + lane) == expert;
    const unsigned all = __ballot_sync(kAll, here);
    if (here) a.lists.pairs[place + __popc(all & ((1u << lane) - 1))] = base + lane;
    place += __popc(all);
  }
}

// A slice's sums of row blockIdx.y.
template <int W>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ ExpertSumArgs a) {
  __shared__ float weight[kMostExpertSlots];
  __shared__ int8_t there[kMostExpertSlots];
  pdl_launch();
  pdl_wait();
  const int row = blockIdx.y;
  if (threadIdx.x < a.slots) {
    const float id = a.ids[row * a.ids_stride + threadIdx.x];
    there[threadIdx.x] = id >= 0.0f && id < static_cast<float>(a.experts);
    weight[threadIdx.x] = a.weights[row * a.weights_stride + threadIdx.x];
  }
  __syncthreads();
  const int column = (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) * W;
  if (column >= a.cols) return;
  const float* y = a.y + blockIdx.z * a.matrix_stride + static_cast<int64_t>(row) * a.slots * a.y_stride + column;
  Lanes<W> sum = {};
  bool any = false;
#pragma unroll 8
  for (int j = 0; j < a.slots; ++j) {
    if (!there[j]) continue;
    const Lanes<W> part = load_lanes<W>(y + j * a.y_stride);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      sum.v[i] = any ? __fmaf_rn(weight[j], part.v[i], sum.v[i]) : __fmul_rn(weight[j], part.v[i]);
    }
    any = true;
  }
  store_lanes<W>(a.partial[blockIdx.z] + row * a.partial_stride + column, sum);
}

}  // namespace

int64_t most_expert_chunks(int64_t pairs, int64_t experts, int64_t chunk_rows) {
  return std::min(pairs, experts + pairs / chunk_rows);
}

void group_experts(cudaStream_t stream, const float* ids, int64_t ids_stride, int64_t rows, int64_t slots,
                   int64_t experts, int64_t chunk_rows, const ExpertLists& lists) {
  GroupArgs args;
  args.ids = ids;
  args.ids_stride = ids_stride;
  args.pairs = static_cast<int32_t>(rows * slots);
  args.slots = static_cast<int32_t>(slots);
  args.experts = static_cast<int32_t>(experts);
  args.chunk_rows = static_cast<int32_t>(chunk_rows);
  args.lists = lists;
  launch_kernel(group_kernel, dim3(static_cast<unsigned>((experts + kWarps - 1) / kWarps)), dim3(kThreads),
                static_cast<size_t>(experts) * sizeof(int), stream, "experts: lists", args);
}

void sum_experts(cudaStream_t stream, const ExpertSumArgs& args, int64_t rows, int64_t slices) {
  bool fours = aligned_to(args.y, 16) && args.y_stride % 4 == 0 && args.matrix_stride % 4 == 0 && args.cols % 4 == 0 &&
               args.partial_stride % 4 == 0;
  for (int64_t s = 0; s < slices; ++s) fours = fours && aligned_to(args.partial[s], 16);
  const int64_t units = fours ? args.cols / 4 : args.cols;
  const dim3 grid(static_cast<unsigned>((units + kThreads - 1) / kThreads), static_cast<unsigned>(rows),
                  static_cast<unsigned>(slices));
  launch_kernel(fours ? sum_kernel<4> : sum_kernel<1>, grid, dim3(kThreads), 0, stream, "experts: sums", args);
}

}  // namespace tensorfold
