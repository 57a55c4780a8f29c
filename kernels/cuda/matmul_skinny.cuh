// Products of 17 to 32 rows (of bf16 weights to 64), and of fewer where matmul_stream.cuh's kernel does not fit or is
// the slower one: each weight is read once, by one warp.
//
// A warp owns kTiles tiles of 16 weight rows for all of K and all rows of the pass; warps never meet. It keeps kDepth
// stages of 64 columns of its weights under way in registers: bytes in flight are what the read bandwidth needs, and
// the first of them are asked for before the kernels ahead have ended (weights do not depend on them).
//
// Contract: an output is mma.m16n8k16 chained over K ascending, from +0, in the order of columns that matmul_format.cuh
// gives; rows that there are not are zero columns of B, which no other column's bits depend on. kRowTiles, kTiles and
// kDepth change who does what when, never the chain of an output.
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_format.cuh"
#include "kernels/cuda/matmul_store.cuh"
#include "kernels/cuda/warp.cuh"

namespace tensorfold {

inline constexpr int kSkinnyWarps = 4;

/// kAhead: blocks of 32 columns that activations are loaded ahead.
template <CudaWeightKind kKind, int kSets, int kRowTiles, int kTiles, int kDepth, int kAhead, int kBlocksPerSm>
__global__ void __launch_bounds__(32 * kSkinnyWarps, kBlocksPerSm)
    skinny_matmul_kernel(const __grid_constant__ MatmulArgs args) {
  static_assert(2 * kDepth % kAhead == 0, "the activation ring must close with the weight ring");
  constexpr int kStage = stage_bytes(kKind, kSets);
  pdl_launch();
  const int lane = threadIdx.x % 32;
  // A block works on one view, so that all but the lane's own addresses is uniform.
  const MatmulView& view = args.views[view_of_block(args, blockIdx.x)];
  const int first_tile = ((blockIdx.x - view.first_block) * kSkinnyWarps + uniform_warp()) * kTiles;
  const int stages = view.stages;

  const uint8_t* weight[kTiles];
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    // Tiles that there are not are the last one again, not stored.
    weight[m] = view.weight + min(first_tile + m, view.tiles - 1) * view.tile_bytes;
  }
  WeightStage<kKind, kSets> ring[kDepth][kTiles];
#pragma unroll
  for (int i = 0; i < kDepth; ++i) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      ring[i][m] = {};
      ring[i][m].load(weight[m] + i * kStage, lane, i < stages);
    }
  }
  pdl_wait();

  // x_left: columns from the lane's own first one to K, less those done; none where the row is not there, whose zeros
  // then stay.
  const __nv_bfloat16* x = view.x + (lane / 4) * view.x_stride + 8 * (lane % 4);
  const int64_t row_tile = 8 * view.x_stride;
  int x_left[kRowTiles];
  uint4 x_ring[kAhead][kRowTiles];
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
    x_left[j] = 8 * j + lane / 4 < args.rows ? view.cols - 8 * (lane % 4) : 0;
#pragma unroll
    for (int b = 0; b < kAhead; ++b) {
      x_ring[b][j] = make_uint4(0, 0, 0, 0);
      load_rows16(x_ring[b][j], x + j * row_tile + 32 * b, 32 * b < x_left[j]);
    }
  }

  float acc[kTiles][kRowTiles][4] = {};
  // Only the last stage may end before its 64 columns: then what is in the ring from earlier blocks must not count.
  const auto clear_past_end = [&](int i) {
#pragma unroll
    for (int block = 2 * i; block < 2 * i + 2; ++block) {
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
        if (32 * block >= x_left[j]) x_ring[block % kAhead][j] = make_uint4(0, 0, 0, 0);
      }
    }
  };
  // The stage in ring[i]; asks for the one kDepth ahead and for the activations kAhead blocks ahead.
  const auto step = [&](int i, bool more) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int block = 2 * i + half;
      uint4(&xs)[kRowTiles] = x_ring[block % kAhead];
      Bf16x2 a[kTiles][2][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) ring[i][m].fragments(half, a[m]);
      if (half == 1) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) ring[i][m].load(weight[m] + (i + kDepth) * kStage, lane, more);
      }
#pragma unroll
      for (int k16 = 0; k16 < 2; ++k16) {
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
            mma_m16n8k16(acc[m][j], a[m][k16], k16 == 0 ? xs[j].x : xs[j].z, k16 == 0 ? xs[j].y : xs[j].w);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
        load_rows16(xs[j], x + j * row_tile + 32 * (block + kAhead), 32 * (block + kAhead) < x_left[j]);
      }
    }
  };

  // A branch after each stage: it keeps the assembler from gathering the loads of many stages in one place.
  int left = stages;
  if (left == 1) clear_past_end(0);
  while (true) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      step(i, left > kDepth);
      if (--left <= 1) {
        if (left == 0) goto done;
        if (i + 1 < kDepth) clear_past_end(i + 1);
      }
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) weight[m] += kDepth * kStage;
    x += kDepth * kStageColumns;
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) x_left[j] -= kDepth * kStageColumns;
    if (left == 1) clear_past_end(0);
  }
done:
  store_accumulators(view, args.epilogue, args.rows, first_tile, 0, lane, acc);
}

}  // namespace tensorfold
