// Attention for few queries, where waiting is what costs: a block takes one tile of 16 queries and one split. Its eight
// warps share the keys of each block for the scores, keep the scores of the whole split in registers, and then share
// the dimensions for the values. Every number is what attention_tile.cu computes, in the same chains; only who computes
// it differs: running maxima over blocks are the same whether taken one by one or as prefixes afterwards.
#pragma once

#include "kernels/cuda/attention_kernels.cuh"
#include "kernels/cuda/warp.cuh"

namespace tensorfold {

inline constexpr int kNarrowWarps = 8;
inline constexpr int kNarrowQueries = 16;
inline constexpr int kNarrowWeightRow =
    kSplitBlocks * kBlockKeys * 2;  // bytes of a query's weights in shared memory, bf16
inline constexpr int kNarrowMaxRow =
    kSplitBlocks * kNarrowWarps + 4;  // floats of a query's maxima; + 4: no bank conflicts
static_assert(kBlockKeys == kNarrowWarps * 8, "a warp has one tile of 8 keys of each block");

/// kChosen: of keys from a list (attention_sparse.cu), else of positions 0, 1, 2 …
template <int kDim, bool kFp8, int kRing, bool kChosen>
struct NarrowShape {
  static constexpr int kStage = kStageBytes<kDim, kFp8, 1>;
  static constexpr int kWide = kFp8 ? kBlockKeys * kDim * 2 : 0;
  // Queries (until they are in registers) and weights share their place.
  static constexpr int kWeights = kNarrowQueries * kNarrowWeightRow;
  static constexpr int kMaxima = kNarrowQueries * kNarrowMaxRow * 4;
  static constexpr int kRescales = kNarrowQueries * kSplitBlocks * 4;
  static constexpr int kList = kChosen ? static_cast<int>(kKeySplit) * 4 : 0;
  static constexpr int kShared = kWeights + kMaxima + kRescales + kWide + kRing * kStage + kList;
  static_assert(kNarrowQueries * kDim * 2 <= kWeights && (kWeights + kMaxima + kRescales) % 128 == 0);
  // Value dimensions: tiles of 8 a warp, and the warps that have any.
  static constexpr int kTiles = kDim >= 64 ? kDim / 64 : 1;
  static constexpr int kValueWarps = kDim / 8 / kTiles;
};

/// Running maxima of a query over the split's blocks; lane's query is lane % 16, lanes 16-31 repeat 0-15.
struct NarrowMaxima {
  float base[kSplitBlocks];     // what weights of a block are relative to
  float rescale[kSplitBlocks];  // of the sums before a block
  float last;
  __device__ __forceinline__ NarrowMaxima(const float* maxima, int blocks, float factor) {
    last = kMinusInfinity;
#pragma unroll
    for (int j = 0; j < kSplitBlocks; ++j) {
      base[j] = 0.0f;
      rescale[j] = 1.0f;
      if (j >= blocks) continue;
      const float4* of_warps = reinterpret_cast<const float4*>(maxima + j * kNarrowWarps);
      const float4 a = of_warps[0];
      const float4 b = of_warps[1];
      const float block_max = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
      base[j] = next_max(&last, block_max, factor, &rescale[j]);
    }
  }
};

/// The slot-th tile of a key/value head over rows with lists, whose lengths - 1 are in p.positions; `tiles` a row.
/// False if there is none; rows of no group get zeros.
__device__ __forceinline__ bool find_chosen_tile(const AttentionParams& p, int kv_head, int slot, bool first_split,
                                                 TileWork* work) {
  const int tiles = p.slots / p.rows, row = slot / tiles;
  work->first_head = p.first_head[kv_head];
  work->heads_per_kv = p.first_head[kv_head + 1] - work->first_head;
  work->first = slot % tiles * kNarrowQueries;
  work->count = work->heads_per_kv;
  if (work->first >= work->count) return false;
  if (p.group_of[row] < 0) {
    const int width = min(kNarrowQueries, work->count - work->first) * p.head_dim;
    __nv_bfloat16* out = p.out + row * p.out_stride + (work->first_head + work->first) * p.head_dim;
    for (int d = 2 * static_cast<int>(threadIdx.x); first_split && d < width; d += 2 * static_cast<int>(blockDim.x)) {
      *reinterpret_cast<uint32_t*>(out + d) = 0;
    }
    return false;
  }
  work->first_row = row;
  work->first_position = static_cast<int>(p.positions[row]);
  return true;
}

/// Starts the copy of 64 keys (or values) from their places in the cache into one block, as load_blocks would have it.
/// list: in shared memory, page * 64 + token of each key. part: 0 for keys, 1 for values.
template <int kDim, bool kFp8, int kThreads>
__device__ __forceinline__ void load_chosen(const AttentionParams& p, const int32_t* list, int kv_head, int part,
                                            uint32_t shared) {
  constexpr int kUnits = kDim / 8, kUnitBytes = kFp8 ? 8 : 16;
  static_assert(kBlockKeys * kUnits % kThreads == 0);
#pragma unroll
  for (int n = 0; n < kBlockKeys * kUnits / kThreads; ++n) {
    const int i = static_cast<int>(threadIdx.x) + n * kThreads;
    const int key = i / kUnits, unit = i % kUnits;
    const int place = list[key], token = place % kBlockKeys;
    const int64_t block = cache_block(place / kBlockKeys, p.kv_heads, kv_head) + part;
    const char* from =
        p.blocks + ((block * kBlockKeys + token) * kUnits + swizzled_unit<kDim>(token, unit)) * kUnitBytes;
    const uint32_t to = shared + (key * kUnits + swizzled_unit<kDim>(key, unit)) * kUnitBytes;
    if constexpr (kFp8) {
      copy_async8(to, from);
    } else {
      copy_async16(to, from, true);
    }
  }
  if constexpr (kFp8) {
    const int key = static_cast<int>(threadIdx.x);
    if (key < kBlockKeys) {
      const int place = list[key];
      const int64_t block = cache_block(place / kBlockKeys, p.kv_heads, kv_head) + part;
      copy_async4(shared + kBlockKeys * kDim + key * 4, p.scales + block * kBlockKeys + place % kBlockKeys);
    }
  }
}

template <int kDim, bool kFp8, int kRing, bool kChosen>
__global__ void __launch_bounds__(kNarrowWarps * 32, kDim == 256 ? 1 : 2)
    narrow_kernel(const __grid_constant__ AttentionParams p) {
  using Shape = NarrowShape<kDim, kFp8, kRing, kChosen>;
  extern __shared__ __align__(128) char shared[];
  pdl_launch();
  if constexpr (kChosen) pdl_wait();  // lists are of this pass
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int warp = uniform_warp();
  const int g = lane >> 2;
  const int t = lane & 3;
  float* maxima = reinterpret_cast<float*>(shared + Shape::kWeights);
  const uint32_t weights = shared_address(shared);  // and queries
  float* rescales = maxima + Shape::kMaxima / 4;
  const uint32_t wide = weights + Shape::kWeights + Shape::kMaxima + Shape::kRescales;
  const uint32_t ring = wide + Shape::kWide;

  const int kv_head = static_cast<int>(blockIdx.x) % p.kv_heads;
  const int slot = static_cast<int>(blockIdx.x) / p.kv_heads;
  const int split = p.first_split + static_cast<int>(blockIdx.y);
  TileWork work;
  if constexpr (kChosen) {
    if (!find_chosen_tile(p, kv_head, slot, split == 0, &work)) return;
  } else if (!find_tile(p, kv_head, slot, &work)) {
    pdl_wait();
    if (split == 0) zero_padding(p, kv_head, slot);
    return;
  }
  const int first_block = split * kSplitBlocks;
  const int blocks = min(work.position(work.first + kNarrowQueries - 1) / kBlockKeys + 1 - first_block,
                         static_cast<int>(kSplitBlocks));
  if (blocks <= 0) {
    if constexpr (!kChosen) pdl_wait();
    return;
  }

  // Stages: the key blocks, then the value blocks. Loops over blocks are not unrolled: a block of this kernel runs each
  // instruction a few times only, and would wait for the instructions.
  int own_page = 0;
  int32_t* list = reinterpret_cast<int32_t*>(shared + Shape::kShared - Shape::kList);
  if constexpr (kChosen) {
    const int32_t* chosen = p.chosen + work.first_row * p.chosen_stride;
    // Beyond the last key the last one again: something finite, which the mask leaves out.
    for (int i = static_cast<int>(threadIdx.x); i < blocks * kBlockKeys; i += kNarrowWarps * 32) {
      list[i] = chosen[min(first_block * kBlockKeys + i, work.first_position)];
    }
    __syncthreads();
  } else if (lane < blocks) {
    own_page = p.pages[work.first_page + first_block + lane];
  }
  int issued = 0;
  int issue_slot = 0;
  const auto issue = [&] {
    if (issued < 2 * blocks) {
      const int part = issued < blocks ? 0 : 1;
      const uint32_t stage = ring + issue_slot * Shape::kStage;
      if constexpr (kChosen) {
        load_chosen<kDim, kFp8, kNarrowWarps * 32>(p, list + (issued - part * blocks) * kBlockKeys, kv_head, part,
                                                   stage);
      } else {
        const int page = __shfl_sync(0xffffffffu, own_page, issued - part * blocks);
        load_blocks<kDim, kFp8, 1, kNarrowWarps * 32>(p, cache_block(page, p.kv_heads, kv_head) + part, stage);
      }
    }
    ++issued;
    issue_slot = issue_slot + 1 == kRing ? 0 : issue_slot + 1;
    copy_async_commit();
  };
  int slot_here = 0;
  const auto acquire = [&]() -> uint32_t {
    copy_async_wait<kRing - 2>();
    __syncthreads();
    issue();
    const uint32_t here = ring + slot_here * Shape::kStage;
    slot_here = slot_here + 1 == kRing ? 0 : slot_here + 1;
    if constexpr (kFp8) {
      widen_blocks<kDim, 1>(here, wide);
      __syncthreads();
      return wide;
    }
    return here;
  };
  // Blocks of keys that earlier passes filled come before what this pass's kernels have written.
  const int early = kChosen ? 0 : min(min(work.first_position / kBlockKeys - first_block, blocks), kRing - 1);
#pragma unroll 1
  for (int i = 0; i < early; ++i) issue();
  if constexpr (!kChosen) pdl_wait();
#pragma unroll 1
  for (int i = max(early, 0); i < kRing - 1; ++i) issue();
  if (!kChosen && split == 0) zero_padding(p, kv_head, slot);  // while the copies are under way

  load_queries<kDim>(p, work, kNarrowQueries, weights);
  __syncthreads();
  // Lane's row of matrices (rows 0-7, 8-15; units 0, 1).
  const int row_of_lane = (lane & 7) + ((lane >> 3) & 1) * 8;
  const int unit_of_lane = lane >> 4;
  uint32_t queries[kDim / 16][4];
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const int unit = swizzled_unit<kDim>(row_of_lane, 2 * k + unit_of_lane);
    load_matrices(queries[k], weights + (row_of_lane * (kDim / 8) + unit) * 16);
  }

