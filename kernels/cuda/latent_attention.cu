// Attention of every head over one list of cached rows that are keys and values at once.
//
// The arithmetic, for every row of every pass. The list is visited in blocks of 64 and splits of 512, both from its
// beginning. Queries and rows are rounded to bf16.
//   score   two chains of m16n8k16 accumulators, over the even and the odd ones of the steps of 16 values, ascending;
//           their sum; beyond the list's end -infinity
//   m, weight, sum, o, splits, out: as attention.cu has them; blocks are the list's, and heads are the rows of the atom
//   sinks   at the end: next = max(m * scale, sink); k = exp2((m * scale - next) * log2 e); O = O * k,
//           Sum = fma(Sum, k, exp2((sink - next) * log2 e))
// How many heads a block has, and which splits a launch, is in none of this.
//
// Rows of blocks of drafts (block_ops.h) come from the cache and then from a tensor; a list of them is as any other.
//
// A block has the splits' rows of one row of the pass, and 16 or 32 heads: eight warps, each with eight keys for scores
// and an eighth of the values for the weighted sum. Rows come from the pages as fp32 and are rounded on the way.
#include <algorithm>

#include "kernels/cuda/attention_kernels.cuh"
#include "kernels/cuda/latent_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/warp.cuh"
#include "kernels/numerics/check.h"
#include "kernels/ops/block_ops.h"

namespace tensorfold {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kKeys = 64;  // of a block of keys: 8 a warp
constexpr int kSplit = static_cast<int>(kKeySplit);
constexpr int kMostTiles = static_cast<int>(kMostLatentWidth) / 8 / kWarps;  // of 8 values, of a warp
constexpr int kWidthUnit = 128;                                              // widths are padded to it
constexpr int kFoldThreads = 128;
constexpr int64_t kPartFloats = int64_t{8} << 20;  // states of splits that are kept at a time
constexpr int64_t kFewestSplits = 4;
constexpr int64_t kMostGrid = 65535;
constexpr float kLog2E = 1.44269504088896341f;

struct Params {
  DeviceRows rows;
  DeviceMatrix q;
  DeviceOutput out;
  DeviceRowLayer latents, pooled;
  DeviceMatrix selected, block;
  const float* sinks;
  float* part_o;             // [splits of the launch, rows of the launch, heads, width]
  SoftmaxState* part_state;  // [splits of the launch, rows of the launch, heads]
  float* run_o;              // [rows of the launch, heads, width]
  SoftmaxState* run_state;   // [rows of the launch, heads, pieces of a fold]
  int64_t first_row, row_count;
  int64_t window;
  float scale, factor;  // factor: scale * log2(e)
  int heads, width, padded, tokens;
  int first_split, split_count;
  bool last_splits;
};

// A row's list: `chosen` entries of selected windows, then `rest` positions from `from` on, then `own` rows of its
// block from `first_own` on.
struct List {
  const float* selected;  // or null: the first ones
  const int32_t* pages;
  int64_t chosen = 0;
  int64_t rest = 0;
  int64_t from = 0;
  int64_t own = 0;
  int64_t first_own = 0;

