// Products of experts for many rows: a block has a chunk of up to 64 of an expert's pairs and 16 * kTiles *
// kExpertWarps weight rows, operands through shared memory.
//
// Stages of 64 columns come by cp.async, kStages of them in a ring, and do not stop at the ends of segments (the slices
// of down, of three stages or so each). Rows' activations come once a block, gathered through the list of pairs; a warp
// brings its own tiles of weights. Several blocks a multiprocessor: one stores while another multiplies.
//
// Contract: the chain of an output is that of every product, mma.m16n8k16 over K ascending from +0, the same operands
// at the same places. Columns beyond K are zeros in shared memory; rows that there are not are whatever lay there, and
// are not stored.
#pragma once

#include <atomic>

#include "kernels/cuda/experts_work.cuh"
#include "kernels/cuda/matmul_tile.cuh"

namespace tensorfold {

/// Byte, in a stage of activations in shared memory, of columns 8 chunk … + 7 of row `row`. Odd rows have their halves
/// swapped, so that the 8 lanes of a quarter warp (2 rows, 4 chunks) reach all banks.
__host__ __device__ constexpr int x_chunk_offset(int row, int chunk) {
  return row * 128 + (chunk ^ ((row & 1) << 2)) * 16;
}

template <int kTiles_, int kStages_, int kBlocksPerSm_>
struct ExpertTileShape {
  static constexpr int kTiles = kTiles_, kStages = kStages_, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kRowTiles = 8, kRows = 8 * kRowTiles, kXBytes = kRows * 2 * kStageColumns;
  __host__ __device__ static constexpr int slot_bytes(CudaWeightKind kind, int sets) {
    return kXBytes + kExpertWarps * kTiles * stage_bytes(kind, sets);
  }
  __host__ __device__ static constexpr int shared_bytes(CudaWeightKind kind, int sets) {
    return kStages * slot_bytes(kind, sets);
  }
};

template <CudaWeightKind kKind, int kSets, typename Shape>
__global__ void __launch_bounds__(32 * kExpertWarps, Shape::kBlocksPerSm)
    expert_tile_kernel(const __grid_constant__ ExpertProductArgs args) {
  constexpr int kStage = stage_bytes(kKind, kSets), kPieces = kStage / 16;
  constexpr int kTiles = Shape::kTiles, kRowTiles = Shape::kRowTiles, kStages = Shape::kStages;
  constexpr int kSlot = Shape::slot_bytes(kKind, kSets);
  constexpr int kXStep = 32 * kExpertWarps / 8;  // rows that the block's threads copy a piece of each at once
  constexpr int kXCopies = Shape::kRows / kXStep;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ ExpertWork<Shape::kRows> work;
  pdl_launch();
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  ask_table(args);
  pdl_wait();
  if (warp == 0) find_chunk(args, ExpertFormat{kKind, kSets}, work, lane);
  __syncthreads();
  const int count = work.segment_count, rows = work.rows;
  const int block_tile = static_cast<int>(blockIdx.x) * kExpertWarps * kTiles;
  if (count == 0 || block_tile >= work.segments[0].tiles) return;
  const int first_tile = block_tile + warp * kTiles;

  const __nv_bfloat16* x_from[kXCopies];
#pragma unroll
  for (int i = 0; i < kXCopies; ++i) {
    const int pair = work.pair_of[min(tid / 8 + i * kXStep, rows - 1)];
    x_from[i] = args.x + (args.inner ? pair / args.slots : pair) * args.x_stride + 8 * (tid % 8);
  }
  const uint32_t ring = shared_address(memory);
  const uint32_t x_to = ring + x_chunk_offset(tid / 8, tid % 8);
  const uint32_t w_to = ring + Shape::kXBytes + warp * kTiles * kStage + 16 * lane;

  // The copying end of the ring; every call ends a group of copies, also where nothing is left to copy.
  int copy_segment = 0, copy_left = 0, x_left = 0;
  int64_t x_column = 0;
  const uint8_t* w_from[kTiles] = {};
  const auto copy_next = [&](int slot) {
    if (copy_left == 0 && copy_segment < count) {
      const ExpertSegment& s = work.segments[copy_segment++];
      copy_left = s.stages;
      x_left = s.cols - 8 * (tid % 8);
      x_column = s.x_at;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        // Tiles that there are not are the last one again, not stored.
        w_from[m] = s.data + static_cast<int64_t>(min(first_tile + m, s.tiles - 1)) * s.tile_bytes + 16 * lane;
      }
    }
    if (copy_left > 0) {
      --copy_left;
#pragma unroll
      for (int i = 0; i < kXCopies; ++i) {
        if (tid / 8 + i * kXStep < rows) {
          copy_async16(x_to + slot * kSlot + i * kXStep * 128, x_from[i] + x_column, x_left > 0);
        }
      }
      x_left -= kStageColumns;
      x_column += kStageColumns;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int p = 0; p < kPieces; p += 32) {
          copy_async16_if(w_to + slot * kSlot + m * kStage + p * 16, w_from[m] + p * 16, lane < kPieces - p);
        }
        w_from[m] += kStage;
      }
    }
    copy_async_commit();
  };
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) copy_next(s);

  const uint32_t my_x[2] = {static_cast<uint32_t>(x_chunk_offset(lane / 4, lane % 4)),
                            static_cast<uint32_t>(x_chunk_offset(lane / 4, 4 + lane % 4))};
  const uint32_t my_tiles = Shape::kXBytes + warp * kTiles * kStage;
  int slot = 0;
