// Attention of blocks of drafted rows (kernels/ops/block_ops.h): each row over what is cached of its sequence before
// the block, or a window of it, and over the whole block, in both directions.
//
// The arithmetic is attention.cu's: blocks of 64 keys at absolute positions, splits of 512 at absolute positions. What
// differs is which keys there are and the order of the fold:
//   own     the block's own rows, keys and values rounded to bf16 here, are one block of keys and one split
//   cached  a key is seen where first row - window + (row's place in the block) < position < first row; splits without
//           one that the row sees are not folded
//   fold    begins with the block's own split; then cached splits, ascending
// So a row's bits are a function of its block, of what is cached before the block, and of its place. Tiles, stages, how
// many splits a launch has, how long a context it is made for, and who else is in the pass are in none of this.
//
// Splits are numbered from 0, the block's own; number s > 0 is the (s - 1)-th cached split from the first one that any
// row of the block sees, so that a window takes as few as it touches, wherever it stands.
#include <algorithm>

#include "kernels/cuda/attention_kernels.cuh"
#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/kv_cache.h"
#include "kernels/cuda/warp.cuh"
#include "kernels/ops/block_ops.h"

namespace tensorfold {
namespace {

struct BlockParams : AttentionParams {
  const float* k;  // [rows, kv_heads * head_dim], the blocks' own
  const float* v;
  int64_t k_stride, v_stride;
  int window;  // 0: all
};

/// The first position that row `place` of a block at `first` sees in the cache; none are seen if it is `first` or more.
__device__ __forceinline__ int first_seen(const BlockParams& p, int first, int place) {
  return p.window > 0 ? max(first - p.window + 1 + place, 0) : 0;
}

/// kStages: parts of keys or values under way or in use, each 64 of them; a power of two.
template <int kDim, bool kFp8, int kStages>
struct BlockShape {
  static constexpr int kStage = kStageBytes<kDim, kFp8, 1>;
  static constexpr int kWide = kFp8 ? kBlockKeys * kDim * 2 : 0;
  static constexpr int kQueryBytes = 16 * kDim * 2;  // of one warp
  static constexpr bool kQueriesInRegisters = kDim <= 128;
  static constexpr int shared_bytes(int warps) { return warps * kQueryBytes + kWide + kStages * kStage; }
};

/// The block's own rows of a kv head to shared memory as a block of bf16 keys or values, zeros beyond the last.
template <int kDim>
__device__ __forceinline__ void load_own_rows(const BlockParams& p, const TileWork& work, const float* source,
                                              int64_t stride, int kv_head, uint32_t shared) {
  constexpr int kUnits = kDim / 8;
  const int rows = work.count / work.heads_per_kv;
  for (int i = static_cast<int>(threadIdx.x); i < kBlockKeys * kUnits; i += static_cast<int>(blockDim.x)) {
    const int key = i / kUnits;
    const int unit = i % kUnits;
    uint4 packed = make_uint4(0, 0, 0, 0);
    if (key < rows && unit * 8 < p.head_dim) {
      const float4* from =
          reinterpret_cast<const float4*>(source + (work.first_row + key) * stride + kv_head * p.head_dim + unit * 8);
      const float4 low = from[0];
      const float4 high = from[1];
      packed = make_uint4(pack_bf16(low.x, low.y), pack_bf16(low.z, low.w), pack_bf16(high.x, high.y),
                          pack_bf16(high.z, high.w));
    }
    store_shared16(shared + (key * kUnits + swizzled_unit<kDim>(key, unit)) * 16, packed);
  }
}

/// A split of a tile of queries. A block of the grid takes tiles slot, slot + slots, … of one kv head: their number is
/// not known when launching.
template <int kDim, bool kFp8, int kStages>
__global__ void __launch_bounds__(kMaxTileWarps * 32, 1) block_kernel(const __grid_constant__ BlockParams p) {
  using Shape = BlockShape<kDim, kFp8, kStages>;
  extern __shared__ __align__(128) char shared[];
  pdl_launch();
  pdl_wait();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int warp = uniform_warp();
  const uint32_t query_base = shared_address(shared);
  const uint32_t wide = query_base + static_cast<uint32_t>(blockDim.x >> 5) * Shape::kQueryBytes;
  const uint32_t ring = wide + Shape::kWide;
  const uint32_t own_area = kFp8 ? wide : ring;
  const uint32_t query_tile = query_base + warp * Shape::kQueryBytes;
  const LaneAddresses<kDim> row_lanes((lane & 7) + ((lane >> 3) & 1) * 8, lane >> 4);
  const LaneAddresses<kDim> key_lanes((lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
  const int kv_head = static_cast<int>(blockIdx.x) % p.kv_heads;
  const int first_slot = static_cast<int>(blockIdx.x) / p.kv_heads;
  const int split = p.first_split + static_cast<int>(blockIdx.y);
  const bool own = split == 0;
  if (own) zero_padding(p, kv_head, first_slot);

  TileWork work;
  for (int slot = first_slot; find_tile(p, kv_head, slot, &work); slot += p.slots) {
    const int before = work.first_position;  // cached keys there are
    const int seen = first_seen(p, before, 0);
    int first_block = 0;
    int end_block = 1;
    if (!own) {
      const int cached_split = seen / static_cast<int>(kKeySplit) + split - 1;
      first_block = max(cached_split * kSplitBlocks, seen / kBlockKeys);
      end_block = min((cached_split + 1) * kSplitBlocks, (before + kBlockKeys - 1) / kBlockKeys);
    }
    if (first_block >= end_block) continue;

    const int query = work.first + warp * 16;
    const bool active = query < work.count;
    // Keys low … end - 1 are seen; of the block itself all.
    const int end = own ? work.count / work.heads_per_kv : before;
    const auto low_of = [&](int of) {
      return own ? 0 : first_seen(p, before, min(of, work.count - 1) / work.heads_per_kv);
    };
    const int low[2] = {low_of(query + (lane >> 2)), low_of(query + (lane >> 2) + 8)};
    const int warp_low = low_of(query);  // the first query's is the lowest
    const int warp_most_low = low_of(query + 15);

    // Copies run kStages - 1 parts ahead (a key block, its value block, the next key block, …); the page of the block
    // after them is already known.
    const int32_t* pages = p.pages + work.first_page;
    const int parts = own ? 0 : 2 * (end_block - first_block);
    int next_part = 0;
    int next_page = own ? 0 : pages[first_block];
    const auto issue = [&] {
      if (next_part < parts) {
        load_blocks<kDim, kFp8, 1, 0>(p, cache_block(next_page, p.kv_heads, kv_head) + (next_part & 1),
                                      ring + (next_part % kStages) * Shape::kStage);
        ++next_part;
        const int block = first_block + (next_part >> 1);
        if ((next_part & 1) == 0 && block < end_block) next_page = pages[block];
      }
      copy_async_commit();
    };
    int part = 0;
    // The next 64 keys or values as bf16. All threads come here; what the call before it gave is no longer valid.
    const auto acquire = [&]() -> uint32_t {
      if (own) {
        __syncthreads();
        const bool keys = part++ == 0;
        load_own_rows<kDim>(p, work, keys ? p.k : p.v, keys ? p.k_stride : p.v_stride, kv_head, own_area);
        __syncthreads();
        return own_area;
      }
      copy_async_wait<kStages - 2>();
      __syncthreads();
      issue();  // over the part before this one, which nobody reads any more
      const uint32_t here = ring + (part++ % kStages) * Shape::kStage;
      if constexpr (kFp8) {
        widen_blocks<kDim, 1>(here, wide);
        __syncthreads();
        return wide;
      }
      return here;
    };

    __syncthreads();  // the tile before this one is done with the memory
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) issue();
    load_queries<kDim>(p, work, p.tile_queries, query_base);
    uint32_t queries[Shape::kQueriesInRegisters ? kDim / 16 : 1][4];
    if constexpr (Shape::kQueriesInRegisters) {
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) load_matrices(queries[k], query_tile + row_lanes.step(k));
    }

    float o[kDim / 8][4];
#pragma unroll
    for (int t = 0; t < kDim / 8; ++t) o[t][0] = o[t][1] = o[t][2] = o[t][3] = 0.0f;
    SoftmaxState state[2] = {{kMinusInfinity, 0.0f}, {kMinusInfinity, 0.0f}};
#pragma unroll 1
    for (int block = first_block; block < end_block; ++block) {
      const int first_key = block * kBlockKeys;
      // A block that all queries of a warp have masked would change no bit.
      const bool visible = active && first_key + kBlockKeys > warp_low;
      float scores[8][4];
      const uint32_t keys = acquire();
      if (visible) {
        score_block<kDim, Shape::kQueriesInRegisters>(scores, queries, query_tile, row_lanes, keys, key_lanes);
        if (first_key + kBlockKeys > end || first_key < warp_most_low) {
#pragma unroll
          for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int key = first_key + n * 8 + 2 * (lane & 3) + (i & 1);
              if (key < low[i >> 1] || key >= end) scores[n][i] = kMinusInfinity;
            }
          }
        }
        float rescale[2];
        softmax_block(scores, state, p.factor, rescale);
        rescale_sums(state, o, rescale);
      }
      const uint32_t values = acquire();
      if (visible) value_block<kDim>(scores, o, state, values, row_lanes);
    }
    if (active) write_queries<kDim, kDim / 8>(p, work, query, split, 0, o, state, true);
  }
}

