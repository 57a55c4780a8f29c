// The choice of windows of tokens: scores of pooled keys, then the best of each row.
//
// Score of a window: queries and key are rounded to bf16; the product of a head is a chain of mma.sync.m16n8k16 over
// the key's values in steps of 16, ascending, 16 heads the rows of the atom and 8 windows its columns; then
//   sum = fma(weight[h] * weight_scale, max(scale * product, 0), sum)   over heads g, g + 8, g + 16, ... of lane group
//   g
// and the eight groups are added by a butterfly over g ^ 1, g ^ 2, g ^ 4. Which rows and windows a block has is in none
// of this.
//
// The choice: a score becomes a 32-bit key in the order of (score, NaN last); -0 is 0. A block takes up to 16,384 items
// of a row, 32 a thread, in registers; it finds, bit by bit, the largest key that at least `most` items reach; what is
// above it is taken, then items that are equal to it, in ascending order, until there are `most`. One order, so one
// answer: of more items each block leaves its `most` best, ascending, and those are chosen from again.
#include <algorithm>

#include "kernels/cuda/attention_layout.h"
#include "kernels/cuda/attention_mma.cuh"
#include "kernels/cuda/latent_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kScoreWarps = 8;
constexpr int kPair = 16;                               // windows of a warp at a time: two atoms
constexpr int kScoreWindows = kScoreWarps * kPair * 2;  // of a block
constexpr int kMostRowTile = 8;
constexpr int kMostQueryBytes = 64 * 1024;  // of a block's rows
constexpr int kMostKey = 128;

constexpr int kThreads = 512;
constexpr int kOwn = 32;  // items of a thread
constexpr int kItems = kThreads * kOwn;
constexpr int64_t kScoreFloats = int64_t{8} << 20;  // of rows that are scored together

struct ScoreParams {
  DeviceRows rows;
  DeviceRowLayer keys;
  DeviceMatrix q, weights;
  uint32_t* order;  // [rows of the launch, stride]
  int64_t stride;
  int64_t first_row, row_count;  // of the launch
  float scale, weight_scale;
  int tokens, heads, head_tiles, most, row_tile;
};

// Larger for what comes first; NaN is 1, and no item has 0.
__device__ __forceinline__ uint32_t order_of(float score) {
  if (score != score) return 1;
  const uint32_t bits = __float_as_uint(__fadd_rn(score, 0.0f));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ int windows_of(const DeviceRows& rows, int64_t row, int tokens) {
  return rows.group_of[row] < 0 ? 0 : static_cast<int>((rows.positions[row] + 1) / tokens);
}

// q of `count` rows from `row` on as bf16, [row][heads in tiles of 16][K], units of 8 values swizzled by head; zeros
// beyond the heads and their values.
template <int K>
__device__ __forceinline__ void load_queries(const ScoreParams& p, int64_t row, int count, uint32_t shared) {
  const int width = p.keys.width, places = count * p.head_tiles * 16 * (K / 8);
  for (int i = static_cast<int>(threadIdx.x); i < places; i += 32 * kScoreWarps) {
    const int unit = i % (K / 8), place = i / (K / 8), head = place % (p.head_tiles * 16);
    const int of_row = place / (p.head_tiles * 16);
    float x[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int d = unit * 8 + e;
      x[e] = head < p.heads && d < width
                 ? p.q.data[(row + of_row) * p.q.stride + static_cast<int64_t>(head) * width + d]
                 : 0.0f;
    }
    store_shared16(
        shared + (place * (K / 8) + swizzled_unit(K, place, unit)) * 16,
        make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])));
  }
}

// The column's key of the atom, K / 16 steps: values 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 of each.
template <int K>
__device__ __forceinline__ void load_key(const ScoreParams& p, const int32_t* pages, int window, int windows,
                                         uint32_t (&b)[K / 16][2]) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  const bool here = window < windows;
  const float* key = here ? latent_row(p.keys, pages, static_cast<int64_t>(window + 1) * p.tokens - 1) : nullptr;
#pragma unroll
  for (int step = 0; step < K / 16; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int d = step * 16 + half * 8 + 2 * t;
      const float2 x = here && d < p.keys.width ? *reinterpret_cast<const float2*>(key + d) : make_float2(0.0f, 0.0f);
      b[step][half] = pack_bf16(x.x, x.y);
    }
  }
}

