// The best columns of each row of logits, exactly: logits and columns are compared as integers (candidates_key.h) and
// the order is total, so there is one right answer and no order of work to keep.
//
// Up to 64 candidates: blocks find the best of 2048 columns each, then one block a row finds the best of those. Within
// a block, the n-th largest of the threads' own maxima bounds the n-th best from below; at most n threads hold anything
// at or above it, usually little more than n keys in all. The place of each of those is the number of larger ones.
// More: one block a row narrows the n-th best key down by histograms of 11 bits at a time, collects and sorts.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/candidates_key.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rowwise.h"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

using Key = unsigned long long;  // of candidate_key

constexpr int kPartThreads = 256;
constexpr int kPartKeys = 8;  // a thread
constexpr int kPartColumns = kPartThreads * kPartKeys;
constexpr int kMergeThreads = 512;
constexpr int kLargeThreads = 1024;
constexpr int64_t kFewCandidates = 64;
constexpr int64_t kMaxMergeBytes = 40 * 1024;

struct CandidateArgs {
  const float* logits = nullptr;
  int64_t stride = 0;
  int cols = 0;
  int first_id = 0;
  int n = 0;
  int parts = 0;
  bool fours = false;
  Key* lists = nullptr;  // [rows][parts][n], each list in order, 0 where there is none
  Candidate* out = nullptr;
};

__device__ __forceinline__ Key key_at(const float* row, int column) {
  return candidate_key(__float_as_uint(row[column]), column);
}

__device__ __forceinline__ void write_out(const CandidateArgs& a, int64_t row, int place, Key key) {
  Candidate best;
  best.logit = -INFINITY;
  best.id = -1;
  if (key != 0) {
    const int column = candidate_column(key);
    best.logit = a.logits[row * a.stride + column];
    best.id = a.first_id + column;
  }
  a.out[row * a.n + place] = best;
}

// The largest key of all threads, for thread 0.
template <int kThreads>
__device__ __forceinline__ Key block_max(Key key, Key* exchange) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    key = max(key, __shfl_xor_sync(0xffffffffu, key, distance));
  }
  if (threadIdx.x % 32 == 0) exchange[threadIdx.x / 32] = key;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int w = 1; w < kThreads / 32; ++w) key = max(key, exchange[w]);
  }
  return key;
}

// The n-th largest of the threads' keys (n counts from 1), for all threads: a bitonic sort, one key a thread.
template <int kThreads>
__device__ __forceinline__ Key nth_largest(Key key, int n, Key* exchange) {
  const int me = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int size = 2; size <= kThreads; size *= 2) {
#pragma unroll
    for (int distance = size / 2; distance > 0; distance /= 2) {
      Key other;
      if (distance < 32) {
        other = __shfl_xor_sync(0xffffffffu, key, distance);
      } else {
        exchange[me] = key;
        __syncthreads();
        other = exchange[me ^ distance];
        __syncthreads();
      }
      const bool falling = (me & size) == 0, low = (me & distance) == 0;
      key = falling == low ? max(key, other) : min(key, other);
    }
  }
  if (me == n - 1) exchange[0] = key;
  __syncthreads();
  return exchange[0];
}

// The number of keys in list[0..count) above `key`.
__device__ __forceinline__ int place_of(Key key, const Key* list, int count) {
  int place = 0;
#pragma unroll 8
  for (int i = 0; i < count; ++i) place += list[i] > key ? 1 : 0;
  return place;
}