/// Splits of this launch that a row has keys in, folded onto those before; the last launch writes the result.
template <int kDim>
__global__ void __launch_bounds__(64) block_fold_kernel(const __grid_constant__ BlockParams p) {
  constexpr int kThreads = kDim < 64 ? kDim : 64;
  constexpr int kAhead = 8;  // splits whose states are read at a time
  pdl_launch();
  pdl_wait();
  const int64_t index = blockIdx.x;  // row and head
  const int dim = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
  const int row = static_cast<int>(index / p.heads);
  const int head = static_cast<int>(index % p.heads);
  const int group = p.group_of[row];
  if (group < 0) return;  // zeros already
  const int before = static_cast<int>(p.groups[group].first_position);
  const int seen = first_seen(p, before, row - p.groups[group].first_row);
  const int group_split = first_seen(p, before, 0) / static_cast<int>(kKeySplit);
  // Cached splits of this row: numbers from … to - 1.
  const bool any = seen < before;
  const int from = any ? seen / static_cast<int>(kKeySplit) - group_split + 1 : 1;
  const int to = any ? (before - 1) / static_cast<int>(kKeySplit) - group_split + 2 : 1;

  const int64_t split_step = static_cast<int64_t>(p.rows) * p.heads;
  const float* part_o = p.part_o + index * kDim + dim;
  const SoftmaxState* part_state = p.part_state + index;
  // Every block of a row and head has a state of its own.
  SoftmaxState* run_state = p.run_state + index * 4 + blockIdx.y;
  float* run_o = p.run_o + index * kDim + dim;
  SoftmaxState state;
  float o;
  if (p.first_split == 0) {  // the block's own
    state = *part_state;
    o = *part_o;
  } else {
    state = *run_state;
    o = *run_o;
  }
  const int end = min(to - p.first_split, p.split_count);  // of them here
  for (int first = max(from - p.first_split, 0); first < end; first += kAhead) {
    SoftmaxState next_state[kAhead];
    float next_o[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t at = min(first + i, end - 1) * split_step;
      next_state[i] = part_state[at];
      next_o[i] = part_o[at * kDim];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= end) break;
      const FoldFactors f = fold_state(&state, next_state[i], p.factor);
      o = fold_value(o, next_o[i], f);
    }
  }
  if (!p.last_splits) {
    __syncthreads();  // all have read the state
    if (threadIdx.x == 0) *run_state = state;
    *run_o = o;
    return;
  }
  if (dim >= p.head_dim) return;
  const float value = finished_value(o, __fdiv_rn(1.0f, state.sum));
  p.out[row * p.out_stride + static_cast<int64_t>(head) * p.head_dim + dim] = __float2bfloat16_rn(value);
}

