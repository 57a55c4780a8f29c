// What the attention kernels share: parameters, finding a block's work, loading queries and keys, the fold of splits,
// and what becomes of a finished tile. See attention.cu for the arithmetic as a whole.
#pragma once

#include <cuda_fp8.h>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/attention_layout.h"
#include "kernels/cuda/attention_mma.cuh"
#include "kernels/cuda/device.h"
#include "kernels/cuda/launch.cuh"

namespace tensorfold {

inline constexpr int kMaxKvHeads = 256;
inline constexpr int kMaxTileWarps = 8;

/// A split's (or the running) state of one query without its accumulators: largest score and sum of weights.
struct SoftmaxState {
  float max;
  float sum;
};

struct AttentionParams {
  const float* q;
  const float* gate;
  __nv_bfloat16* out;
  int64_t q_stride, gate_stride, out_stride;
  const char* blocks;   // of this layer
  const float* scales;  // fp8
  const int32_t* group_count;
  const int32_t* group_of;
  const int64_t* positions;
  const DeviceGroup* groups;
  const int32_t* pages;
  // Split mode: states of the splits of this launch, [split - first_split][row][head]([padded head_dim]).
  float* part_o;
  SoftmaxState* part_state;
  // Between launches: the fold of the splits so far, [row][head]([padded head_dim]) and [row][head][4].
  float* run_o;
  SoftmaxState* run_state;
  // Attention over chosen keys: page * 64 + token of each row's, ascending positions; null: all up to the row's own.
  const int32_t* chosen;
  int64_t chosen_stride;
  float* scratch;  // whole mode at head_dim 256: a block's folded accumulators
  float factor;    // scale * log2(e)
  int rows, max_groups, heads, head_dim, kv_heads;
  int works, slots, tile_queries;
  int first_split, split_count;
  bool whole;                            // a block walks all splits of its tile and finishes it
  bool last_splits;                      // of several launches
  uint16_t first_head[kMaxKvHeads + 1];  // q heads of kv head k: first_head[k] .. first_head[k + 1] - 1
};

/// A tile: queries [first, first + tile_queries) of `count`, which are the (row, head) pairs of one group and kv head,
/// heads of a row together.
struct TileWork {
  int first = 0;
  int count = 0;
  int heads_per_kv = 1;
  int first_head = 0;
  int first_row = 0;
  int first_position = 0;
  int first_page = 0;

  /// Position of a query's row; queries beyond the last count as the last.
  __device__ __forceinline__ int position(int query) const {
    return first_position + min(query, count - 1) / heads_per_kv;
  }
};

/// The slot-th tile of a key/value head over all groups; all lanes of a warp together. False if there is none.
__device__ __forceinline__ bool find_tile(const AttentionParams& p, int kv_head, int slot, TileWork* work) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  work->first_head = p.first_head[kv_head];
  work->heads_per_kv = p.first_head[kv_head + 1] - work->first_head;
  if (work->heads_per_kv == 0) return false;
  const int groups = *p.group_count;
  int before = 0;
  for (int first = 0; first < p.max_groups; first += 32) {
    // Read beside the count, not after it: at short contexts a pass waits for this.
    DeviceGroup own;
    if (first + lane < p.max_groups) own = p.groups[first + lane];
    const int queries = first + lane < groups ? own.rows * work->heads_per_kv : 0;
    const int tiles = (queries + p.tile_queries - 1) / p.tile_queries;
    int sum = tiles;  // tiles of lanes 0 .. lane
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int left = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += left;
    }
    const unsigned hit = __ballot_sync(0xffffffffu, slot < before + sum);
    if (hit != 0) {
      const int source = __ffs(static_cast<int>(hit)) - 1;
      work->first = (slot - before - __shfl_sync(0xffffffffu, sum - tiles, source)) * p.tile_queries;
      work->count = __shfl_sync(0xffffffffu, queries, source);
      work->first_row = __shfl_sync(0xffffffffu, own.first_row, source);
      work->first_position = __shfl_sync(0xffffffffu, static_cast<int>(own.first_position), source);
      work->first_page = __shfl_sync(0xffffffffu, own.first_page, source);
      return true;
    }
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  return false;
}