  __device__ __forceinline__ int64_t size() const { return chosen + rest + own; }
  __device__ __forceinline__ int64_t number(int64_t i) const {
    return selected != nullptr ? static_cast<int64_t>(selected[i]) : i;
  }
  __device__ __forceinline__ const float* entry(const Params& p, int64_t n) const {
    if (n >= chosen + rest) return p.block.data + (first_own + n - chosen - rest) * p.block.stride;
    if (n >= chosen) return latent_row(p.latents, pages, from + n - chosen);
    if (p.window > 0) return latent_row(p.pooled, pages, (number(n) + 1) * p.tokens - 1);
    return latent_row(p.latents, pages, number(n / p.tokens) * p.tokens + n % p.tokens);
  }
};

// All threads of a block call it.
__device__ __forceinline__ List list_of(const Params& p, int64_t row, int group) {
  List list;
  const DeviceGroup& of = p.rows.groups[group];
  list.pages = p.rows.pages + of.first_page;
  if (p.block.data != nullptr) {
    list.selected = nullptr;
    list.from = p.window > 0 ? max(int64_t{0}, of.first_position - p.window) : 0;
    list.rest = of.first_position - list.from;
    list.own = of.rows;
    list.first_own = of.first_row;
    return list;
  }
  const int64_t keys = p.rows.positions[row] + 1, windows = keys / p.tokens;
  list.selected = p.selected.data == nullptr ? nullptr : p.selected.data + row * p.selected.stride;
  int64_t chosen = 0;
  if (list.selected != nullptr) {
    for (int64_t base = 0; base < p.selected.cols; base += kThreads) {
      const int64_t i = base + threadIdx.x;
      const int found = __syncthreads_count(i < p.selected.cols && list.selected[i] >= 0.0f);
      chosen += found;
      if (found < kThreads) break;
    }
  } else if (p.window > 0) {
    chosen = windows;
  }
  if (p.window > 0) {
    list.chosen = p.pooled.data != nullptr ? chosen : 0;
    list.from = max(int64_t{0}, keys - p.window);
  } else {
    list.chosen = chosen * p.tokens;
    list.from = list.selected != nullptr ? windows * p.tokens : 0;
  }
  list.rest = keys - list.from;
  return list;
}

// Shared memory, in bytes from its beginning.
struct Layout {
  int keys, weights, maxima, entries, bytes;
};
__host__ __device__ constexpr Layout layout_of(int heads, int padded) {
  Layout at = {};
  at.keys = heads * padded * 2;
  at.weights = at.keys + kKeys * padded * 2;
  at.maxima = at.weights + heads * kKeys * 2;
  at.entries = at.maxima + heads * kWarps * 4;
  at.bytes = at.entries + kSplit * 8;
  return at;
}

// 8 values, rounded.
__device__ __forceinline__ uint4 rounded8(float4 low, float4 high) {
  return make_uint4(pack_bf16(low.x, low.y), pack_bf16(low.z, low.w), pack_bf16(high.x, high.y),
                    pack_bf16(high.z, high.w));
}

// Queries of heads [first, first + heads) of a row as bf16, [heads][padded], units swizzled by head.
__device__ __forceinline__ void load_queries(const Params& p, int64_t row, int first, int heads, uint32_t shared) {
  const int units = p.padded / 8;
  for (int i = static_cast<int>(threadIdx.x); i < heads * units; i += kThreads) {
    const int head = i / units, unit = i % units;
    float4 low = make_float4(0.0f, 0.0f, 0.0f, 0.0f), high = low;
    if (first + head < p.heads && unit * 8 < p.width) {
      const float* from = p.q.data + row * p.q.stride + static_cast<int64_t>(first + head) * p.width + unit * 8;
      low = *reinterpret_cast<const float4*>(from);
      high = *reinterpret_cast<const float4*>(from + 4);
    }
    store_shared16(shared + (head * units + swizzled_unit<64>(head, unit)) * 16, rounded8(low, high));
  }
}

// Rows entries[0 .. kKeys) as bf16, [kKeys][padded], units swizzled by row; zeros for those that are not there. A warp
// a row, several at a time.
template <int kTogether>
__device__ __forceinline__ void load_keys(const Params& p, const float* const* entries, int count, uint32_t shared) {
  const int warp = uniform_warp(), lane = static_cast<int>(threadIdx.x) % 32;
  const int units = p.padded / 8;
#pragma unroll 1
  for (int key = warp * kTogether; key < kKeys; key += kWarps * kTogether) {
#pragma unroll 1
    for (int unit = lane; unit < units; unit += 32) {
      float4 low[kTogether], high[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        low[j] = high[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (key + j >= count || unit * 8 >= p.width) continue;
        const float* from = entries[key + j] + unit * 8;
        low[j] = *reinterpret_cast<const float4*>(from);
        high[j] = *reinterpret_cast<const float4*>(from + 4);
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        store_shared16(shared + ((key + j) * units + swizzled_unit<64>(key + j, unit)) * 16, rounded8(low[j], high[j]));
      }
    }
  }
}

// What a thread knows of its heads: of tile i heads lane / 4 and lane / 4 + 8. All warps hold the same maxima and sums.
template <int kTiles>
struct Heads {
  float o[kTiles][kMostTiles][4];
  float sum[kTiles][4];  // a product with ones: every column is the sum
  float max[kTiles][2];
};

// Scores of a warp's eight keys; d as mma_m16n8k16 has it.
template <int kTiles>
__device__ __forceinline__ void scores(const Params& p, uint32_t queries, uint32_t keys, int warp, int lane,
                                       float (&d)[kTiles][4]) {
  const int units = p.padded / 8, key = warp * 8 + lane % 8, head = lane % 8 + lane / 8 % 2 * 8;
  float odd[kTiles][4] = {};
#pragma unroll
  for (int i = 0; i < kTiles; ++i) d[i][0] = d[i][1] = d[i][2] = d[i][3] = 0.0f;
#pragma unroll 4
  for (int unit = 0; unit < units; unit += 4) {  // two steps
    uint32_t b[4];
    load_matrices(b, keys + (key * units + swizzled_unit<64>(key, unit + lane / 8)) * 16);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int place = i * 16 + head;
      uint32_t a[4];
      load_matrices(a, queries + (place * units + swizzled_unit<64>(place, unit + lane / 16)) * 16);
      mma_m16n8k16(d[i], a, b[0], b[1]);
      load_matrices(a, queries + (place * units + swizzled_unit<64>(place, unit + 2 + lane / 16)) * 16);
      mma_m16n8k16(odd[i], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) d[i][e] = __fadd_rn(d[i][e], odd[i][e]);
  }
}

// Weights times rows: the warp's values, and the sums of the weights.
template <int kTiles>
__device__ __forceinline__ void add_values(const Params& p, uint32_t weights, uint32_t keys, int warp, int lane,
                                           Heads<kTiles>& heads) {
  const int units = p.padded / 8, own = units / kWarps, row = lane % 8 + lane / 8 % 2 * 8;
#pragma unroll 1
  for (int step = 0; step < kKeys / 16; ++step) {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int head = i * 16 + row;
      load_matrices(a[i], weights + (head * (kKeys / 8) + swizzled_unit<64>(head, 2 * step + lane / 16)) * 16);
      mma_m16n8k16(heads.sum[i], a[i], kBf16One, kBf16One);
    }
    const int key = step * 16 + row;
#pragma unroll
    for (int t = 0; t < kMostTiles; t += 2) {
      if (t >= own) continue;
      uint32_t b[4];
      load_matrices_transposed(b, keys + (key * units + swizzled_unit<64>(key, warp * own + t + lane / 16)) * 16);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        mma_m16n8k16(heads.o[i][t], a[i], b[0], b[1]);
        mma_m16n8k16(heads.o[i][t + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// One block of keys: `left` of them are in the list.
template <int kTiles>
__device__ __forceinline__ void visit_block(const Params& p, uint32_t shared, unsigned char* memory, const Layout& at,
                                            int left, int warp, int lane, Heads<kTiles>& heads) {
  float d[kTiles][4];
  scores<kTiles>(p, shared, shared + at.keys, warp, lane, d);
  float* maxima = reinterpret_cast<float*>(memory + at.maxima);  // [heads][warps]
  const int first = warp * 8 + 2 * (lane & 3);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (first + e >= left) d[i][2 * half + e] = kMinusInfinity;
      }
      float most = fmaxf(d[i][2 * half], d[i][2 * half + 1]);
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      if ((lane & 3) == 0) maxima[(i * 16 + half * 8 + lane / 4) * kWarps + warp] = most;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = i * 16 + half * 8 + lane / 4;
      const float4* all = reinterpret_cast<const float4*>(maxima + head * kWarps);
      const float4 a = all[0], b = all[1];
      const float most = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
      float rescale;
      const float base = next_max(&heads.max[i][half], most, p.factor, &rescale);
      const float low = weight(d[i][2 * half], base, p.factor), high = weight(d[i][2 * half + 1], base, p.factor);
      store_shared4(shared + at.weights + (head * (kKeys / 8) + swizzled_unit<64>(head, warp)) * 16 + (lane & 3) * 4,
                    pack_bf16(low, high));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        heads.sum[i][2 * half + e] = __fmul_rn(heads.sum[i][2 * half + e], rescale);
#pragma unroll
        for (int t = 0; t < kMostTiles; ++t) {
          heads.o[i][t][2 * half + e] = __fmul_rn(heads.o[i][t][2 * half + e], rescale);
        }
      }
    }
  }
  __syncthreads();
  add_values<kTiles>(p, shared + at.weights, shared + at.keys, warp, lane, heads);
}

// blockIdx.x: row. blockIdx.y: split. blockIdx.z: 16 * kTiles heads.
template <int kTiles>
__global__ void __launch_bounds__(kThreads, 2) split_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int kHeads = 16 * kTiles;
  const int thread = static_cast<int>(threadIdx.x), warp = uniform_warp(), lane = thread % 32;
  pdl_launch();
  pdl_wait();
  const int64_t of_launch = blockIdx.x, row = p.first_row + of_launch;
  const int first_head = static_cast<int>(blockIdx.z) * kHeads;
  const int group = p.rows.group_of[row];
  if (group < 0) return;
  const List list = list_of(p, row, group);
  const int64_t first = static_cast<int64_t>(p.first_split + static_cast<int>(blockIdx.y)) * kSplit;
  const int count = static_cast<int>(max(int64_t{0}, min(int64_t{kSplit}, list.size() - first)));
  const int64_t states = (static_cast<int64_t>(blockIdx.y) * p.row_count + of_launch) * p.heads;
  if (count == 0) {
    if (thread < kHeads && first_head + thread < p.heads)
      p.part_state[states + first_head + thread] = {kMinusInfinity, 0.0f};
    return;
  }
  const Layout at = layout_of(kHeads, p.padded);
  const uint32_t shared = shared_address(memory);
  auto** entries = reinterpret_cast<const float**>(memory + at.entries);
  for (int i = thread; i < count; i += kThreads) entries[i] = list.entry(p, first + i);
  load_queries(p, row, first_head, kHeads, shared);
  Heads<kTiles> heads;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    heads.max[i][0] = heads.max[i][1] = kMinusInfinity;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      heads.sum[i][e] = 0.0f;
#pragma unroll
      for (int t = 0; t < kMostTiles; ++t) heads.o[i][t][e] = 0.0f;
    }
  }
