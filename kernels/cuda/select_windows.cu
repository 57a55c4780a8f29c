// See select_windows.h. Scores of all windows of some rows, then the choice; both run in parallel over the context.
//
// Order of a score, a function of the two vectors alone: of each head four chains of fma over dims 4 i + {0, 1, 2, 3},
// i ascending, added as (0 + 1) + (2 + 3); heads ascending; then times the scale. Dims beyond the key's width count as
// zeros. Which tile a window or a row is in is in none of this.
//
// The choice is by a total order (score descending, window ascending), so there is one answer, whoever finds it: each
// block keeps the best of 8192 windows, the next launch the best of what blocks kept, until one block has all. A block
// finds the least score that it keeps bit by bit, counting; of equal scores the first windows are taken.
#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rowwise_vec.cuh"
#include "kernels/cuda/select_windows.h"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

// Scores: a block has 8 rows, one a warp, and 64 windows, two a lane.
constexpr int kTileRows = 8;
constexpr int kTileWindows = 64;
constexpr int kTileDims = 64;
constexpr int kTileHeads = 4;
constexpr int kKeyStride = kTileDims + 4;  // lanes' fours fall on different banks

constexpr int kChoiceThreads = 512;
constexpr int kChoiceWarps = kChoiceThreads / 32;
constexpr int kItems = kChoiceItems / kChoiceThreads;  // a thread, one after another
static_assert(kItems % 4 == 0);

// Rows are looked at in pieces of so many scores (64 MiB).
constexpr int64_t kPieceScores = int64_t{16} << 20;
constexpr int kMostLevels = 8;

struct ScoreParams {
  DeviceRowLayer layer;
  const int32_t* group_of;  // of the piece's first row, as are positions and q
  const int64_t* positions;
  const DeviceGroup* groups;
  const int32_t* pages;
  const float* q;
  int64_t q_stride;
  uint32_t* keys;  // [rows of the piece][stride]
  int64_t stride;
  int rows, heads, most;
  float scale;
  bool fours;  // keys and queries may be read four at a time
};

// Four values from `d` on of a vector of `width`, zeros beyond it.
__device__ __forceinline__ float4 four_of(const float* from, int d, int width, bool fours) {
  if (fours) return d < width ? *reinterpret_cast<const float4*>(from + d) : make_float4(0, 0, 0, 0);
  return make_float4(d < width ? from[d] : 0.0f, d + 1 < width ? from[d + 1] : 0.0f, d + 2 < width ? from[d + 2] : 0.0f,
                     d + 3 < width ? from[d + 3] : 0.0f);
}