/// Rows of no group get zeros; the blocks of a kv head share the rows. For the first split only.
__device__ __forceinline__ void zero_padding(const AttentionParams& p, int kv_head, int slot) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int warp = static_cast<int>(threadIdx.x >> 5);
  const int warps = static_cast<int>(blockDim.x >> 5);
  const int first = p.first_head[kv_head] * p.head_dim;
  const int end = p.first_head[kv_head + 1] * p.head_dim;
  for (int row = slot + p.slots * warp; row < p.rows; row += p.slots * warps) {
    if (p.group_of[row] >= 0) continue;
    for (int d = first + 2 * lane; d < end; d += 64) {
      *reinterpret_cast<uint32_t*>(p.out + row * p.out_stride + d) = 0;
    }
  }
}

/// Pieces of queries (8 values of one) on their way to shared memory: kPieces of this thread from the first-th on. All
/// are asked for before the first is used.
template <int kDim, int kPieces>
struct QueryPieces {
  static constexpr int kUnits = kDim / 8;
  float4 low[kPieces];
  float4 high[kPieces];

  __device__ __forceinline__ void load(const AttentionParams& p, const TileWork& work, int queries, int first) {
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const int i = first + n * static_cast<int>(blockDim.x);
      const int query = work.first + i / kUnits;
      low[n] = high[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (i < queries * kUnits && query < work.count && i % kUnits * 8 < p.head_dim) {
        const int of_group = query / work.heads_per_kv;
        const int head = work.first_head + query - of_group * work.heads_per_kv;
        const float4* source = reinterpret_cast<const float4*>(p.q + (work.first_row + of_group) * p.q_stride +
                                                               head * p.head_dim + i % kUnits * 8);
        low[n] = source[0];
        high[n] = source[1];
      }
    }
  }
  __device__ __forceinline__ void store(int queries, int first, uint32_t shared) const {
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const int i = first + n * static_cast<int>(blockDim.x);
      if (i >= queries * kUnits) continue;
      const int place = i / kUnits;
      store_shared16(shared + (place * kUnits + swizzled_unit<kDim>(place, i % kUnits)) * 16,
                     make_uint4(pack_bf16(low[n].x, low[n].y), pack_bf16(low[n].z, low[n].w),
                                pack_bf16(high[n].x, high[n].y), pack_bf16(high[n].z, high[n].w)));
    }
  }
};

/// Queries [work.first, work.first + queries) to shared memory as bf16, [queries][kDim] with rows' units swizzled;
/// zeros beyond the last query and beyond head_dim.
template <int kDim>
__device__ __forceinline__ void load_queries(const AttentionParams& p, const TileWork& work, int queries,
                                             uint32_t shared) {
  constexpr int kTogether = 4;
  const int step = kTogether * static_cast<int>(blockDim.x);
  for (int i = static_cast<int>(threadIdx.x); i < queries * (kDim / 8); i += step) {
    QueryPieces<kDim, kTogether> pieces;
    pieces.load(p, work, queries, i);
    pieces.store(queries, i, shared);
  }
}

/// Bytes of a block as the cache has it, and of what a stage of `parts` blocks takes in shared memory.
template <int kDim, bool kFp8>
inline constexpr int kBlockBytes = kBlockKeys* kDim*(kFp8 ? 1 : 2);
template <int kDim, bool kFp8>
inline constexpr int kScaleBytes = kFp8 ? kBlockKeys * 4 : 0;
template <int kDim, bool kFp8, int kParts>
inline constexpr int kStageBytes = kParts*(kBlockBytes<kDim, kFp8> + kScaleBytes<kDim, kFp8>);

/// Starts the copy of kParts blocks from `block` on (a key block and the value block after it, or one of them).
/// kThreads: of the block, or 0 if not known when compiling.
template <int kDim, bool kFp8, int kParts, int kThreads>
__device__ __forceinline__ void load_blocks(const AttentionParams& p, int64_t block, uint32_t shared) {
  constexpr int kBytes = kParts * kBlockBytes<kDim, kFp8>;
  constexpr int kTogether = 8;
  const char* source = p.blocks + block * kBlockBytes<kDim, kFp8>;
  const int step = (kThreads > 0 ? kThreads : static_cast<int>(blockDim.x)) * 16;
  const int first = static_cast<int>(threadIdx.x) * 16;
  if constexpr (kThreads > 0) {
#pragma unroll
    for (int n = 0; n < (kBytes + kThreads * 16 - 1) / (kThreads * 16); ++n) {
      const int i = first + n * kThreads * 16;
      if (kBytes % (kThreads * 16) == 0 || i < kBytes) copy_async16(shared + i, source + i, true);
    }
  } else {
    int i = first;
#pragma unroll 1
    for (; i + (kTogether - 1) * step < kBytes; i += kTogether * step) {
#pragma unroll
      for (int n = 0; n < kTogether; ++n) copy_async16(shared + i + n * step, source + i + n * step, true);
    }
#pragma unroll 1
    for (; i < kBytes; i += step) copy_async16(shared + i, source + i, true);
  }
  if constexpr (kFp8) {
    const char* scales = reinterpret_cast<const char*>(p.scales + block * kBlockKeys);
    for (int i = first; i < kParts * kScaleBytes<kDim, kFp8>; i += step) {
      copy_async16(shared + kBytes + i, scales + i, true);
    }
  }
}