#pragma unroll 1
  for (int base = 0; base < count; base += kKeys) {
    __syncthreads();  // entries are there; nobody reads the block before this one any more
    load_keys<kTiles == 1 ? 4 : 2>(p, entries + base, min(kKeys, count - base), shared + at.keys);
    __syncthreads();
    visit_block<kTiles>(p, shared, memory, at, count - base, warp, lane, heads);
  }
  const int own = p.padded / 8 / kWarps;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = first_head + i * 16 + half * 8 + lane / 4;
      if (head >= p.heads) continue;
      if (warp == 0 && (lane & 3) == 0) p.part_state[states + head] = {heads.max[i][half], heads.sum[i][2 * half]};
      float* to = p.part_o + (states + head) * p.width;
#pragma unroll
      for (int t = 0; t < kMostTiles; ++t) {
        const int value = (warp * own + t) * 8 + 2 * (lane & 3);
        if (t >= own || value >= p.width) continue;
        *reinterpret_cast<float2*>(to + value) = make_float2(heads.o[i][t][2 * half], heads.o[i][t][2 * half + 1]);
      }
    }
  }
}

// blockIdx.x: row and head. blockIdx.y: kFoldThreads values.
__global__ void __launch_bounds__(kFoldThreads) fold_kernel(const __grid_constant__ Params p) {
  pdl_launch();
  pdl_wait();
  const int64_t index = blockIdx.x, row = p.first_row + index / p.heads;
  const int head = static_cast<int>(index % p.heads);
  const int value = static_cast<int>(blockIdx.y) * kFoldThreads + static_cast<int>(threadIdx.x);
  const int64_t column = static_cast<int64_t>(head) * p.width + value;
  const bool here = value < p.width;
  if (p.rows.group_of[row] < 0) {
    if (p.last_splits && here) put_output(p.out, row, column, 0.0f);
    return;
  }
  // Each block of a row and head has a running state of its own.
  SoftmaxState* run_state = p.run_state + index * gridDim.y + blockIdx.y;
  float* run_o = p.run_o + index * p.width + value;
  SoftmaxState state = {kMinusInfinity, 0.0f};
  float o = 0.0f;
  if (p.first_split > 0) {
    state = *run_state;
    o = here ? *run_o : 0.0f;
  }
  const int64_t step = p.row_count * p.heads;
#pragma unroll 4
  for (int split = 0; split < p.split_count; ++split) {
    const SoftmaxState next = p.part_state[split * step + index];
    if (next.max == kMinusInfinity) continue;  // it has no keys, and no accumulators
    const FoldFactors f = fold_state(&state, next, p.factor);
    if (here) o = fold_value(o, p.part_o[(split * step + index) * p.width + value], f);
  }
  if (!p.last_splits) {
    __syncthreads();  // all have read the state
    if (threadIdx.x == 0) *run_state = state;
    if (here) *run_o = o;
    return;
  }
  if (p.sinks != nullptr) {
    const float own = __fmul_rn(state.max, p.scale), sink = p.sinks[head], next = fmaxf(own, sink);
    const float keep = exp2_fast(__fmul_rn(__fsub_rn(own, next), kLog2E));
    state.sum = __fmaf_rn(state.sum, keep, exp2_fast(__fmul_rn(__fsub_rn(sink, next), kLog2E)));
    o = __fmul_rn(o, keep);
  }
  if (here) put_output(p.out, row, column, finished_value(o, __fdiv_rn(1.0f, state.sum)));
}

