// Attention for decode steps and verify windows: a block takes up to 96 queries of one key/value head, so that a key
// is read once for all of them, and its eight warps share the work within them: for the scores each warp has some
// queries and some keys, for the values the same queries and some dimensions. Weights pass through shared memory.
//
// Every number is what attention_tile.cu computes, in the same chains; only who computes it differs. Two forms:
// * Alone: a block takes one split, in rounds of 64 or 128 keys. The keys of the next round come while the values of
//   this one are used, the values while the scores are made.
// * In a cluster (dim / 64 blocks, one tile): its blocks share one split. Each makes the scores of its part of the keys
//   for all queries; they send each other their maxima, then their weights; each then has its part of the dimensions,
//   for all keys. A block has all it reads under way at once. For short contexts, where one block for each split leaves
//   most of the device idle.
// How the contract is kept: no sum is cut. A score is one chain over dims in one warp; maxima do not depend on the
// order in which they are taken; sums and accumulators walk all keys of the split, ascending, in one warp of one block,
// with the same rescaling before each block of 64 keys. The number of blocks, rounds or tiles is in none of this.
#pragma once

#include "kernels/cuda/attention_kernels.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/warp.cuh"

// Architectures without clusters do not know the attribute; no cluster is launched there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define TF_WINDOW_CLUSTER(blocks)
#else
#define TF_WINDOW_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#endif

namespace tensorfold {

inline constexpr int kWindowWarps = 8;
inline constexpr int kWindowThreads = kWindowWarps * 32;

/// kTiles: tiles of 16 queries. kCluster: blocks of a cluster.
template <int kDim, int kTiles, int kCluster>
struct WindowShape {
  static constexpr int kQueries = kTiles * 16;
  static constexpr int kOwnKeys = kCluster > 1 ? static_cast<int>(kKeySplit) / kCluster : kTiles > 3 ? 128 : 64;
  static constexpr int kQueryGroups = kTiles > 3 ? 2 : 1;
  static constexpr int kGroupTiles = kTiles / kQueryGroups;
  static constexpr int kParts = kWindowWarps / kQueryGroups;  // of the keys, and of the dimensions
  static constexpr int kWarpKeys = kOwnKeys / kParts;
  static constexpr int kKeyTiles = kWarpKeys / 8;
  static constexpr int kRound = kOwnKeys * kCluster;
  static constexpr int kRoundBlocks = kRound / kBlockKeys;
  static constexpr int kBlockDims = kDim / kCluster;
  static constexpr int kDimTiles = kBlockDims / kParts / 8;
  static constexpr int kBlockParts = kBlockKeys / kWarpKeys;  // warps that share the keys of one block of 64
  static_assert(kTiles % kQueryGroups == 0 && kBlockKeys % kWarpKeys == 0 && kBlockDims >= 64 && kDimTiles >= 1);
  static_assert(kDimTiles == 1 || kDimTiles % 2 == 0);

  static constexpr int kQueryBytes = kQueries * kDim * 2;
  static constexpr int kKeyBytes = kOwnKeys * kDim * 2;
  static constexpr int kValueBytes = kRound * kBlockDims * 2;
  static constexpr int kWeightRow = kRound * 2;
  static constexpr int kWeightBytes = kQueries * kWeightRow;
  static constexpr int kMaxRow = kRoundBlocks * kBlockParts + 1;  // floats of a query; odd: no bank conflicts
  // In a cluster weights take the place of queries and keys: all blocks are done with them when maxima are complete.
  static constexpr int kKeys = kQueryBytes;
  static constexpr int kWeights = kCluster > 1 ? 0 : kKeys + kKeyBytes;
  static constexpr int kFront = kCluster > 1 ? (kWeightBytes > kKeys + kKeyBytes ? kWeightBytes : kKeys + kKeyBytes)
                                             : kWeights + kWeightBytes;
  static constexpr int kValues = kFront;
  static constexpr int kMaxima = kValues + kValueBytes;
  static constexpr int kBases = kMaxima + kQueries * kMaxRow * 4;
  static constexpr int kRescales = kBases + kQueries * kRoundBlocks * 4;
  static constexpr int kStates = kRescales + kQueries * kRoundBlocks * 4;
  static constexpr int kShared = kStates + kQueries * 8;
  // Blocks that share a multiprocessor.
  static constexpr int kResident = kCluster > 1 || kTiles > 3 ? 1 : kTiles > 1 ? 2 : 3;