template <int kDim, bool kFp8, int kStages>
bool launch_stages(cudaStream_t stream, const BlockParams& p, dim3 grid, int warps) {
  const int bytes = BlockShape<kDim, kFp8, kStages>::shared_bytes(warps);
  auto kernel = block_kernel<kDim, kFp8, kStages>;
  return cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                 "attention of drafted blocks") &&
         launch_kernel(kernel, grid, dim3(static_cast<unsigned>(warps * 32)), static_cast<size_t>(bytes), stream,
                       "attention of drafted blocks", p);
}

template <int kDim, bool kFp8>
bool launch_block(cudaStream_t stream, const BlockParams& p, dim3 grid, int warps, int shared_limit) {
  const unsigned threads = kDim < 64 ? kDim : 64;
  const dim3 fold_grid(static_cast<unsigned>(p.rows) * static_cast<unsigned>(p.heads), kDim / threads);
  const auto splits = [&] {
    if constexpr (kDim > 128) {
      if (BlockShape<kDim, kFp8, 4>::shared_bytes(warps) > shared_limit) {
        return launch_stages<kDim, kFp8, 2>(stream, p, grid, warps);
      }
    }
    return launch_stages<kDim, kFp8, 4>(stream, p, grid, warps);
  };
  return splits() && launch_kernel(block_fold_kernel<kDim>, fold_grid, dim3(threads), 0, stream,
                                   "fold of splits of drafted blocks", p);
}

template <bool kFp8>
bool launch_dim(cudaStream_t stream, int dim, const BlockParams& p, dim3 grid, int warps, int shared_limit) {
  switch (dim) {
    case 32:
      return launch_block<32, kFp8>(stream, p, grid, warps, shared_limit);
    case 64:
      return launch_block<64, kFp8>(stream, p, grid, warps, shared_limit);
    case 128:
      return launch_block<128, kFp8>(stream, p, grid, warps, shared_limit);
    default:
      return launch_block<256, kFp8>(stream, p, grid, warps, shared_limit);
  }
}