// How a launch is cut; no bit of a result depends on it.
struct Cut {
  int64_t splits = 1;
  int64_t rows = 1;  // together
  int64_t wave = 1;  // splits together
  int64_t pieces = 1;
  int64_t states() const { return rows * wave; }
};

Cut cut_of(const DeviceRows& rows, const CudaLatentAttentionArgs& args) {
  const bool chooses = args.selected.data != nullptr;
  const int64_t windows =
      chooses ? std::min(args.selected.cols, rows.max_keys / args.tokens) : rows.max_keys / args.tokens;
  int64_t keys = 0;
  if (args.block.data != nullptr) {
    keys = (args.window > 0 ? std::min(args.window, rows.max_keys) : rows.max_keys) + kMostBlockRows;
  } else if (args.window > 0) {
    keys = std::min(args.window, rows.max_keys) + (args.pooled.data != nullptr ? windows : 0);
  } else {
    keys = chooses ? windows * args.tokens + args.tokens - 1 : rows.max_keys;
  }
  const int64_t width = args.q.cols / args.heads, split = args.heads * (width + 2);
  Cut cut;
  cut.splits = std::max<int64_t>(1, (keys + kSplit - 1) / kSplit);
  const int64_t together = std::min(cut.splits, kFewestSplits);
  cut.rows = std::clamp<int64_t>(kPartFloats / (split * together), 1, rows.rows);
  cut.wave = std::clamp<int64_t>(kPartFloats / (split * cut.rows), 1, std::min(cut.splits, kMostGrid));
  cut.pieces = (width + kFoldThreads - 1) / kFoldThreads;
  return cut;
}