/// 16 e4m3 values to bf16. Exact: an e4m3 value times a power of two.
__device__ __forceinline__ void widen_piece(uint4 raw, float scale, uint4* low, uint4* high) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  uint32_t wide[8];
#pragma unroll
  for (int w = 0; w < 8; ++w) {
    const __nv_fp8x2_storage_t pair = static_cast<__nv_fp8x2_storage_t>(words[w >> 1] >> ((w & 1) * 16));
    const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
    wide[w] = pack_bf16(__fmul_rn(values.x, scale), __fmul_rn(values.y, scale));
  }
  *low = make_uint4(wide[0], wide[1], wide[2], wide[3]);
  *high = make_uint4(wide[4], wide[5], wide[6], wide[7]);
}

/// fp8 blocks of a stage to bf16, places unchanged.
template <int kDim, int kParts>
__device__ __forceinline__ void widen_blocks(uint32_t stage, uint32_t shared) {
  constexpr int kValues = kParts * kBlockKeys * kDim;
  for (int i = static_cast<int>(threadIdx.x) * 16; i < kValues; i += static_cast<int>(blockDim.x) * 16) {
    uint4 low, high;
    widen_piece(load_shared16(stage + i), load_shared_float(stage + kValues + (i / kDim) * 4), &low, &high);
    store_shared16(shared + i * 2, low);
    store_shared16(shared + i * 2 + 16, high);
  }
}

inline constexpr float kMinusInfinity = -__builtin_huge_valf();

/// Takes a block's largest score into the running one. Returns what the scores are taken relative to (0 while no key
/// has been visible, so that a masked score gives weight 0); *rescale is what the sums so far are multiplied by: 1 when
/// the largest score has not changed, and so for a wholly masked block.
__device__ __forceinline__ float next_max(float* max, float block_max, float factor, float* rescale) {
  const float next = fmaxf(*max, block_max);
  const float base = next == kMinusInfinity ? 0.0f : next;
  *rescale = exp2_fast(__fmul_rn(__fsub_rn(*max, base), factor));
  *max = next;
  return base;
}
__device__ __forceinline__ float weight(float score, float base, float factor) {
  return exp2_fast(__fmul_rn(__fsub_rn(score, base), factor));
}

/// How a split's accumulators join the running ones: run = run * keep + split * take. A split without keys keeps all.
struct FoldFactors {
  float keep;
  float take;
};
__device__ __forceinline__ FoldFactors fold_state(SoftmaxState* run, SoftmaxState split, float factor) {
  if (split.max == kMinusInfinity) return {1.0f, 0.0f};
  const float next = fmaxf(run->max, split.max);
  const FoldFactors f = {exp2_fast(__fmul_rn(__fsub_rn(run->max, next), factor)),
                         exp2_fast(__fmul_rn(__fsub_rn(split.max, next), factor))};
  run->max = next;
  run->sum = __fmaf_rn(run->sum, f.keep, __fmul_rn(split.sum, f.take));
  return f;
}
__device__ __forceinline__ float fold_value(float run, float split, FoldFactors f) {
  return __fmaf_rn(run, f.keep, __fmul_rn(split, f.take));
}

/// One output. Adding zero makes -0 of an underflow +0, whichever masked blocks were visited after it.
__device__ __forceinline__ float finished_value(float o, float inverse_sum) {
  return __fadd_rn(__fmul_rn(o, inverse_sum), 0.0f);
}
__device__ __forceinline__ float gated_value(float value, float gate) {
  constexpr float kLog2E = 1.44269504088896341f;
  return __fmul_rn(value, reciprocal_fast(__fadd_rn(1.0f, exp2_fast(__fmul_rn(-gate, kLog2E)))));
}