#pragma unroll 1
  for (int s = 0; s < count; ++s) {
    float acc[kTiles][kRowTiles][4] = {};
#pragma unroll 1
    for (int left = work.segments[s].stages; left > 0; --left) {
      copy_async_wait<kStages - 2>();
      __syncthreads();  // the stage is there for all; the one before it has been read by all
      copy_next(slot == 0 ? kStages - 1 : slot - 1);
      const uint32_t at = ring + slot * kSlot;
      WeightStage<kKind, kSets> w[kTiles];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) w[m].load_shared(at + my_tiles + m * kStage, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 b[kRowTiles];
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) b[j] = load_shared16(at + my_x[half] + j * 1024);
        Bf16x2 a[kTiles][2][4];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) w[m].fragments(half, a[m]);
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) {
          if (j > 0 && 8 * j >= rows) continue;
#pragma unroll
          for (int m = 0; m < kTiles; ++m) mma_m16n8k16(acc[m][j], a[m][0], b[j].x, b[j].y);
#pragma unroll
          for (int m = 0; m < kTiles; ++m) mma_m16n8k16(acc[m][j], a[m][1], b[j].z, b[j].w);
        }
      }
      if (++slot == kStages) slot = 0;
    }
    store_expert<Shape::kRows>(args, work, work.segments[s], first_tile, lane, acc);
  }
  copy_async_wait<0>();
}

template <CudaWeightKind kKind, int kSets, typename Shape>
bool launch_expert_tiles(const ExpertProductArgs& args, const ExpertGrid& grid, cudaStream_t stream) {
  constexpr int kShared = Shape::shared_bytes(kKind, kSets);
  static_assert(kShared <= 90 * 1024, "a block has at most 99 KiB on the smallest GPUs, the list of its work included");
  const auto kernel = expert_tile_kernel<kKind, kSets, Shape>;
  static std::atomic<uint64_t> allowed{0};  // a bit a device
  if (!allow_shared(kernel, kShared, allowed)) return false;
  constexpr int kBlockTiles = kExpertWarps * Shape::kTiles;
  const dim3 blocks(static_cast<unsigned>((args.tiles + kBlockTiles - 1) / kBlockTiles),
                    static_cast<unsigned>(grid.pairs));
  return launch_kernel(kernel, blocks, dim3(32 * kExpertWarps), kShared, stream, "experts", args);
}

}  // namespace tensorfold