// Part blockIdx.x of row blockIdx.y.
template <bool kOne>
__global__ void __launch_bounds__(kPartThreads) best_of_part(const __grid_constant__ CandidateArgs a) {
  __shared__ Key exchange[kPartThreads];
  __shared__ Key list[kOne ? 1 : kFewCandidates * kPartKeys];
  __shared__ int listed;
  pdl_launch();
  if (threadIdx.x == 0) listed = 0;  // seen by all after the barriers of nth_largest
  pdl_wait();
  const int64_t row = blockIdx.y;
  const float* logits = a.logits + row * a.stride;
  Key keys[kPartKeys];
#pragma unroll
  for (int i = 0; i < kPartKeys; i += 4) {
    const int column = static_cast<int>(blockIdx.x) * kPartColumns + (i / 4 * kPartThreads + threadIdx.x) * 4;
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (a.fours && column + 4 <= a.cols) {
      x = *reinterpret_cast<const float4*>(logits + column);
    } else {
      if (column + 0 < a.cols) x.x = logits[column + 0];
      if (column + 1 < a.cols) x.y = logits[column + 1];
      if (column + 2 < a.cols) x.z = logits[column + 2];
      if (column + 3 < a.cols) x.w = logits[column + 3];
    }
    keys[i + 0] = column + 0 < a.cols ? candidate_key(__float_as_uint(x.x), column + 0) : 0;
    keys[i + 1] = column + 1 < a.cols ? candidate_key(__float_as_uint(x.y), column + 1) : 0;
    keys[i + 2] = column + 2 < a.cols ? candidate_key(__float_as_uint(x.z), column + 2) : 0;
    keys[i + 3] = column + 3 < a.cols ? candidate_key(__float_as_uint(x.w), column + 3) : 0;
  }
  Key best = keys[0];
#pragma unroll
  for (int i = 1; i < kPartKeys; ++i) best = max(best, keys[i]);

  Key* out = a.lists + (row * a.parts + blockIdx.x) * a.n;
  if constexpr (kOne) {
    best = block_max<kPartThreads>(best, exchange);
    if (threadIdx.x == 0) out[0] = best;
  } else {
    const Key bound = max(nth_largest<kPartThreads>(best, a.n, exchange), Key{1});
    if (best >= bound) {
#pragma unroll
      for (int i = 0; i < kPartKeys; ++i) {
        if (keys[i] >= bound) list[atomicAdd(&listed, 1)] = keys[i];
      }
    }
    __syncthreads();
    const int count = listed;
    for (int i = threadIdx.x; i < count; i += kPartThreads) {
      const int place = place_of(list[i], list, count);
      if (place < a.n) out[place] = list[i];
    }
    for (int i = count + threadIdx.x; i < a.n; i += kPartThreads) out[i] = 0;
  }
}

// All lists of row blockIdx.x.
template <bool kOne>
__global__ void __launch_bounds__(kMergeThreads) best_of_lists(const __grid_constant__ CandidateArgs a) {
  extern __shared__ Key list[];  // the threads of n maxima, all their keys
  __shared__ Key exchange[kMergeThreads];
  __shared__ int listed;
  pdl_launch();
  if (threadIdx.x == 0) listed = 0;
  pdl_wait();
  const int64_t row = blockIdx.x;
  const int total = a.parts * a.n;
  const Key* keys = a.lists + row * total;
  Key best = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < total; i += kMergeThreads) best = max(best, keys[i]);
  if constexpr (kOne) {
    best = block_max<kMergeThreads>(best, exchange);
    if (threadIdx.x == 0) write_out(a, row, 0, best);
  } else {
    const Key bound = max(nth_largest<kMergeThreads>(best, a.n, exchange), Key{1});
    if (best >= bound) {
#pragma unroll 4
      for (int i = threadIdx.x; i < total; i += kMergeThreads) {
        const Key key = keys[i];
        if (key >= bound) list[atomicAdd(&listed, 1)] = key;
      }
    }
    __syncthreads();
    const int count = listed;
    for (int i = threadIdx.x; i < count; i += kMergeThreads) {
      const int place = place_of(list[i], list, count);
      if (place < a.n) write_out(a, row, place, list[i]);
    }
    for (int i = count + threadIdx.x; i < a.n; i += kMergeThreads) write_out(a, row, i, 0);
  }
}

// Finds, by the first warp, the bin that holds the need-th largest of a histogram and how many are in bins above it.
template <int kBins>
__device__ __forceinline__ void find_bin(const unsigned* histogram, unsigned need, unsigned* bin, unsigned* above) {
  constexpr int kEach = kBins / 32;
  const int lane = static_cast<int>(threadIdx.x);
  unsigned mine = 0;
  for (int j = 0; j < kEach; ++j) mine += histogram[lane * kEach + (j + lane) % kEach];  // lanes in different banks
  unsigned from_me = mine;  // of my bins and all lanes' above
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const unsigned more = __shfl_down_sync(0xffffffffu, from_me, distance);
    if (lane + distance < 32) from_me += more;
  }
  unsigned over = from_me - mine;
  if (over >= need || from_me < need) return;
  int j = kEach - 1;
  while (over + histogram[lane * kEach + j] < need) over += histogram[lane * kEach + j--];
  *bin = static_cast<unsigned>(lane * kEach + j);
  *above = over;
}