/// Writes what a thread holds of 16 queries from `query` on: of queries query + g and query + g + 8 the dims of
/// kTiles tiles of 8 from unit first_unit on. Whole mode finishes; otherwise the split's state is kept for the fold.
template <int kDim, int kTiles>
__device__ __forceinline__ void write_queries(const AttentionParams& p, const TileWork& work, int query, int split,
                                              int first_unit, const float (&o)[kTiles][4],
                                              const SoftmaxState (&state)[2], bool writes_state) {
  const int lane = static_cast<int>(threadIdx.x & 31);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = query + (lane >> 2) + 8 * half;
    if (own >= work.count) continue;
    const int64_t row = work.first_row + own / work.heads_per_kv;
    const int head = work.first_head + own % work.heads_per_kv;
    const int dim = first_unit * 8 + 2 * (lane & 3);
    if (p.whole) {
      const float inverse = __fdiv_rn(1.0f, state[half].sum);
      const int64_t column = head * p.head_dim + dim;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if (dim + t * 8 >= p.head_dim) break;
        float low = finished_value(o[t][2 * half], inverse);
        float high = finished_value(o[t][2 * half + 1], inverse);
        if (p.gate != nullptr) {
          const float2 gate = *reinterpret_cast<const float2*>(p.gate + row * p.gate_stride + column + t * 8);
          low = gated_value(low, gate.x);
          high = gated_value(high, gate.y);
        }
        *reinterpret_cast<uint32_t*>(p.out + row * p.out_stride + column + t * 8) = pack_bf16(low, high);
      }
    } else {
      const int64_t index = (static_cast<int64_t>(split - p.first_split) * p.rows + row) * p.heads + head;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        *reinterpret_cast<float2*>(p.part_o + index * kDim + dim + t * 8) =
            make_float2(o[t][2 * half], o[t][2 * half + 1]);
      }
      if (writes_state && (lane & 3) == 0) p.part_state[index] = state[half];
    }
  }
}

// What launches share (attention.cu). ---------------------------------------------------------------------------------

/// States of splits that are kept at a time, in floats (48 MiB: most of it stays in the L2 cache of a large GPU); more
/// splits take several launches.
inline constexpr int64_t kPartFloats = int64_t{12} << 20;
inline constexpr int64_t kFewestSplits = 4;
inline constexpr int64_t kMostSplits = 65535;  // of a grid

struct AttentionLimits {
  int multiprocessors = 1;
  int shared_bytes = 48 * 1024;
  bool clusters = false;
};
AttentionLimits attention_limits();
/// Of so many queries (rows and heads); sizes only, no bit of a result depends on it.
int splits_at_a_time(int64_t splits, int64_t queries, int dim);

class PagedKvCache;
/// Null if the arguments can be launched, otherwise what is wrong.
const char* attention_refusal(const PagedKvCache& cache, int64_t layer, const DeviceRows& rows,
                              const CudaAttentionArgs& args);
/// All but tiles, splits and workspace.
AttentionParams attention_params(const PagedKvCache& cache, int64_t layer, const DeviceRows& rows,
                                 const CudaAttentionArgs& args);
/// Most query heads of a key/value head.
int64_t most_heads_per_kv(const AttentionParams& p);
inline bool attention_aligned(const void* p, int64_t stride, int64_t of) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % of == 0;
}

// Launches of the two kernel families (attention_tile.cu, attention_narrow.cu).
// ----------------------------------------

/// Blocks of `warps` warps with 16 queries each.
bool launch_attention_tile(cudaStream_t stream, int dim, bool fp8, const AttentionParams& p, dim3 grid, int warps,
                           int shared_limit);
/// Warps that a block may have with this much shared memory.
int attention_tile_max_warps(int dim, int shared_limit);
/// Blocks of 1, 3 or 6 tiles of 16 queries and one split, or, with one tile, clusters of them (attention_window.cuh).
/// bf16, head dimensions 128 and 256.
bool launch_attention_window(cudaStream_t stream, int dim, const AttentionParams& p, dim3 grid, int tiles,
                             bool cluster);
/// The fold of the splits of a launch, where a block did not walk them all.
bool launch_attention_fold(cudaStream_t stream, int dim, const AttentionParams& p);
/// Blocks of one tile of 16 queries and one split.
bool launch_attention_narrow(cudaStream_t stream, int dim, bool fp8, const AttentionParams& p, dim3 grid,
                             int shared_limit);

}  // namespace tensorfold