// blockIdx.x: windows; blockIdx.y: rows.
__global__ void __launch_bounds__(32 * kTileRows) score_kernel(const __grid_constant__ ScoreParams p) {
  __shared__ __align__(16) float keys[kTileWindows][kKeyStride];
  __shared__ __align__(16) float queries[kTileRows][kTileHeads][kTileDims];
  __shared__ const float* key_rows[kTileWindows];
  __shared__ int tile_group[kTileRows];
  __shared__ int tile_windows[kTileRows];
  pdl_launch();
  pdl_wait();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int first_window = static_cast<int>(blockIdx.x) * kTileWindows;
  const int row = static_cast<int>(blockIdx.y) * kTileRows + warp;
  const int width = p.layer.width, tokens = p.layer.tokens;
  int group = -1, windows = 0;
  if (row < p.rows) {
    group = p.group_of[row];
    if (group >= 0) windows = static_cast<int>((p.positions[row] + 1) / tokens);
    // Rows that see all of their windows, or none of these, need no scores.
    if (windows <= p.most || windows <= first_window) group = -1;
  }
  if (lane == 0) {
    tile_group[warp] = group;
    tile_windows[warp] = windows;
  }
  __syncthreads();

  // Rows of one sequence together: all of them are with the first.
  for (int leader = 0; leader < kTileRows; ++leader) {
    const int g = tile_group[leader];
    bool first = g >= 0;
    for (int w = 0; w < leader; ++w) first = first && tile_group[w] != g;
    if (!first) continue;
    int end = 0;  // windows that there are, for any of the rows
    for (int w = leader; w < kTileRows; ++w) {
      if (tile_group[w] == g) end = max(end, tile_windows[w]);
    }
    if (thread < kTileWindows) {
      const int window = first_window + thread;
      const float* at = nullptr;
      if (window < end) {
        const int64_t position = static_cast<int64_t>(window) * tokens;
        const int64_t page = p.pages[p.groups[g].first_page + position / kPageTokens];
        at = p.layer.data + page * p.layer.page_floats + position % kPageTokens / tokens * width;
      }
      key_rows[thread] = at;
    }
    const bool mine = group == g;
    float total[2] = {0.0f, 0.0f};
    for (int head = 0; head < p.heads; head += kTileHeads) {
      float4 sum[kTileHeads][2];
#pragma unroll
      for (int h = 0; h < kTileHeads; ++h) sum[h][0] = sum[h][1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      for (int dim = 0; dim < width; dim += kTileDims) {
        __syncthreads();  // key_rows are there; what was in the tiles has been used
        for (int i = thread; i < kTileWindows * (kTileDims / 4); i += 32 * kTileRows) {
          const int window = i / (kTileDims / 4), d = i % (kTileDims / 4) * 4;
          const float* from = key_rows[window];
          const float4 x = from == nullptr ? make_float4(0, 0, 0, 0) : four_of(from, dim + d, width, p.fours);
          *reinterpret_cast<float4*>(&keys[window][d]) = x;
        }
        for (int i = lane; mine && i < kTileHeads * (kTileDims / 4); i += 32) {
          const int h = i / (kTileDims / 4), d = i % (kTileDims / 4) * 4;
          float4 x = make_float4(0, 0, 0, 0);
          if (head + h < p.heads) {
            const float* from = p.q + static_cast<int64_t>(row) * p.q_stride + static_cast<int64_t>(head + h) * width;
            x = four_of(from, dim + d, width, p.fours);
          }
          *reinterpret_cast<float4*>(&queries[warp][h][d]) = x;
        }
        __syncthreads();
        if (!mine) continue;
#pragma unroll 4
        for (int d = 0; d < kTileDims; d += 4) {
          float4 key[2];
          key[0] = *reinterpret_cast<const float4*>(&keys[lane][d]);
          key[1] = *reinterpret_cast<const float4*>(&keys[lane + 32][d]);
#pragma unroll
          for (int h = 0; h < kTileHeads; ++h) {
            const float4 q = *reinterpret_cast<const float4*>(&queries[warp][h][d]);
#pragma unroll
            for (int w = 0; w < 2; ++w) {
              sum[h][w].x = __fmaf_rn(q.x, key[w].x, sum[h][w].x);
              sum[h][w].y = __fmaf_rn(q.y, key[w].y, sum[h][w].y);
              sum[h][w].z = __fmaf_rn(q.z, key[w].z, sum[h][w].z);
              sum[h][w].w = __fmaf_rn(q.w, key[w].w, sum[h][w].w);
            }
          }
        }
      }
#pragma unroll
      for (int h = 0; h < kTileHeads; ++h) {
        if (head + h >= p.heads) continue;
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          const float4 s = sum[h][w];
          const float product = __fadd_rn(__fadd_rn(s.x, s.y), __fadd_rn(s.z, s.w));
          total[w] = __fadd_rn(total[w], product < 0.0f ? 0.0f : product);
        }
      }
    }
    if (mine) {
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const int window = first_window + lane + 32 * w;
        if (window >= windows) continue;
        p.keys[static_cast<int64_t>(row) * p.stride + window] =
            score_key(__float_as_uint(__fmul_rn(total[w], p.scale)));
      }
    }
    __syncthreads();  // before the next sequence's key_rows
  }
}

struct ChoiceParams {
  const int32_t* group_of;
  const int64_t* positions;
  const uint32_t* keys;    // [rows][stride], of this level
  const int32_t* windows;  // the same; null on the first level, where an item's place is its window
  uint32_t* kept_keys;     // [rows][kept_stride], of the next level; null on the last
  int32_t* kept_windows;
  float* out;  // last level
  int64_t stride, kept_stride, out_stride;
  int tokens, most, level;
};

// Items of a row on a level.
__host__ __device__ inline int64_t items_on_level(int64_t windows, int most, int level) {
  for (int l = 0; l < level; ++l) windows = (windows + kChoiceItems - 1) / kChoiceItems * most;
  return windows;
}

// The sum of all threads' numbers, in every thread. Calls in turn take another half of `sums`.
__device__ __forceinline__ int block_sum(int x, int* sums) {
  x = __reduce_add_sync(0xffffffffu, x);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x % 32);
  return __reduce_add_sync(0xffffffffu, lane < kChoiceWarps ? sums[lane] : 0);
}