template <int kTiles>
bool launch_splits(cudaStream_t stream, const Params& p) {
  const Layout at = layout_of(16 * kTiles, p.padded);
  if (!cuda_ok(cudaFuncSetAttribute(split_kernel<kTiles>, cudaFuncAttributeMaxDynamicSharedMemorySize, at.bytes),
               "attention over latents")) {
    return false;
  }
  const dim3 grid(static_cast<unsigned>(p.row_count), static_cast<unsigned>(p.split_count),
                  static_cast<unsigned>((p.heads + 16 * kTiles - 1) / (16 * kTiles)));
  return launch_kernel(split_kernel<kTiles>, grid, dim3(kThreads), static_cast<size_t>(at.bytes), stream,
                       "attention over latents", p);
}

int shared_limit() {
  int device = 0, bytes = 48 * 1024;
  cuda_ok(cudaGetDevice(&device), "device of this thread");
  cuda_ok(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "device properties");
  return bytes;
}

}  // namespace

int64_t cuda_latent_attention_workspace(const DeviceRows& rows, const CudaLatentAttentionArgs& args) {
  if (rows.rows <= 0) return 0;
  const Cut cut = cut_of(rows, args);
  const int64_t width = args.q.cols / args.heads;
  return args.heads * (cut.states() * (width + 2) + cut.rows * (width + 2 * cut.pieces));
}