// Sorts 2^k keys in shared memory, largest first.
__device__ void sort_falling(Key* list, int count) {
  for (int size = 2; size <= count; size *= 2) {
    for (int distance = size / 2; distance > 0; distance /= 2) {
      for (int i = threadIdx.x; i < count / 2; i += kLargeThreads) {
        const int low = 2 * i - (i & (distance - 1)), high = low + distance;
        const Key a = list[low], b = list[high];
        if ((a < b) == ((low & size) == 0)) {
          list[low] = b;
          list[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

__global__ void __launch_bounds__(kLargeThreads) best_of_row(const __grid_constant__ CandidateArgs a) {
  __shared__ Key list[kMaxCudaCandidates];
  __shared__ unsigned histogram[2048];
  __shared__ unsigned bin, above;
  __shared__ int listed;
  pdl_launch();
  pdl_wait();
  const int64_t row = blockIdx.x;
  const float* logits = a.logits + row * a.stride;
  unsigned need = min(a.n, a.cols);
  Key prefix = 0, mask = 0;
  for (int digit = 0; digit < 6 && need > 0; ++digit) {
    // The bits of a key from above: 11, 11, 10 of the logit, then 11, 11, 10 of the column.
    const int bits = digit % 3 == 2 ? 10 : 11;
    const int shift = (digit < 3 ? 32 : 0) + (digit % 3 == 0 ? 21 : digit % 3 == 1 ? 10 : 0);
    const unsigned low_bits = (1u << bits) - 1;
    for (int i = threadIdx.x; i < 2048; i += kLargeThreads) histogram[i] = 0;
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < a.cols; i += kLargeThreads) {
      const Key key = key_at(logits, i);
      if ((key & mask) == prefix) atomicAdd(&histogram[static_cast<unsigned>(key >> shift) & low_bits], 1u);
    }
    __syncthreads();
    if (threadIdx.x < 32) find_bin<2048>(histogram, need, &bin, &above);
    __syncthreads();
    const unsigned found = bin;
    need -= above;
    prefix |= static_cast<Key>(found) << shift;
    mask |= static_cast<Key>(low_bits) << shift;
    const bool whole_bin = histogram[found] == need;
    __syncthreads();  // before the next digit clears what has just been read
    if (whole_bin) break;
  }
  if (threadIdx.x == 0) listed = 0;
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < a.cols; i += kLargeThreads) {
    const Key key = key_at(logits, i);
    if (key >= prefix) list[atomicAdd(&listed, 1)] = key;
  }
  __syncthreads();
  int size = 1;
  while (size < a.n) size *= 2;
  for (int i = listed + threadIdx.x; i < size; i += kLargeThreads) list[i] = 0;
  __syncthreads();
  sort_falling(list, size);
  for (int i = threadIdx.x; i < a.n; i += kLargeThreads) write_out(a, row, i, list[i]);
}

int64_t part_count(int64_t cols) { return std::max<int64_t>(1, (cols + kPartColumns - 1) / kPartColumns); }

// Most that can be listed when merging: n threads with all they hold.
int64_t merge_bytes(int64_t cols, int64_t n) {
  return n * ((part_count(cols) * n + kMergeThreads - 1) / kMergeThreads) * static_cast<int64_t>(sizeof(Key));
}

bool in_parts(int64_t cols, int64_t n) { return n <= kFewCandidates && merge_bytes(cols, n) <= kMaxMergeBytes; }

}  // namespace

int64_t cuda_candidates_workspace(int64_t rows, int64_t cols, int64_t n) {
  const int64_t keys = in_parts(cols, n) ? rows * part_count(cols) * n : 0;
  return std::max<int64_t>(1, keys) * static_cast<int64_t>(sizeof(Key));
}

void cuda_candidates(cudaStream_t stream, DeviceMatrix logits, int32_t first_id, int64_t n, void* workspace,
                     Candidate* out) {
  kernel_check(n >= 0 && n <= kMaxCudaCandidates, "candidates: at most 4096");
  kernel_check(logits.rows <= 65535 && logits.cols <= INT32_MAX - kPartColumns, "candidates: too many logits");
  if (logits.rows == 0 || n == 0) return;
  CandidateArgs args;
  args.logits = logits.data;
  args.stride = logits.stride;
  args.cols = static_cast<int>(logits.cols);
  args.first_id = first_id;
  args.n = static_cast<int>(n);
  args.parts = static_cast<int>(part_count(logits.cols));
  args.fours = reinterpret_cast<uintptr_t>(logits.data) % 16 == 0 && logits.stride % 4 == 0;
  args.lists = static_cast<Key*>(workspace);
  args.out = out;
  const unsigned rows = static_cast<unsigned>(logits.rows);
  if (!in_parts(logits.cols, n)) {
    launch_kernel(best_of_row, dim3(rows), dim3(kLargeThreads), 0, stream, "candidates", args);
    return;
  }
  const dim3 grid(static_cast<unsigned>(args.parts), rows);
  launch_kernel(n == 1 ? best_of_part<true> : best_of_part<false>, grid, dim3(kPartThreads), 0, stream, "candidates",
                args);
  const size_t shared = n == 1 ? 0 : static_cast<size_t>(merge_bytes(logits.cols, n));
  launch_kernel(n == 1 ? best_of_lists<true> : best_of_lists<false>, dim3(rows), dim3(kMergeThreads), shared, stream,
                "candidates", args);
}

}  // namespace tensorfold