  // Copies: 16-byte pieces of memory a thread.
  static constexpr int kKeyPieces = kKeyBytes / 16 / kWindowThreads;
  static constexpr int kValuePieces = kValueBytes / 16 / kWindowThreads;
  static_assert(kKeyPieces >= 1 && kValuePieces >= 1);
};

template <int kDim, int kTiles, int kCluster>
__global__ void TF_WINDOW_CLUSTER(kCluster)
    __launch_bounds__(kWindowThreads, (WindowShape<kDim, kTiles, kCluster>::kResident))
        window_kernel(const __grid_constant__ AttentionParams p) {
  using Shape = WindowShape<kDim, kTiles, kCluster>;
  constexpr int kGroupTiles = Shape::kGroupTiles;
  constexpr int kKeyTiles = Shape::kKeyTiles;
  constexpr int kDimTiles = Shape::kDimTiles;
  extern __shared__ __align__(128) char shared[];
  pdl_launch();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int warp = uniform_warp();
  const int g = lane >> 2;
  const int t = lane & 3;
  const int group = warp / Shape::kParts;  // of queries
  const int part = warp % Shape::kParts;   // of keys, then of dimensions
  const int rank = kCluster > 1 ? cluster_rank() : 0;
  const int index = static_cast<int>(blockIdx.x) / kCluster;
  const int kv_head = index % p.kv_heads;
  const int slot = index / p.kv_heads;
  const int split = p.first_split + static_cast<int>(blockIdx.y);
  const uint32_t base_address = shared_address(shared);
  const uint32_t query_area = base_address;
  const uint32_t key_area = base_address + Shape::kKeys;
  const uint32_t weight_area = base_address + Shape::kWeights;
  const uint32_t value_area = base_address + Shape::kValues;
  float* const maxima = reinterpret_cast<float*>(shared + Shape::kMaxima);
  float* const bases = reinterpret_cast<float*>(shared + Shape::kBases);
  float* const rescales = reinterpret_cast<float*>(shared + Shape::kRescales);
  SoftmaxState* const states = reinterpret_cast<SoftmaxState*>(shared + Shape::kStates);

  // All blocks of a cluster have the same work, and leave here together or not at all.
  TileWork work;
  if (!find_tile(p, kv_head, slot, &work)) {
    pdl_wait();
    if (split == 0 && rank == 0) zero_padding(p, kv_head, slot);
    return;
  }
  const int first_block = split * kSplitBlocks;
  const int blocks = min(work.position(work.first + Shape::kQueries - 1) / kBlockKeys + 1 - first_block,
                         static_cast<int>(kSplitBlocks));
  if (blocks <= 0) {
    pdl_wait();
    return;
  }
  if constexpr (kCluster > 1) cluster_arrive();  // this block runs: others may write to its memory

  const int own_page = lane < blocks ? p.pages[work.first_page + first_block + lane] : 0;
  const auto token_of = [&](int block, int part_of_block) {  // first token of a key (0) or value (1) block of the split
    const int page = __shfl_sync(0xffffffffu, own_page, block);
    return (cache_block(page, p.kv_heads, kv_head) + part_of_block) * kBlockKeys;
  };
  const auto copy = [&](int64_t token, int piece, uint32_t to) {
    copy_async16(to, p.blocks + token * (kDim * 2) + piece * 16, true);
  };
  constexpr int kRowPieces = kDim * 2 / 16;
  constexpr int kSliceRow = Shape::kBlockDims * 2 / 16;
  static_assert(kWindowThreads / kRowPieces <= kBlockKeys && kWindowThreads / kSliceRow <= kBlockKeys);
  // The first block of 64 of this block's keys in a round.
  const auto own_first = [&](int round) { return round * Shape::kRoundBlocks + rank * (Shape::kOwnKeys / kBlockKeys); };
  // Blocks [from, end) of the split, as far as they belong to the round.
  const auto copy_keys = [&](int round, int from, int end) {
#pragma unroll
    for (int n = 0; n < Shape::kKeyPieces; ++n) {
      const int i = static_cast<int>(threadIdx.x) + n * kWindowThreads;
      const int token = i / kRowPieces;
      const int block = own_first(round) + n * kWindowThreads / kRowPieces / kBlockKeys;
      if (block >= from && block < end)
        copy(token_of(block, 0) + token % kBlockKeys, i % kRowPieces, key_area + i * 16);
    }
  };
  const auto copy_values = [&](int round, int from, int end) {
#pragma unroll
    for (int n = 0; n < Shape::kValuePieces; ++n) {
      const int i = static_cast<int>(threadIdx.x) + n * kWindowThreads;
      const int token = i / kSliceRow;
      const int block = round * Shape::kRoundBlocks + n * kWindowThreads / kSliceRow / kBlockKeys;
      if (block >= from && block < end) {
        copy(token_of(block, 1) + token % kBlockKeys, rank * kSliceRow + i % kSliceRow, value_area + i * 16);
      }
    }
  };
  const auto start_keys = [&](int round) {
    copy_keys(round, 0, blocks);
    copy_async_commit();
  };
  const auto start_values = [&](int round) {
    copy_values(round, 0, blocks);
    copy_async_commit();
  };

  {
    // Blocks that earlier passes filled come before what this pass's kernels have written; queries then at once.
    const int early = max(0, min(work.first_position / kBlockKeys - first_block, blocks));
    copy_keys(0, 0, early);
    pdl_wait();
    QueryPieces<kDim, Shape::kQueries*(kDim / 8) / kWindowThreads> queries;
    queries.load(p, work, Shape::kQueries, static_cast<int>(threadIdx.x));
    copy_keys(0, early, blocks);
    copy_async_commit();
    start_values(0);
    queries.store(Shape::kQueries, static_cast<int>(threadIdx.x), query_area);
  }
  if (split == 0 && rank == 0) zero_padding(p, kv_head, slot);

  int position[kGroupTiles][2];
#pragma unroll
  for (int m = 0; m < kGroupTiles; ++m) {
    const int query = work.first + (group * kGroupTiles + m) * 16 + g;
    position[m][0] = work.position(query);
    position[m][1] = work.position(query + 8);
  }
  const int first_visible = work.position(work.first);  // of the keys up to here no query has any masked
  const int row_of_lane = (lane & 7) + ((lane >> 3) & 1) * 8;
  const int unit_of_lane = lane >> 4;
  const int first_key = part * Shape::kWarpKeys;  // of this block's keys in a round
  const int first_tile_row = group * kGroupTiles * 16;

  float o[kGroupTiles][kDimTiles][4];
  float sums[kGroupTiles][4];
#pragma unroll
  for (int m = 0; m < kGroupTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[m][i] = 0.0f;
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.0f;
  }
  float running = kMinusInfinity;  // of query threadIdx.x

  const int rounds = (blocks + Shape::kRoundBlocks - 1) / Shape::kRoundBlocks;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    // Keys are here; what the round before read is free.
    if (round == 0) {
      copy_async_wait<1>();
      __syncthreads();
    } else {
      copy_async_wait<0>();
      __syncthreads();
      start_values(round);
    }

    float scores[kGroupTiles][kKeyTiles][4];
#pragma unroll
    for (int m = 0; m < kGroupTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        scores[m][n][0] = scores[m][n][1] = scores[m][n][2] = scores[m][n][3] = 0.0f;
      }
    }
    const int own_block = own_first(round) + first_key / kBlockKeys;  // of the split
    const bool has_keys = own_block < blocks;
    if (has_keys) {
      // Chains over dims in steps of 16, ascending.
#pragma unroll 2
      for (int k = 0; k < kDim / 32; ++k) {
        uint32_t a[2][kGroupTiles][4];
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
          for (int m = 0; m < kGroupTiles; ++m) {
            const int row = first_tile_row + m * 16 + row_of_lane;
            load_matrices(a[step][m], query_area + (row * (kDim / 8) +
                                                    swizzled_unit<kDim>(row_of_lane, 4 * k + 2 * step + unit_of_lane)) *
                                                       16);
          }
        }
        if constexpr (kKeyTiles == 1) {
          const int key = first_key + (lane & 7);
          uint32_t b[4];
          load_matrices(b, key_area + (key * (kDim / 8) + swizzled_unit<kDim>(key, 4 * k + (lane >> 3))) * 16);
#pragma unroll
          for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int m = 0; m < kGroupTiles; ++m) {
              mma_m16n8k16(scores[m][0], a[step][m], b[2 * step], b[2 * step + 1]);
            }
          }
        } else {
#pragma unroll
          for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int n = 0; n < kKeyTiles; n += 2) {
              const int key = first_key + n * 8 + (lane & 7) + (lane >> 4) * 8;
              uint32_t b[4];
              load_matrices(
                  b,
                  key_area + (key * (kDim / 8) + swizzled_unit<kDim>(key, 4 * k + 2 * step + ((lane >> 3) & 1))) * 16);
#pragma unroll
              for (int m = 0; m < kGroupTiles; ++m) {
                mma_m16n8k16(scores[m][n], a[step][m], b[0], b[1]);
                mma_m16n8k16(scores[m][n + 1], a[step][m], b[2], b[3]);
              }
            }
          }
        }
      }
      const int key = (first_block + own_block) * kBlockKeys + first_key % kBlockKeys + 2 * t;
      if ((first_block + own_block) * kBlockKeys + kBlockKeys - 1 > first_visible) {
#pragma unroll
        for (int m = 0; m < kGroupTiles; ++m) {
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if (key + n * 8 + (i & 1) > position[m][i >> 1]) scores[m][n][i] = kMinusInfinity;
            }
          }
        }
      }
    }
    if constexpr (kCluster > 1) cluster_wait();  // all run
    if (has_keys) {
      const int place =
          (own_block - round * Shape::kRoundBlocks) * Shape::kBlockParts + first_key % kBlockKeys / Shape::kWarpKeys;
#pragma unroll
      for (int m = 0; m < kGroupTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float largest = kMinusInfinity;
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
            largest = fmaxf(largest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
          }
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
          float* to = maxima + (first_tile_row + m * 16 + half * 8 + g) * Shape::kMaxRow + place;
          if constexpr (kCluster > 1) {
            if (t < kCluster) store_remote4(shared_address(to), t, __float_as_uint(largest));
          } else {
            if (t == 0) *to = largest;
          }
        }
      }
    }
    if constexpr (kCluster > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
      if (round + 1 < rounds) {
        start_keys(round + 1);
      } else {
        copy_async_commit();  // an empty group: the wait below counts groups
      }
    }
    const int here = min(blocks - round * Shape::kRoundBlocks, static_cast<int>(Shape::kRoundBlocks));
    if (threadIdx.x < Shape::kQueries) {
      const int query = static_cast<int>(threadIdx.x);
#pragma unroll
      for (int j = 0; j < Shape::kRoundBlocks; ++j) {
        if (j >= here) break;
        const float* from = maxima + query * Shape::kMaxRow + j * Shape::kBlockParts;
        float block_max = from[0];
#pragma unroll
        for (int i = 1; i < Shape::kBlockParts; ++i) block_max = fmaxf(block_max, from[i]);
        float rescale;
        bases[j * Shape::kQueries + query] = next_max(&running, block_max, p.factor, &rescale);
        rescales[j * Shape::kQueries + query] = rescale;
      }
    }
    __syncthreads();
    if (has_keys) {
      const int unit = rank * (Shape::kOwnKeys / 8) + first_key / 8;
      const float* base = bases + (own_block - round * Shape::kRoundBlocks) * Shape::kQueries + first_tile_row + g;
#pragma unroll
      for (int m = 0; m < kGroupTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first_tile_row + m * 16 + half * 8 + g;
          const float relative = base[m * 16 + half * 8];
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
            const uint32_t pair = pack_bf16(weight(scores[m][n][2 * half], relative, p.factor),
                                            weight(scores[m][n][2 * half + 1], relative, p.factor));
            const uint32_t to = weight_area + row * Shape::kWeightRow + swizzled_unit<64>(row, unit + n) * 16 + t * 4;
            if constexpr (kCluster > 1) {
#pragma unroll
              for (int r = 0; r < kCluster; ++r) store_remote4(to, r, pair);
            } else {
              store_shared4(to, pair);
            }
          }
        }
      }
    }
    if constexpr (kCluster > 1) {
      copy_async_wait<0>();
    } else {
      copy_async_wait<1>();
    }
    if constexpr (kCluster > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }

    // Chains over keys in steps of 16, ascending, with a rescaling before each block.