// blockIdx.x: piece of a row's items; blockIdx.y: row.
__global__ void __launch_bounds__(kChoiceThreads) choice_kernel(const __grid_constant__ ChoiceParams p) {
  __shared__ int sums[2][kChoiceWarps];
  pdl_launch();
  pdl_wait();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t row = blockIdx.y;
  const bool last = p.kept_keys == nullptr;
  const int64_t windows = p.group_of[row] < 0 ? 0 : (p.positions[row] + 1) / p.tokens;
  float* out = p.out + row * p.out_stride;
  if (windows <= p.most) {
    for (int i = thread; last && i < p.most; i += kChoiceThreads) out[i] = i < windows ? static_cast<float>(i) : -1.0f;
    return;
  }
  const int64_t count = items_on_level(windows, p.most, p.level);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kChoiceItems;
  if (first >= count) return;

  const int64_t own = first + static_cast<int64_t>(thread) * kItems;
  uint32_t key[kItems];
#pragma unroll
  for (int i = 0; i < kItems; i += 4) {
    uint4 four = make_uint4(0, 0, 0, 0);
    // Rows begin at multiples of 16 bytes and are as long; what is beyond the items is not used.
    if (own + i < count) four = *reinterpret_cast<const uint4*>(p.keys + row * p.stride + own + i);
    key[i] = four.x;
    key[i + 1] = own + i + 1 < count ? four.y : 0;
    key[i + 2] = own + i + 2 < count ? four.z : 0;
    key[i + 3] = own + i + 3 < count ? four.w : 0;
  }

  // The largest number that at least `most` keys reach; 0 if there are not as many.
  uint32_t least = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t next = least | 1u << bit;
    int reach = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) reach += key[i] >= next ? 1 : 0;
    if (block_sum(reach, sums[bit & 1]) >= p.most) least = next;
  }

  // Keys above it and equal to it, in one number: those of the threads before, and of all.
  int above = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    above += key[i] > least ? 1 : 0;
    equal += least > 0 && key[i] == least ? 1 : 0;
  }
  const int both = above | equal << 16;
  int before = both;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int left = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += left;
  }
  __syncthreads();  // the sums have been read
  if (lane == 31) sums[0][warp] = before;
  __syncthreads();
  int total = 0, in_front = 0;
#pragma unroll
  for (int w = 0; w < kChoiceWarps; ++w) {
    const int of_warp = sums[0][w];
    total += of_warp;
    if (w < warp) in_front += of_warp;
  }
  before += in_front - both;
  int above_before = before & 0xffff, equal_before = before >> 16;
  const int all_above = total & 0xffff, all_equal = total >> 16;
  const int wanted = min(p.most - all_above, all_equal);  // of the equal ones
  const int64_t kept = row * p.kept_stride + static_cast<int64_t>(blockIdx.x) * p.most;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const bool higher = key[i] > least, same = least > 0 && key[i] == least;
    if (higher || (same && equal_before < wanted)) {
      const int place = above_before + min(equal_before, wanted);
      const int32_t window = p.windows == nullptr ? static_cast<int32_t>(own + i) : p.windows[row * p.stride + own + i];
      if (last) {
        out[place] = static_cast<float>(window);
      } else {
        p.kept_keys[kept + place] = key[i];
        p.kept_windows[kept + place] = window;
      }
    }
    above_before += higher ? 1 : 0;
    equal_before += same ? 1 : 0;
  }
  for (int i = all_above + wanted + thread; i < p.most; i += kChoiceThreads) {
    if (last) {
      out[i] = -1.0f;
    } else {
      p.kept_keys[kept + i] = 0;
    }
  }
}

// How a launch is cut. Sizes only; no result depends on it.
struct Plan {
  int levels = 1;
  int64_t stride[kMostLevels] = {};  // items of a row on each level, rounded to 4
  int64_t row_words = 0;             // keys of the first level, keys and windows of the others
  int64_t piece = 0;                 // rows at a time
};

Plan plan_of(const DeviceRows& rows, int64_t tokens, int64_t most) {
  Plan plan;
  int64_t items = rows.max_keys / tokens;
  for (int level = 0;; ++level) {
    kernel_check(level < kMostLevels, "select_windows: more windows than the CUDA kernels look through");
    plan.stride[level] = (items + 3) / 4 * 4;
    plan.row_words += plan.stride[level] * (level == 0 ? 1 : 2);
    plan.levels = level + 1;
    if (items <= kChoiceItems) break;
    items = (items + kChoiceItems - 1) / kChoiceItems * most;
  }
  const int64_t fit = std::max<int64_t>(kTileRows, kPieceScores / std::max<int64_t>(1, plan.row_words));
  plan.piece = std::min<int64_t>({rows.rows, fit / kTileRows * kTileRows, 65535});
  return plan;
}

}  // namespace

