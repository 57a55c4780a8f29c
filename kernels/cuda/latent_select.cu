// The choice of windows of tokens by their pooled keys: scores by several weighted heads.
//
// Score of a window: queries and key are rounded to bf16; the product of a head is a chain of mma.sync.m16n8k16 over
// the key's values in steps of 16, ascending, 16 heads the rows of the atom and 8 windows its columns; then
//   sum = fma(weight[h] * weight_scale, max(scale * product, 0), sum)   over heads g, g + 8, g + 16, ...
// for g of 0 to 7, and the eight sums are added by a butterfly over g ^ 1, g ^ 2, g ^ 4. Which rows and windows a block
// has is in none of this.
//
// Then the choice of select_windows.cu, by a total order.
#include <algorithm>

#include "kernels/cuda/attention_layout.h"
#include "kernels/cuda/attention_mma.cuh"
#include "kernels/cuda/latent_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/select_windows.h"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kScoreWarps = 8;
constexpr int kPair = 16;                               // windows of a warp at a time: two atoms
constexpr int kScoreWindows = kScoreWarps * kPair * 2;  // of a block
constexpr int kMostRowTile = 8;
constexpr int kMostQueryBytes = 64 * 1024;  // of a block's rows
constexpr int kMostKey = static_cast<int>(kMostIndexWidth);
constexpr int kMostHeads = static_cast<int>(kMostIndexHeads);

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
  __shared__ float head_weights[kMostRowTile][kMostHeads];
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
          if (lane < 4 && window < own) order[window] = score_key(__float_as_uint(sum[e]));
        }
      }
    }
  }
}

template <int K>
bool launch_scores(cudaStream_t stream, const ScoreParams& p, int64_t windows) {
  const size_t bytes = static_cast<size_t>(p.row_tile) * static_cast<size_t>(p.head_tiles) * 16 * K * 2;
  if (!cuda_ok(cudaFuncSetAttribute(score_kernel<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostQueryBytes),
               "scores of windows")) {
    return false;
  }
  const dim3 grid(static_cast<unsigned>((windows + kScoreWindows - 1) / kScoreWindows),
                  static_cast<unsigned>((p.row_count + p.row_tile - 1) / p.row_tile));
  return launch_kernel(score_kernel<K>, grid, dim3(32 * kScoreWarps), bytes, stream, "scores of windows", p);
}

bool score(cudaStream_t stream, ScoreParams p, int64_t windows) {
  const int key = p.keys.width <= 32 ? 32 : p.keys.width <= 64 ? 64 : kMostKey;
  const int row_bytes = p.head_tiles * 16 * key * 2;
  // A few rows are mostly of a sequence each.
  p.row_tile = p.rows.rows <= 2 * kMostRowTile ? 1 : std::max(1, std::min(kMostRowTile, kMostQueryBytes / row_bytes));
  if (key == 32) return launch_scores<32>(stream, p, windows);
  if (key == 64) return launch_scores<64>(stream, p, windows);
  return launch_scores<kMostKey>(stream, p, windows);
}

}  // namespace

void cuda_select_rows(cudaStream_t stream, const DeviceRows& rows, const CudaSelectArgs& args) {
  const int64_t width = args.keys.width;
  kernel_check(args.q.cols == args.heads * width && args.weights.cols == args.heads && args.q.rows == rows.rows &&
                   args.weights.rows == rows.rows,
               "select_rows: shapes differ");
  kernel_check(width <= kMostKey && width % 2 == 0 && args.heads >= 1 && args.heads <= kMostHeads && args.tokens >= 1,
               "select_rows: the CUDA kernels have up to 128 heads of an even number of values up to 128");
  ScoreParams p = {};
  p.rows = rows;
  p.keys = args.keys;
  p.q = args.q;
  p.weights = args.weights;
  p.scale = args.scale;
  p.weight_scale = args.weight_scale;
  p.tokens = static_cast<int>(args.tokens);
  p.heads = static_cast<int>(args.heads);
  p.head_tiles = (p.heads + 15) / 16;
  p.most = static_cast<int>(args.out.cols);
  const auto scores = [&](int64_t first_row, int64_t count, uint32_t* keys, int64_t stride) {
    p.order = keys;
    p.stride = stride;
    p.first_row = first_row;
    p.row_count = count;
    return score(stream, p, rows.max_keys / args.tokens);
  };
  cuda_choose_windows(stream, rows, args.tokens, args.out, args.workspace, scores);
}

}  // namespace tensorfold