  // Scores of this warp's 8 keys of every block. ldmatrix brings two steps of 16 dims.
  float scores[kSplitBlocks][4];
#pragma unroll
  for (int j = 0; j < kSplitBlocks; ++j) scores[j][0] = scores[j][1] = scores[j][2] = scores[j][3] = 0.0f;
  const int own_key = warp * 8 + (lane & 7);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    const uint32_t keys = acquire() + own_key * (kDim * 2);
    float here[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < kDim / 32; ++k) {
      uint32_t b[4];
      load_matrices(b, keys + swizzled_unit<kDim>(own_key, 4 * k + (lane >> 3)) * 16);
      mma_m16n8k16(here, queries[2 * k], b[0], b[1]);
      mma_m16n8k16(here, queries[2 * k + 1], b[2], b[3]);
    }
#pragma unroll
    for (int j = 0; j < kSplitBlocks; ++j) {  // registers have no index
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[j][i] = j == block ? here[i] : scores[j][i];
    }
  }

  const int position[2] = {work.position(work.first + g), work.position(work.first + g + 8)};
#pragma unroll
  for (int j = 0; j < kSplitBlocks; ++j) {
    if (j >= blocks) continue;
    const int key = (first_block + j) * kBlockKeys + warp * 8 + 2 * t;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (key + (i & 1) > position[i >> 1]) scores[j][i] = kMinusInfinity;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = fmaxf(scores[j][2 * half], scores[j][2 * half + 1]);
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      if (t == 0) maxima[(g + 8 * half) * kNarrowMaxRow + j * kNarrowWarps + warp] = largest;
    }
  }
  __syncthreads();  // also: all warps have their queries in registers, weights may take the place
  const NarrowMaxima of_lane(maxima + (lane & 15) * kNarrowMaxRow, blocks, p.factor);