#pragma unroll 1
    for (int j = 0; j < here; ++j) {
      float rescale[kGroupTiles][2];
      bool changes = false;
#pragma unroll
      for (int m = 0; m < kGroupTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          rescale[m][half] = rescales[j * Shape::kQueries + first_tile_row + m * 16 + half * 8 + g];
          changes = changes || rescale[m][half] != 1.0f;
        }
      }
      if (__any_sync(0xffffffffu, changes)) {
#pragma unroll
        for (int m = 0; m < kGroupTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sums[m][i] = __fmul_rn(sums[m][i], rescale[m][i >> 1]);
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) o[m][n][i] = __fmul_rn(o[m][n][i], rescale[m][i >> 1]);
          }
        }
      }
      uint32_t pair[4];  // kDimTiles == 1: of two steps
#pragma unroll
      for (int k = 0; k < kBlockKeys / 16; ++k) {
        uint32_t a[kGroupTiles][4];
#pragma unroll
        for (int m = 0; m < kGroupTiles; ++m) {
          load_matrices(a[m], weight_area + (first_tile_row + m * 16 + row_of_lane) * Shape::kWeightRow +
                                  swizzled_unit<64>(row_of_lane, j * 8 + 2 * k + unit_of_lane) * 16);
          if (part == 0) mma_m16n8k16(sums[m], a[m], kBf16One, kBf16One);
        }
        const int first_unit = part * kDimTiles;
        if constexpr (kDimTiles == 1) {
          if (k % 2 == 0) {
            const int key = j * kBlockKeys + k * 16 + lane;  // four matrices of 8 keys
            load_matrices_transposed(
                pair, value_area + (key * (Shape::kBlockDims / 8) + swizzled_unit<64>(key, first_unit)) * 16);
          }
#pragma unroll
          for (int m = 0; m < kGroupTiles; ++m) mma_m16n8k16(o[m][0], a[m], pair[k % 2 * 2], pair[k % 2 * 2 + 1]);
        } else {
          const int key = j * kBlockKeys + k * 16 + row_of_lane;
#pragma unroll
          for (int n = 0; n < kDimTiles; n += 2) {
            uint32_t b[4];
            load_matrices_transposed(
                b, value_area +
                       (key * (Shape::kBlockDims / 8) + swizzled_unit<64>(key, first_unit + n + unit_of_lane)) * 16);
#pragma unroll
            for (int m = 0; m < kGroupTiles; ++m) {
              mma_m16n8k16(o[m][n], a[m], b[0], b[1]);
              mma_m16n8k16(o[m][n + 1], a[m], b[2], b[3]);
            }
          }
        }
      }
    }
  }

  if (threadIdx.x < Shape::kQueries) states[threadIdx.x].max = running;
  if (part == 0 && t == 0) {
#pragma unroll
    for (int m = 0; m < kGroupTiles; ++m) {
      states[first_tile_row + m * 16 + g].sum = sums[m][0];
      states[first_tile_row + m * 16 + 8 + g].sum = sums[m][2];
    }
  }
  __syncthreads();
  const int first_unit = rank * (Shape::kBlockDims / 8) + part * kDimTiles;
#pragma unroll
  for (int m = 0; m < kGroupTiles; ++m) {
    const int query = first_tile_row + m * 16;
    if (work.first + query >= work.count) break;
    const SoftmaxState state[2] = {states[query + g], states[query + 8 + g]};
    write_queries<kDim, kDimTiles>(p, work, work.first + query, split, first_unit, o[m], state, rank == 0 && part == 0);
  }
}

/// Shared memory of a block; dim 128 or 256, tiles 1, 3 or 6; clusters only with one tile.
constexpr int window_shared_bytes(int dim, int tiles, bool cluster) {
  if (dim == 128) {
    return cluster      ? WindowShape<128, 1, 2>::kShared
           : tiles == 1 ? WindowShape<128, 1, 1>::kShared
           : tiles == 3 ? WindowShape<128, 3, 1>::kShared
                        : WindowShape<128, 6, 1>::kShared;
  }
  return cluster      ? WindowShape<256, 1, 4>::kShared
         : tiles == 1 ? WindowShape<256, 1, 1>::kShared
         : tiles == 3 ? WindowShape<256, 3, 1>::kShared
                      : WindowShape<256, 6, 1>::kShared;
}

}  // namespace tensorfold