void cuda_latent_attention(cudaStream_t stream, const DeviceRows& rows, const CudaLatentAttentionArgs& args) {
  const int64_t width = args.latents.width;
  kernel_check(args.heads >= 1 && args.q.cols == args.heads * width && args.q.rows == rows.rows &&
                   args.out.rows() == rows.rows && args.out.cols() == args.q.cols && args.latents.tokens == 1 &&
                   args.tokens >= 1 && args.window >= 0 &&
                   (args.pooled.data == nullptr || (args.window > 0 && args.pooled.width == width)) &&
                   (args.selected.data == nullptr || args.selected.rows == rows.rows),
               "latent_attention: shapes differ");
  kernel_check(args.block.data == nullptr || (args.block.rows == rows.rows && args.block.cols == width &&
                                              args.pooled.data == nullptr && args.selected.data == nullptr),
               "latent_attention: a block has its own rows and those before it, nothing pooled or selected");
  kernel_check(width <= kMostLatentWidth && width % 8 == 0 && args.q.stride % 4 == 0 &&
                   reinterpret_cast<uintptr_t>(args.q.data) % 16 == 0,
               "latent_attention: the CUDA kernels want rows of a multiple of 8 up to 512 values, aligned to 16 bytes");
  kernel_check(args.block.stride % 4 == 0 && reinterpret_cast<uintptr_t>(args.block.data) % 16 == 0,
               "latent_attention: the CUDA kernels want rows of blocks aligned to 16 bytes");
  if (rows.rows <= 0) return;
  const Cut cut = cut_of(rows, args);
  Params p = {};
  p.rows = rows;
  p.q = args.q;
  p.out = args.out;
  p.latents = args.latents;
  p.pooled = args.pooled;
  p.selected = args.selected;
  p.block = args.block;
  p.sinks = args.sinks;
  p.window = args.window;
  p.scale = args.scale;
  p.factor = args.scale * kLog2E;
  p.heads = static_cast<int>(args.heads);
  p.width = static_cast<int>(width);
  p.padded = static_cast<int>((width + kWidthUnit - 1) / kWidthUnit * kWidthUnit);
  p.tokens = static_cast<int>(args.tokens);
  p.part_o = args.workspace;
  p.run_o = p.part_o + cut.states() * args.heads * width;
  p.part_state = reinterpret_cast<SoftmaxState*>(p.run_o + cut.rows * args.heads * width);
  p.run_state = p.part_state + cut.states() * args.heads;
  const bool two = p.heads > 16 && layout_of(32, p.padded).bytes <= shared_limit();
  for (p.first_row = 0; p.first_row < rows.rows; p.first_row += cut.rows) {
    p.row_count = std::min<int64_t>(cut.rows, rows.rows - p.first_row);
    const dim3 fold(static_cast<unsigned>(p.row_count * p.heads), static_cast<unsigned>(cut.pieces));
    for (int64_t first = 0; first < cut.splits; first += cut.wave) {
      p.first_split = static_cast<int>(first);
      p.split_count = static_cast<int>(std::min(cut.wave, cut.splits - first));
      p.last_splits = first + p.split_count == cut.splits;
      if (!(two ? launch_splits<2>(stream, p) : launch_splits<1>(stream, p))) return;
      if (!launch_kernel(fold_kernel, fold, dim3(kFoldThreads), 0, stream, "fold of latent attention", p)) return;
    }
  }
}

}  // namespace tensorfold