#pragma unroll
  for (int j = 0; j < kSplitBlocks; ++j) {
    if (warp == 0 && lane < kNarrowQueries) rescales[j * kNarrowQueries + lane] = of_lane.rescale[j];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = g + 8 * half;
      const float base = __shfl_sync(0xffffffffu, of_lane.base[j], query);
      if (j >= blocks) continue;
      const float low = weight(scores[j][2 * half], base, p.factor);
      const float high = weight(scores[j][2 * half + 1], base, p.factor);
      store_shared4(weights + query * kNarrowWeightRow + swizzled_unit<64>(query, j * kNarrowWarps + warp) * 16 + t * 4,
                    pack_bf16(low, high));
    }
  }

  // Values: this warp's dimensions, all keys. acquire() begins with the barrier that the weights need.
  SoftmaxState state[2] = {{__shfl_sync(0xffffffffu, of_lane.last, g), 0.0f},
                           {__shfl_sync(0xffffffffu, of_lane.last, g + 8), 0.0f}};
  float o[Shape::kTiles][4];
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const int first_unit = warp * Shape::kTiles;
  const bool has_dims = warp < Shape::kValueWarps;
#pragma unroll 1
  for (int j = 0; j < blocks; ++j) {
    const uint32_t values = acquire();
    if (!has_dims) continue;
    const float rescale[2] = {rescales[j * kNarrowQueries + g], rescales[j * kNarrowQueries + g + 8]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] = __fmul_rn(sums[i], rescale[i >> 1]);
#pragma unroll
      for (int n = 0; n < Shape::kTiles; ++n) o[n][i] = __fmul_rn(o[n][i], rescale[i >> 1]);
    }
    uint32_t pair[4];  // kTiles == 1: of two steps
