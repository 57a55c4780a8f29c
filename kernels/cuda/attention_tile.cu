// Attention for tiles of many queries: each warp has 16 queries and all keys, as in FlashAttention-2 (Dao, 2023): the
// accumulators of Q K^T are, rounded to bf16, the operand of P V without leaving the registers. A block walks one
// split, or all splits of its tile, with the same arithmetic (attention.cu says which).
#include "kernels/cuda/attention_ring.cuh"
#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/warp.cuh"

namespace tensorfold {
namespace {

/// kPaired: room for two key blocks and two value blocks; otherwise for one of each, on devices with little shared
/// memory.
template <int kDim, bool kFp8, bool kPaired>
struct TileShape {
  static constexpr int kQueryBytes = 16 * kDim * 2;  // of one warp
  static constexpr bool kQueriesInRegisters = kDim <= 128;
  static constexpr bool kFoldInRegisters = kDim <= 128;
  static constexpr int shared_bytes(int warps) {
    return warps * kQueryBytes + BlockRingShape<kDim, kFp8, kPaired>::kBytes;
  }
};

/// The running accumulators of a tile over splits: in registers, or in this thread's part of the block's scratch.
template <int kDim, bool kInRegisters>
struct Fold {
  static constexpr int kTiles = kDim / 8;
  float run[kInRegisters ? kTiles : 1][4];
  SoftmaxState state[2];
  float* scratch;

  __device__ __forceinline__ float4 load(int t) const {
    if constexpr (kInRegisters) {
      return make_float4(run[t][0], run[t][1], run[t][2], run[t][3]);
    } else {
      return *reinterpret_cast<const float4*>(scratch + t * (kMaxTileWarps * 32 * 4));
    }
  }
  __device__ __forceinline__ void store(int t, float4 v) {
    if constexpr (kInRegisters) {
      run[t][0] = v.x, run[t][1] = v.y, run[t][2] = v.z, run[t][3] = v.w;
    } else {
      *reinterpret_cast<float4*>(scratch + t * (kMaxTileWarps * 32 * 4)) = v;
    }
  }