// blockIdx.x: kScoreWindows windows. blockIdx.y: row_tile rows. Of the tile's rows those of one sequence read a key
// together. Rows that choose all their windows need no scores.
template <int K>
__global__ void __launch_bounds__(32 * kScoreWarps) score_kernel(const __grid_constant__ ScoreParams p) {
  extern __shared__ __align__(16) unsigned char queries[];
  __shared__ float head_weights[kMostRowTile][128];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  pdl_launch();
  pdl_wait();
  const int64_t first = p.first_row + static_cast<int64_t>(blockIdx.y) * p.row_tile;
  const int count = static_cast<int>(min(static_cast<int64_t>(p.row_tile), p.first_row + p.row_count - first));
  const int base = static_cast<int>(blockIdx.x) * kScoreWindows;
  int most_windows = 0;
  for (int i = 0; i < count; ++i) {
    const int windows = windows_of(p.rows, first + i, p.tokens);
    if (windows > p.most) most_windows = max(most_windows, windows);
  }
  if (base >= most_windows) return;
  const uint32_t shared = shared_address(queries);
  load_queries<K>(p, first, count, shared);
  for (int i = static_cast<int>(threadIdx.x); i < count * p.heads; i += 32 * kScoreWarps) {
    const int of_row = i / p.heads, head = i % p.heads;
    head_weights[of_row][head] = __fmul_rn(p.weights.data[(first + of_row) * p.weights.stride + head], p.weight_scale);
  }
  __syncthreads();
  const int place_row = lane % 8 + lane / 8 % 2 * 8, place_unit = lane / 16;  // of the matrices that ldmatrix reads
  int next = 0;
  for (int i = 0; i < count; i = next) {
    const int group = p.rows.group_of[first + i];
    int windows = 0;
    for (next = i; next < count && p.rows.group_of[first + next] == group; ++next) {
      windows = max(windows, windows_of(p.rows, first + next, p.tokens));
    }
    if (group < 0 || windows <= p.most) continue;
    const int32_t* pages = p.rows.pages + p.rows.groups[group].first_page;
#pragma unroll 1
    for (int at = base + warp * kPair; at < min(base + kScoreWindows, windows); at += kScoreWarps * kPair) {
      uint32_t b[2][K / 16][2];
      load_key<K>(p, pages, at + lane / 4, windows, b[0]);
      load_key<K>(p, pages, at + 8 + lane / 4, windows, b[1]);
#pragma unroll 1
      for (int r = i; r < next; ++r) {
        const int own = windows_of(p.rows, first + r, p.tokens);
        if (own <= p.most) continue;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // windows 2 t, 2 t + 1 of either atom
#pragma unroll 1
        for (int tile = 0; tile < p.head_tiles; ++tile) {
          float acc[2][4] = {};
          const int place = (r * p.head_tiles + tile) * 16 + place_row;
#pragma unroll
          for (int step = 0; step < K / 16; ++step) {
            uint32_t a[4];
            load_matrices(a, shared + (place * (K / 8) + swizzled_unit(K, place, 2 * step + place_unit)) * 16);
            mma_m16n8k16(acc[0], a, b[0][step][0], b[0][step][1]);
            mma_m16n8k16(acc[1], a, b[1][step][0], b[1][step][1]);
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int head = tile * 16 + lane / 4 + 8 * half;
            const float weight = head < p.heads ? head_weights[r][head] : 0.0f;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const float product = __fmul_rn(acc[e / 2][2 * half + e % 2], p.scale);
              if (head < p.heads) sum[e] = __fmaf_rn(weight, product < 0.0f ? 0.0f : product, sum[e]);  // NaN stays
            }
          }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int step = 4; step < 32; step *= 2)
            sum[e] = __fadd_rn(sum[e], __shfl_xor_sync(0xffffffffu, sum[e], step));
        }
        uint32_t* order = p.order + (first + r - p.first_row) * p.stride;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int window = at + e / 2 * 8 + 2 * lane + e % 2;
          if (lane < 4 && window < own) order[window] = order_of(sum[e]);
        }
      }
    }
  }
}

// --- The choice -----------------------------------------------------------------------------------------------------

struct Item {
  uint32_t order;
  int32_t window;
};

struct ChooseParams {
  DeviceRows rows;
  const uint32_t* order;  // of the first level: [rows of the launch, stride]
  const Item* from;       // of others: [rows of the launch, stride]
  Item* into;             // of all but the last: [rows of the launch, into_stride]
  DeviceMatrix out;       // of the last
  int64_t stride, into_stride;
  int64_t first_row;
  int tokens, most, level;
};

// Items that `levels` choices have left of a row's windows.
__device__ __forceinline__ int items_of(int windows, int most, int levels) {
  int items = windows;
  for (int i = 0; i < levels; ++i) items = items / kItems * most + min(items % kItems, most);
  return items;
}

// Adds `own` of the threads before this one; *all: of all threads.
__device__ __forceinline__ uint32_t sum_before(uint32_t own, uint32_t* warps, uint32_t* all) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  uint32_t sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  uint32_t before = 0, total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += warps[w];
    total += warps[w];
  }
  *all = total;
  return before + sum - own;
}

