// Products of more than 64 rows: tiles of 128 rows of the pass by 256 (or 128) weight rows, operands through shared
// memory.
//
// Eight warps, 4 over the weights and 2 over the rows; a warp's tile is 64 (or 32) weight rows by 64 rows of the pass.
// Stages of 64 columns come by cp.async, kStages of them in a ring: activations as they are, weights as they are
// packed, which is fragment order. A warp dequantises its own weights in registers while the products of the half stage
// before are under way, each fragment for 8 column tiles.
//
// Contract: the chain of an output is the skinny kernels': mma.m16n8k16 over K ascending from +0, the same operands at
// the same places. Rows that there are not and columns beyond K are zeros in shared memory.
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_format.cuh"
#include "kernels/cuda/matmul_store.cuh"

namespace tensorfold {

inline constexpr int kTileThreads = 256;
inline constexpr int kBlockRows = 128;  // rows of the pass a block has
inline constexpr int kWarpsDown = 4;    // over the weights

/// Byte, in a stage of activations in shared memory, of columns 8 chunk … + 7 of row `row`. Odd rows have their halves
/// swapped, so that the 8 lanes of a quarter warp (2 rows, 4 chunks) reach all banks.
__host__ __device__ constexpr int x_chunk_offset(int row, int chunk) {
  return row * 128 + (chunk ^ ((row & 1) << 2)) * 16;
}

/// Dynamic shared memory of the kernel.
constexpr int tile_shared_bytes(CudaWeightKind kind, int sets, int warp_tiles, int stages) {
  return stages * (kBlockRows * 128 + kWarpsDown * warp_tiles * stage_bytes(kind, sets));
}

template <CudaWeightKind kKind, int kSets, int kWarpTiles, int kStages>
__global__ void __launch_bounds__(kTileThreads, kWarpTiles == 2 ? 2 : 1)
    tile_matmul_kernel(const __grid_constant__ MatmulArgs args) {
  static_assert(kStages >= 3, "a stage is filled while the one before it and the one after it are in use");
  constexpr int kStage = stage_bytes(kKind, kSets);
  constexpr int kBlockTiles = kWarpsDown * kWarpTiles;
  constexpr int kCopyTiles = kBlockTiles / 8;  // weight tiles that a warp copies
  constexpr int kXBytes = kBlockRows * 128;
  constexpr int kSlot = kXBytes + kBlockTiles * kStage;
  constexpr int kPieces = kStage / 16;
  static_assert(kStage % 16 == 0);
  extern __shared__ __align__(128) uint8_t ring_memory[];

  pdl_launch();
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const MatmulView& view = args.views[view_of_block(args, blockIdx.x)];
  const int row_blocks = (args.rows + kBlockRows - 1) / kBlockRows;
  const int local = blockIdx.x - view.first_block;
  // Neighbouring blocks share weights: they are read from memory once and come from L2 for the other rows.
  const int first_row = local % row_blocks * kBlockRows;
  const int first_tile = local / row_blocks * kBlockTiles;
  const int stages = view.stages, never = args.never;
  const uint32_t ring = shared_address(ring_memory);

  // Copies into the ring, each call the next stage. Weights: a warp kCopyTiles tiles, 16 bytes a lane. Activations: a
  // thread chunk tid % 8 of rows tid / 8 + 32 i.
  const uint8_t* w_from[kCopyTiles];
#pragma unroll
  for (int c = 0; c < kCopyTiles; ++c) {
    const int tile = min(first_tile + warp * kCopyTiles + c, view.tiles - 1);
    w_from[c] = view.weight + tile * view.tile_bytes + lane * 16;
  }
  const uint32_t w_to = kXBytes + warp * kCopyTiles * kStage + lane * 16;
  int w_left = stages;
  const auto copy_weights = [&](uint32_t slot) {
#pragma unroll
    for (int c = 0; c < kCopyTiles; ++c) {
#pragma unroll
      for (int i = 0; i < kPieces; i += 32) {
        copy_async16_if(slot + w_to + c * kStage + i * 16, w_from[c] + i * 16, w_left > 0 && lane < kPieces - i);
      }
      w_from[c] += kStage;
    }
    --w_left;
  };
  const int x_rows_left = args.rows - first_row - tid / 8;
  int x_left = view.cols - tid % 8 * 8;
  const __nv_bfloat16* x_from = view.x + (first_row + tid / 8) * view.x_stride + tid % 8 * 8;
  const int64_t x_step = 32 * view.x_stride;
  const uint32_t x_to = x_chunk_offset(tid / 8, tid % 8);
  const auto copy_x = [&](uint32_t slot) {
#pragma unroll
    for (int i = 0; i < kBlockRows / 32; ++i) {
      copy_async16(slot + x_to + i * 32 * 128, x_from + i * x_step, x_left > 0 && 32 * i < x_rows_left);
    }
    x_from += kStageColumns;
    x_left -= kStageColumns;
  };

#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) copy_weights(ring + s * kSlot);
  pdl_wait();
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    copy_x(ring + s * kSlot);
    copy_async_commit();
  }