// Devices of compute capability 8.9 and 12.x let a block have 99 KiB.
static_assert(BlockShape<128, false, 4>::shared_bytes(8) <= 99 * 1024);
static_assert(BlockShape<128, true, 4>::shared_bytes(8) <= 99 * 1024);
static_assert(BlockShape<256, false, 2>::shared_bytes(4) <= 99 * 1024);
static_assert(BlockShape<256, true, 2>::shared_bytes(4) <= 99 * 1024);

int most_warps(int dim, int shared_limit) {
  const bool eight = dim <= 128 || (BlockShape<256, false, 2>::shared_bytes(kMaxTileWarps) <= shared_limit &&
                                    BlockShape<256, true, 2>::shared_bytes(kMaxTileWarps) <= shared_limit);
  return eight ? kMaxTileWarps : kMaxTileWarps / 2;
}

/// Splits that a block can have keys in, its own included.
int64_t splits_of(const DeviceRows& rows, int64_t window) {
  const int64_t cached = (rows.max_keys + kKeySplit - 1) / kKeySplit;
  // window - 1 neighbouring keys touch no more than this many.
  return 1 + (window > 0 ? std::min(cached, (window - 2) / kKeySplit + 2) : cached);
}

const char* block_refusal(const PagedKvCache& cache, const CudaBlockAttentionArgs& args) {
  const int64_t width = cache.kv_heads() * cache.head_dim();
  if (args.k.cols != width || args.v.cols != width)
    return "attention of drafted blocks: keys or values of other shapes";
  if (!attention_aligned(args.k.data, args.k.stride, 4) || !attention_aligned(args.v.data, args.v.stride, 4)) {
    return "attention of drafted blocks: rows must begin at multiples of 16 bytes";
  }
  if (args.window != 0 && (args.window < kMostBlockRows || args.window > (int64_t{1} << 30))) {
    return "attention of drafted blocks: a window out of range";
  }
  return nullptr;
}

}  // namespace

int64_t cuda_block_attention_workspace(const DeviceRows& rows, int64_t heads, int64_t head_dim, int64_t window) {
  const int dim = padded_head_dim(head_dim);
  const int64_t states = rows.rows * heads;
  return states * (dim + 2) * splits_at_a_time(splits_of(rows, window), states, dim) + states * (dim + 8);
}

void cuda_block_attention(cudaStream_t stream, const CudaKvCache& kv_cache, int64_t layer, const DeviceRows& rows,
                          const CudaBlockAttentionArgs& args) {
  const PagedKvCache& cache = static_cast<const PagedKvCache&>(kv_cache);
  if (rows.rows <= 0) return;
  const char* wrong = attention_refusal(cache, layer, rows, args.common);
  if (wrong == nullptr) wrong = block_refusal(cache, args);
  if (wrong != nullptr) {
    cuda_ok(cudaErrorInvalidValue, wrong);
    return;
  }
  const int dim = cache.padded_dim();
  const AttentionLimits limits = attention_limits();
  BlockParams p = {};
  static_cast<AttentionParams&>(p) = attention_params(cache, layer, rows, args.common);
  p.k = args.k.data;
  p.v = args.v.data;
  p.k_stride = args.k.stride;
  p.v_stride = args.v.stride;
  p.window = static_cast<int>(args.window);
  // A tile is the queries of a whole block where they fit. Grids are for as many tiles as full blocks would give;
  // blocks of the grid go on to further tiles where there are more groups.
  const int64_t heads_per_kv = most_heads_per_kv(p);
  const int64_t queries = std::min<int64_t>(p.rows, kMostBlockRows) * heads_per_kv;
  const int warps = static_cast<int>(std::clamp<int64_t>((queries + 15) / 16, 1, most_warps(dim, limits.shared_bytes)));
  p.tile_queries = warps * 16;
  p.slots = static_cast<int>((p.rows * heads_per_kv + p.tile_queries - 1) / p.tile_queries);

  const int64_t states = static_cast<int64_t>(p.rows) * p.heads;
  const int splits = static_cast<int>(splits_of(rows, args.window));
  const int wave = splits_at_a_time(splits, states, dim);
  p.part_o = args.common.workspace;
  p.run_o = p.part_o + states * dim * wave;
  p.part_state = reinterpret_cast<SoftmaxState*>(p.run_o + states * dim);
  p.run_state = p.part_state + states * wave;
  for (p.first_split = 0; p.first_split < splits; p.first_split += wave) {
    p.split_count = std::min(wave, splits - p.first_split);
    p.last_splits = p.first_split + p.split_count == splits;
    const dim3 grid(static_cast<unsigned>(p.slots * p.kv_heads), static_cast<unsigned>(p.split_count));
    const bool launched = cache.fp8() ? launch_dim<true>(stream, dim, p, grid, warps, limits.shared_bytes)
                                      : launch_dim<false>(stream, dim, p, grid, warps, limits.shared_bytes);
    if (!launched) return;
  }
}

}  // namespace tensorfold