// blockIdx.x: kItems items. blockIdx.y: row.
template <bool kFirst, bool kLast>
__global__ void __launch_bounds__(kThreads) choose_kernel(const __grid_constant__ ChooseParams p) {
  __shared__ uint32_t counts[32];
  __shared__ uint32_t warps[kThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  pdl_launch();
  pdl_wait();
  const int64_t of_launch = blockIdx.y, row = p.first_row + of_launch;
  const int windows = windows_of(p.rows, row, p.tokens), most = p.most;
  float* out = kLast ? p.out.data + row * p.out.stride : nullptr;
  if (windows <= most) {
    for (int i = thread; kLast && i < most; i += kThreads) out[i] = i < windows ? static_cast<float>(i) : -1.0f;
    return;
  }
  const int items = items_of(windows, most, p.level), base = static_cast<int>(blockIdx.x) * kItems;
  if (base >= items) return;
  const int here = min(kItems, items - base), wanted = min(most, here);
  if (thread < 32) counts[thread] = 0;
  const int first = base + thread * kOwn;
  uint32_t order[kOwn];
  if (kFirst && first + kOwn <= items) {
    const auto* from = reinterpret_cast<const uint4*>(p.order + of_launch * p.stride + first);
#pragma unroll
    for (int j = 0; j < kOwn; j += 4) {
      const uint4 four = from[j / 4];
      order[j] = four.x;
      order[j + 1] = four.y;
      order[j + 2] = four.z;
      order[j + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      order[j] = 0;
      if (first + j >= items) continue;
      order[j] = kFirst ? p.order[of_launch * p.stride + first + j] : p.from[of_launch * p.stride + first + j].order;
    }
  }
  __syncthreads();
  uint32_t least = 0;  // the largest that at least `wanted` items reach
#pragma unroll 1
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t tried = least | 1u << bit;
    uint32_t reached = 0;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) reached += order[j] >= tried ? 1 : 0;
    reached = __reduce_add_sync(0xffffffffu, reached);
    if (thread % 32 == 0) atomicAdd(&counts[bit], reached);
    __syncthreads();
    if (counts[bit] >= static_cast<uint32_t>(wanted)) least = tried;
  }
  // Items above in the lower half, equal ones in the upper: neither is more than kItems.
  static_assert(kItems < 1 << 16);
  uint32_t own = 0, all = 0;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) own += order[j] > least ? 1u : order[j] == least ? 1u << 16 : 0u;
  const uint32_t before = sum_before(own, warps, &all);
  const int ties = wanted - static_cast<int>(all & 0xffffu);  // equal ones that are taken
  int above = static_cast<int>(before & 0xffffu), equal = static_cast<int>(before >> 16);
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const bool is_equal = order[j] == least;
    if (order[j] > least || (is_equal && equal < ties)) {
      const int place = above + min(equal, ties);
      const int window = kFirst ? first + j : p.from[of_launch * p.stride + first + j].window;
      if constexpr (kLast) {
        out[place] = static_cast<float>(window);
      } else {
        p.into[of_launch * p.into_stride + static_cast<int64_t>(blockIdx.x) * most + place] = {order[j], window};
      }
    }
    above += order[j] > least ? 1 : 0;
    equal += is_equal ? 1 : 0;
  }
}

// --- Launches -------------------------------------------------------------------------------------------------------

// How a launch is cut; no bit of a result depends on it.
struct Cut {
  int64_t windows = 0;       // bound
  int64_t rows = 0;          // scored together
  int64_t left[2] = {0, 0};  // items that the first and the second choice leave, at most
  int64_t bytes = 0;
};

int64_t items_left(int64_t items, int64_t most) { return (items + kItems - 1) / kItems * most; }

Cut cut_of(const DeviceRows& rows, int64_t tokens, int64_t most) {
  Cut cut;
  cut.windows = rows.max_keys / tokens;
  if (cut.windows <= most) return cut;
  cut.windows = (cut.windows + 31) / 32 * 32;
  if (cut.windows > kItems) cut.left[0] = items_left(cut.windows, most);
  if (cut.left[0] > kItems) cut.left[1] = items_left(cut.left[0], most);
  const int64_t fit = kScoreFloats / cut.windows / kMostRowTile * kMostRowTile;
  cut.rows = std::min<int64_t>({static_cast<int64_t>(rows.rows), std::max<int64_t>(fit, kMostRowTile), 65535});
  cut.bytes = cut.rows * (cut.windows * 4 + (cut.left[0] + cut.left[1]) * static_cast<int64_t>(sizeof(Item)));
  return cut;
}