  const int warp_down = warp % kWarpsDown, warp_across = warp / kWarpsDown;
  const int g = lane / 4;
  const uint32_t my_tiles = kXBytes + warp_down * kWarpTiles * kStage;
  const uint32_t my_x[2] = {static_cast<uint32_t>(x_chunk_offset(warp_across * 64 + g, lane % 4)),
                            static_cast<uint32_t>(x_chunk_offset(warp_across * 64 + g, 4 + lane % 4))};
  Bf16x2 a[2][kWarpTiles][2][4];  // [half][tile][step]
  uint4 b[2][2];                  // [ring of 2][column tile of a pair]
  float acc[kWarpTiles][8][4] = {};

  copy_async_wait<kStages - 2>();
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kWarpTiles; ++m) {
    WeightStage<kKind, kSets>::shared_fragments(ring + my_tiles + m * kStage, 0, lane, a[0][m]);
  }
#pragma unroll
  for (int jj = 0; jj < 2; ++jj) b[0][jj] = load_shared16(ring + my_x[0] + jj * 1024);

  // Half stage `half` of `slot`; meanwhile the fragments of the half after it (in `next_slot`) are made.
  // Returns true never: the branches on it keep the assembler from gathering all dequantisation in one place and all
  // products in another, so that the matrix units work while other instructions issue.
  const auto half_stage = [&](int half, int s, uint32_t slot, uint32_t next_slot) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
#pragma unroll
      for (int jj = 0; jj < 2; ++jj) {
        b[(p + 1) % 2][jj] = p < 3 ? load_shared16(slot + my_x[half] + (2 * p + 2 + jj) * 1024)
                                   : load_shared16(next_slot + my_x[1 - half] + jj * 1024);
      }
#pragma unroll
      for (int k16 = 0; k16 < 2; ++k16) {
#pragma unroll
        for (int jj = 0; jj < 2; ++jj) {
          const uint4 x = b[p % 2][jj];
#pragma unroll
          for (int m = 0; m < kWarpTiles; ++m) {
            mma_m16n8k16(acc[m][2 * p + jj], a[half][m][k16], k16 == 0 ? x.x : x.z, k16 == 0 ? x.y : x.w);
          }
        }
      }
      if (p < kWarpTiles) {
        WeightStage<kKind, kSets>::shared_fragments(next_slot + my_tiles + p * kStage, 1 - half, lane, a[1 - half][p]);
      }
      if (s + p + 4 * half == never) return true;
    }
    return false;
  };

  uint32_t slot = ring, next_slot = ring + kSlot, free_slot = ring + (kStages - 1) * kSlot;
  for (int s = 0; s < stages; ++s) {
    if (half_stage(0, s, slot, slot)) break;
    // Stage s + 1 is there for all threads, and nobody reads stage s - 1 any more: its place takes stage s + kStages
    // - 1.
    copy_async_wait<kStages - 3>();
    __syncthreads();
    copy_weights(free_slot);
    copy_x(free_slot);
    copy_async_commit();
    // After the last stage this makes fragments of what is left in the ring; nothing uses them.
    if (half_stage(1, s, slot, next_slot)) break;
    free_slot = slot;
    slot = next_slot;
    next_slot = next_slot == ring + (kStages - 1) * kSlot ? ring : next_slot + kSlot;
  }

  store_accumulators(view, args.epilogue, args.rows, first_tile + warp_down * kWarpTiles, first_row + warp_across * 64,
                     lane, acc);
}

}  // namespace tensorfold