  /// Joins a split's state; afterwards o and split are those of a split not begun, or, at the last one, the result.
  __device__ __forceinline__ void join(bool first, bool last, float (&o)[kTiles][4], SoftmaxState (&split)[2],
                                       float factor) {
    FoldFactors f[2] = {{0.0f, 1.0f}, {0.0f, 1.0f}};
    if (first) {
      state[0] = split[0];
      state[1] = split[1];
    } else {
      f[0] = fold_state(&state[0], split[0], factor);
      f[1] = fold_state(&state[1], split[1], factor);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (!first) {
        const float4 before = load(t);
        o[t][0] = fold_value(before.x, o[t][0], f[0]);
        o[t][1] = fold_value(before.y, o[t][1], f[0]);
        o[t][2] = fold_value(before.z, o[t][2], f[1]);
        o[t][3] = fold_value(before.w, o[t][3], f[1]);
      }
      if (!last) {
        store(t, make_float4(o[t][0], o[t][1], o[t][2], o[t][3]));
        o[t][0] = o[t][1] = o[t][2] = o[t][3] = 0.0f;
      }
    }
    if (last) {
      split[0] = state[0];
      split[1] = state[1];
    } else {
      split[0] = split[1] = {kMinusInfinity, 0.0f};
    }
  }
};

template <int kDim, bool kFp8, bool kPaired>
__global__ void __launch_bounds__(kMaxTileWarps * 32, 1) tile_kernel(const __grid_constant__ AttentionParams p) {
  using Shape = TileShape<kDim, kFp8, kPaired>;
  extern __shared__ __align__(128) char shared[];
  pdl_launch();
  pdl_wait();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int warp = uniform_warp();
  const uint32_t query_base = shared_address(shared);
  const uint32_t query_tile = query_base + warp * Shape::kQueryBytes;
  // ldmatrix: lane's row of matrices (rows 0-7, 8-15; units 0, 1) in the order that a query or value operand needs,
  // and in that of keys.
  const LaneAddresses<kDim> row_lanes((lane & 7) + ((lane >> 3) & 1) * 8, lane >> 4);
  const LaneAddresses<kDim> key_lanes((lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
  BlockRing<kDim, kFp8, kPaired> ring(p, query_base + static_cast<uint32_t>(blockDim.x >> 5) * Shape::kQueryBytes);

  for (int index = static_cast<int>(blockIdx.x); index < p.works; index += static_cast<int>(gridDim.x)) {
    const int kv_head = index % p.kv_heads;
    const int slot = p.slots - 1 - index / p.kv_heads;  // the longest contexts of a prompt first
    const int split = p.first_split + static_cast<int>(blockIdx.y);
    if (split == 0) zero_padding(p, kv_head, slot);
    TileWork work;
    if (!find_tile(p, kv_head, slot, &work)) continue;
    const int first_block = p.whole ? 0 : split * kSplitBlocks;
    int end_block = work.position(work.first + p.tile_queries - 1) / kBlockKeys + 1;
    if (!p.whole) end_block = min(end_block, first_block + kSplitBlocks);
    if (first_block >= end_block) continue;

    const int query = work.first + warp * 16;
    const bool active = query < work.count;
    const int warp_first = work.position(query);
    const int warp_last = work.position(query + 15);
    const int own_position[2] = {work.position(query + (lane >> 2)), work.position(query + (lane >> 2) + 8)};

    ring.begin(kv_head, p.pages + work.first_page, first_block, end_block);
    load_queries<kDim>(p, work, p.tile_queries, query_base);
    __syncthreads();
    uint32_t queries[Shape::kQueriesInRegisters ? kDim / 16 : 1][4];
    if constexpr (Shape::kQueriesInRegisters) {
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) load_matrices(queries[k], query_tile + row_lanes.step(k));
    }

    float o[kDim / 8][4];
#pragma unroll
    for (int t = 0; t < kDim / 8; ++t) o[t][0] = o[t][1] = o[t][2] = o[t][3] = 0.0f;
    SoftmaxState state[2] = {{kMinusInfinity, 0.0f}, {kMinusInfinity, 0.0f}};
    Fold<kDim, Shape::kFoldInRegisters> fold;
    fold.scratch = p.scratch + (static_cast<int64_t>(blockIdx.x) * (kDim / 8) * (kMaxTileWarps * 32) + threadIdx.x) * 4;

    for (int block = first_block; block < end_block; ++block) {
      // A block that all queries of a warp have masked would change no bit.
      const bool visible = active && block * kBlockKeys <= warp_last;
      float scores[8][4];
      const uint32_t keys = ring.keys(block);
      if (visible) {
        score_block<kDim, Shape::kQueriesInRegisters>(scores, queries, query_tile, row_lanes, keys, key_lanes);
        if (block * kBlockKeys + kBlockKeys - 1 > warp_first) {
#pragma unroll
          for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int key = block * kBlockKeys + n * 8 + 2 * (lane & 3) + (i & 1);
              if (key > own_position[i >> 1]) scores[n][i] = kMinusInfinity;
            }
          }
        }
      }
      ring.done_with_keys();
      if (visible) {
        float rescale[2];
        softmax_block(scores, state, p.factor, rescale);
        rescale_sums(state, o, rescale);
      }
      ring.refill(block);
      const uint32_t values = ring.values();
      if (visible) value_block<kDim>(scores, o, state, values, row_lanes);
      ring.done_with_values();
      const bool last = block + 1 == end_block;
      if (p.whole && (last || block % kSplitBlocks == kSplitBlocks - 1)) {
        fold.join(block < kSplitBlocks, last, o, state, p.factor);
      }
    }
    if (active) write_queries<kDim, kDim / 8>(p, work, query, split, 0, o, state, true);
  }
}

template <int kDim, bool kFp8, bool kPaired>
bool launch(cudaStream_t stream, const AttentionParams& p, dim3 grid, int warps) {
  const int bytes = TileShape<kDim, kFp8, kPaired>::shared_bytes(warps);
  auto kernel = tile_kernel<kDim, kFp8, kPaired>;
  return cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "attention tiles") &&
         launch_kernel(kernel, grid, dim3(static_cast<unsigned>(warps * 32)), static_cast<size_t>(bytes), stream,
                       "attention tiles", p);
}

constexpr bool pairs_fit(int dim, int shared_limit) {
  return dim <= 128 || (TileShape<256, false, true>::shared_bytes(kMaxTileWarps) <= shared_limit &&
                        TileShape<256, true, true>::shared_bytes(kMaxTileWarps) <= shared_limit);
}

template <bool kFp8>
bool launch_dim(cudaStream_t stream, int dim, const AttentionParams& p, dim3 grid, int warps, int shared_limit) {
  switch (dim) {
    case 32:
      return launch<32, kFp8, true>(stream, p, grid, warps);
    case 64:
      return launch<64, kFp8, true>(stream, p, grid, warps);
    case 128:
      return launch<128, kFp8, true>(stream, p, grid, warps);
    default:
      return pairs_fit(dim, shared_limit) ? launch<256, kFp8, true>(stream, p, grid, warps)
                                          : launch<256, kFp8, false>(stream, p, grid, warps);
  }
}

// Devices of compute capability 8.9 and 12.x let a block have 99 KiB.
static_assert(TileShape<128, false, true>::shared_bytes(8) <= 99 * 1024);
static_assert(TileShape<128, true, true>::shared_bytes(8) <= 99 * 1024);
static_assert(TileShape<256, false, false>::shared_bytes(4) <= 99 * 1024);
static_assert(TileShape<256, true, false>::shared_bytes(4) <= 99 * 1024);

}  // namespace

int attention_tile_max_warps(int dim, int shared_limit) {
  return pairs_fit(dim, shared_limit) ? kMaxTileWarps : kMaxTileWarps / 2;
}

bool launch_attention_tile(cudaStream_t stream, int dim, bool fp8, const AttentionParams& p, dim3 grid, int warps,
                           int shared_limit) {
  return fp8 ? launch_dim<true>(stream, dim, p, grid, warps, shared_limit)
             : launch_dim<false>(stream, dim, p, grid, warps, shared_limit);
}

}  // namespace tensorfold