int64_t cuda_select_workspace(const DeviceRows& rows, int64_t window_tokens, int64_t most) {
  const Plan plan = plan_of(rows, window_tokens, most);
  return plan.piece * plan.row_words * 4;
}

void cuda_choose_windows(cudaStream_t stream, const DeviceRows& rows, int64_t tokens, DeviceMatrix out, void* workspace,
                         const ScoreWindows& score) {
  const int64_t most = out.cols;
  kernel_check(out.rows == rows.rows && most >= 1, "choice of windows: shapes differ");
  kernel_check(most <= kMostChosen, "choice of windows: a row may choose at most 4096 in the CUDA kernels");
  // Windows are told as whole fp32 numbers.
  kernel_check(rows.max_keys / tokens <= (int64_t{1} << 24), "choice of windows: more than 2^24 windows");
  const Plan plan = plan_of(rows, tokens, most);
  const int64_t bound = rows.max_keys / tokens;
  const bool scored = bound > most;
  for (int64_t first = 0; first < rows.rows; first += plan.piece) {
    const int64_t count = std::min<int64_t>(plan.piece, rows.rows - first);
    uint32_t* memory = static_cast<uint32_t*>(workspace);
    ChoiceParams c = {};
    c.group_of = rows.group_of + first;
    c.positions = rows.positions + first;
    c.keys = memory;
    c.out = out.data + first * out.stride;
    c.out_stride = out.stride;
    c.tokens = static_cast<int>(tokens);
    c.most = static_cast<int>(most);
    if (scored && !score(first, count, memory, plan.stride[0])) return;
    int64_t at = count * plan.stride[0], items = bound;
    for (c.level = 0; c.level < (scored ? plan.levels : 1); ++c.level) {
      const bool last = !scored || c.level + 1 == plan.levels;
      const int64_t blocks = last ? 1 : (items + kChoiceItems - 1) / kChoiceItems;
      c.stride = plan.stride[c.level];
      c.kept_keys = nullptr;
      if (!last) {
        c.kept_stride = plan.stride[c.level + 1];
        c.kept_keys = memory + at;
        c.kept_windows = reinterpret_cast<int32_t*>(memory + at + count * c.kept_stride);
        at += 2 * count * c.kept_stride;
      }
      const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(count));
      if (!launch_kernel(choice_kernel, grid, dim3(kChoiceThreads), 0, stream, "choice of windows", c)) return;
      c.keys = c.kept_keys;
      c.windows = c.kept_windows;
      items = blocks * most;
    }
  }
}

void cuda_select_windows(cudaStream_t stream, const DeviceRows& rows, const CudaSelectWindows& args) {
  const int64_t tokens = args.layer.tokens;
  kernel_check(args.heads >= 1 && args.q.cols == args.heads * args.layer.width && args.q.rows == rows.rows,
               "select_windows: shapes differ");
  const int64_t bound = rows.max_keys / tokens;
  const auto score = [&](int64_t first, int64_t count, uint32_t* keys, int64_t stride) {
    ScoreParams p = {};
    p.layer = args.layer;
    p.group_of = rows.group_of + first;
    p.positions = rows.positions + first;
    p.groups = rows.groups;
    p.pages = rows.pages;
    p.q = args.q.data + first * args.q.stride;
    p.q_stride = args.q.stride;
    p.keys = keys;
    p.stride = stride;
    p.rows = static_cast<int>(count);
    p.heads = static_cast<int>(args.heads);
    p.most = static_cast<int>(args.out.cols);
    p.scale = args.scale;
    p.fours = args.layer.width % 4 == 0 && by_fours(args.q) && aligned_to(args.layer.data, 16);
    const dim3 grid(static_cast<unsigned>((bound + kTileWindows - 1) / kTileWindows),
                    static_cast<unsigned>((count + kTileRows - 1) / kTileRows));
    return launch_kernel(score_kernel, grid, dim3(32 * kTileRows), 0, stream, "scores of windows", p);
  };
  cuda_choose_windows(stream, rows, tokens, args.out, args.workspace, score);
}

}  // namespace tensorfold