#pragma unroll
    for (int k = 0; k < kBlockKeys / 16; ++k) {
      uint32_t a[4];
      load_matrices(a, weights + row_of_lane * kNarrowWeightRow +
                           swizzled_unit<64>(row_of_lane, j * kNarrowWarps + 2 * k + unit_of_lane) * 16);
      mma_m16n8k16(sums, a, kBf16One, kBf16One);
      if constexpr (Shape::kTiles == 1) {
        if (k % 2 == 0) {
          const int key = k * 16 + lane;  // four matrices of 8 keys
          load_matrices_transposed(pair, values + (key * (kDim / 8) + swizzled_unit<kDim>(key, first_unit)) * 16);
        }
        mma_m16n8k16(o[0], a, pair[k % 2 * 2], pair[k % 2 * 2 + 1]);
      } else {
        const int key = k * 16 + row_of_lane;
#pragma unroll
        for (int n = 0; n < Shape::kTiles; n += 2) {
          uint32_t b[4];
          const int unit = swizzled_unit<kDim>(key, first_unit + n + unit_of_lane);
          load_matrices_transposed(b, values + (key * (kDim / 8) + unit) * 16);
          mma_m16n8k16(o[n], a, b[0], b[1]);
          mma_m16n8k16(o[n + 1], a, b[2], b[3]);
        }
      }
    }
  }
  if (!has_dims) return;
  state[0].sum = sums[0];
  state[1].sum = sums[2];
  write_queries<kDim, Shape::kTiles>(p, work, work.first, split, first_unit, o, state, warp == 0);
}

/// What `what` names, of any number of keys and dimensions.
template <int kDim, bool kFp8, int kRing, bool kChosen>
bool launch_narrow(cudaStream_t stream, const AttentionParams& p, dim3 grid, const char* what) {
  constexpr int kBytes = NarrowShape<kDim, kFp8, kRing, kChosen>::kShared;
  auto kernel = narrow_kernel<kDim, kFp8, kRing, kChosen>;
  return cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), what) &&
         launch_kernel(kernel, grid, dim3(kNarrowWarps * 32), static_cast<size_t>(kBytes), stream, what, p);
}

template <bool kFp8, bool kChosen>
bool launch_narrow_dim(cudaStream_t stream, int dim, const AttentionParams& p, dim3 grid, int shared_limit,
                       const char* what) {
  switch (dim) {
    case 32:
      return launch_narrow<32, kFp8, 4, kChosen>(stream, p, grid, what);
    case 64:
      return launch_narrow<64, kFp8, 4, kChosen>(stream, p, grid, what);
    case 128:
      return launch_narrow<128, kFp8, 4, kChosen>(stream, p, grid, what);
    default:
      // Deep where there is the memory: at short contexts a block's time is that of its copies.
      return NarrowShape<256, kFp8, 6, kChosen>::kShared <= shared_limit
                 ? launch_narrow<256, kFp8, 6, kChosen>(stream, p, grid, what)
                 : launch_narrow<256, kFp8, 2, kChosen>(stream, p, grid, what);
  }
}

static_assert(NarrowShape<128, false, 4, true>::kShared <= 99 * 1024 &&
              NarrowShape<128, true, 4, true>::kShared <= 99 * 1024);
static_assert(NarrowShape<256, false, 2, true>::kShared <= 99 * 1024 &&
              NarrowShape<256, true, 2, true>::kShared <= 99 * 1024);

}  // namespace tensorfold