template <int K>
void launch_scores(cudaStream_t stream, const ScoreParams& p, int64_t windows) {
  const size_t bytes = static_cast<size_t>(p.row_tile) * static_cast<size_t>(p.head_tiles) * 16 * K * 2;
  if (!cuda_ok(cudaFuncSetAttribute(score_kernel<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostQueryBytes),
               "scores of windows")) {
    return;
  }
  const dim3 grid(static_cast<unsigned>((windows + kScoreWindows - 1) / kScoreWindows),
                  static_cast<unsigned>((p.row_count + p.row_tile - 1) / p.row_tile));
  launch_kernel(score_kernel<K>, grid, dim3(32 * kScoreWarps), bytes, stream, "scores of windows", p);
}

void score(cudaStream_t stream, ScoreParams p, int64_t windows) {
  const int key = p.keys.width <= 32 ? 32 : p.keys.width <= 64 ? 64 : kMostKey;
  const int row_bytes = p.head_tiles * 16 * key * 2;
  // A few rows are mostly of a sequence each.
  p.row_tile = p.rows.rows <= 2 * kMostRowTile ? 1 : std::max(1, std::min(kMostRowTile, kMostQueryBytes / row_bytes));
  if (key == 32) return launch_scores<32>(stream, p, windows);
  if (key == 64) return launch_scores<64>(stream, p, windows);
  launch_scores<kMostKey>(stream, p, windows);
}

template <bool kFirst>
void choose(cudaStream_t stream, const ChooseParams& p, int64_t items, int64_t rows, bool last) {
  const dim3 grid(static_cast<unsigned>((items + kItems - 1) / kItems), static_cast<unsigned>(rows));
  launch_kernel(last ? choose_kernel<kFirst, true> : choose_kernel<kFirst, false>, grid, dim3(kThreads), 0, stream,
                "choice of windows", p);
}

}  // namespace

int64_t cuda_select_rows_workspace(const DeviceRows& rows, int64_t tokens, int64_t most) {
  return cut_of(rows, tokens, most).bytes;
}

void cuda_select_rows(cudaStream_t stream, const DeviceRows& rows, const CudaSelectArgs& args) {
  const int64_t most = args.out.cols, width = args.keys.width;
  kernel_check(args.q.cols == args.heads * width && args.weights.cols == args.heads && args.q.rows == rows.rows &&
                   args.weights.rows == rows.rows && args.out.rows == rows.rows,
               "select_rows: shapes differ");
  kernel_check(
      most >= 1 && most <= kMostSelected && width <= kMostKey && width % 2 == 0 && args.heads >= 1 &&
          args.heads <= 128 && args.tokens >= 1 && rows.max_keys / args.tokens < int64_t{1} << 24,
      "select_rows: the CUDA kernels choose up to 4096 of 2^24 windows by up to 128 heads of up to 128 values");
  if (rows.rows <= 0) return;
  const Cut cut = cut_of(rows, args.tokens, most);
  ScoreParams s = {};
  ChooseParams c = {};
  s.rows = c.rows = rows;
  s.keys = args.keys;
  s.q = args.q;
  s.weights = args.weights;
  s.scale = args.scale;
  s.weight_scale = args.weight_scale;
  s.tokens = c.tokens = static_cast<int>(args.tokens);
  s.heads = static_cast<int>(args.heads);
  s.head_tiles = (s.heads + 15) / 16;
  s.most = c.most = static_cast<int>(most);
  s.stride = cut.windows;
  c.out = args.out;
  if (cut.rows == 0) {  // no row has more windows than may be chosen
    for (c.first_row = 0; c.first_row < rows.rows; c.first_row += 65535) {
      choose<true>(stream, c, 1, std::min<int64_t>(rows.rows - c.first_row, 65535), true);
    }
    return;
  }
  s.order = static_cast<uint32_t*>(args.workspace);
  auto* items = reinterpret_cast<Item*>(s.order + cut.rows * cut.windows);
  Item* const kept[2] = {items, items + cut.rows * cut.left[0]};
  for (s.first_row = 0; s.first_row < rows.rows; s.first_row += cut.rows) {
    s.row_count = std::min<int64_t>(cut.rows, rows.rows - s.first_row);
    score(stream, s, cut.windows);
    c.first_row = s.first_row;
    c.order = s.order;
    c.stride = cut.windows;
    c.into = kept[0];
    c.into_stride = cut.left[0];
    c.level = 0;
    choose<true>(stream, c, cut.windows, s.row_count, cut.left[0] == 0);
    int64_t left = cut.left[0];
    for (int level = 1; left > 0; ++level) {
      const int64_t next = left > kItems ? items_left(left, most) : 0;
      c.from = kept[(level - 1) % 2];
      c.stride = cut.left[(level - 1) % 2];
      c.into = kept[level % 2];
      c.into_stride = cut.left[level % 2];
      c.level = level;
      choose<false>(stream, c, left, s.row_count, next == 0);
      left = next;
    }
  }
}

}  // namespace tensorfold
