// Products of 1 to 16 rows: a pass is as fast as the weights can be read.
//
// One block a multiprocessor, all of it on one view. Each warp takes one or two tiles of 16 weight rows at a time, for
// all of K and all rows of the pass; two tiles share the activations that are loaded for them. Both operands come and
// go through shared memory. Weights: each warp has a ring of slots that it keeps full by asynchronous copies, across
// the ends of tiles; copies wait in barriers, of which there are as many as slots, while loads to registers wait in the
// warp's six scoreboards, which bounds how many can be told apart. The ring is filled before the kernels ahead have
// ended (weights do not depend on them). Activations: windows that all warps of the block share, brought by one more
// warp; a window's slot is filled again when every warp has said that it is done with it. So warps may run apart by a
// few windows, and shared memory holds no more than that of the activations, however long K is: what 16 rows of 5,120
// columns take whole (164 KB), the rings need.
//
// A multiprocessor's warps run on four schedulers, warp w on w % 4. Tiles are dealt out by scheduler, so that none has
// more than one tile more than the others.
//
// Contract: an output is mma.m16n8k16 chained over K ascending, from +0, in the order of columns that matmul_format.cuh
// gives; lanes of rows that there are not take the last row's values, in columns of B which no other column's bits
// depend on and which are not stored.
#pragma once

#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_format.cuh"
#include "kernels/cuda/matmul_store.cuh"
#include "kernels/cuda/matmul_stream_shape.h"
#include "kernels/cuda/mbarrier.cuh"
#include "kernels/cuda/warp.cuh"

namespace tensorfold {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr int kCopyArrivals = 1;
#else
inline constexpr int kCopyArrivals = 32;
#endif

/// Brings the windows of all turns, by a warp. Columns beyond K are zeros: what lies there in x must not count.
template <int kUnit>
__device__ __forceinline__ void bring_windows(const MatmulArgs& args, const StreamShape& shape, const MatmulView& view,
                                              int tiles, uint32_t slots, uint32_t full, uint32_t empty, int lane) {
  constexpr int kStride = stream_x_stride(kUnit);
  int slot = 0;
  uint32_t parity = 1;  // the first round's slots are empty
#pragma unroll 1
  for (int begin = 0; begin < tiles; begin += shape.turn) {
#pragma unroll 1
    for (int stage = 0; stage < view.stages; stage += kUnit) {
      const int cols = min(view.cols - stage * kStageColumns, kUnit * kStageColumns);
      const int padded = min(view.stages - stage, kUnit) * kStageColumns;
      const uint32_t at = slots + slot * args.rows * kStride;
      const __nv_bfloat16* from = view.x + stage * kStageColumns;
      mbarrier_wait(empty + 8 * slot, parity);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      const int zeros = (padded - cols) / 8;
      for (int i = lane; i < args.rows * zeros; i += 32) {
        store_shared16(at + i / zeros * kStride + 2 * cols + 16 * (i % zeros), make_uint4(0, 0, 0, 0));
      }
      if (zeros > 0) mbarrier_init_done();  // a later window's copy may come where they are: behind them
      // Each lane arrives for the zeros that it wrote.
      if (lane == 0) {
        mbarrier_expect(full + 8 * slot, static_cast<uint32_t>(args.rows * cols * 2));
      } else {
        mbarrier_arrive(full + 8 * slot);
      }
      __syncwarp();
      for (int row = lane; row < args.rows; row += 32) {
        copy_bulk_more(at + row * kStride, from + row * view.x_stride, static_cast<uint32_t>(cols * 2),
                       full + 8 * slot);
      }
#else
      for (int i = lane; i < args.rows * padded / 8; i += 32) {
        const int row = i / (padded / 8);
        const int piece = i % (padded / 8);
        copy_async16(at + row * kStride + 16 * piece, from + row * view.x_stride + 8 * piece, 8 * piece < cols);
      }
      mbarrier_arrive_after_copies(full + 8 * slot);
#endif
      if (++slot == shape.x_slots) slot = 0, parity ^= 1;
    }
  }
  copy_async_commit();  // none is left behind
  copy_async_wait<0>();
}

/// kUnit: stages of a slot and of a window, written out one after the other. kEach: tiles of a warp at a time.
template <CudaWeightKind kKind, int kSets, int kRowTiles, int kUnit, int kEach>
__global__ void __launch_bounds__(32 * (stream_most_warps(kEach) + 1), 1)
    stream_matmul_kernel(const __grid_constant__ MatmulArgs args, const __grid_constant__ StreamShape shape) {
  constexpr int kStage = stage_bytes(kKind, kSets);
  constexpr int kSecond = kUnit * kStage;  // from a slot's first tile to its other
  constexpr int kStride = stream_x_stride(kUnit);
  static_assert(kUnit % 2 == 0);
  extern __shared__ __align__(128) uint8_t shared[];
  pdl_launch();
  const int lane = threadIdx.x % 32;
  const int warp = uniform_warp();  // so that what is the warp's alone needs no registers of its lanes
  const MatmulView& view = args.views[view_of_block(args, blockIdx.x)];
  const int stages = view.stages;
  const StreamWork<kEach> work(view, static_cast<int>(blockIdx.x), warp);
  constexpr int kSlot = kEach * kSecond;
  uint32_t x_full = shared_address(shared);
  asm volatile("" : "+r"(x_full));  // opaque, so that it is not computed again and again
  const uint32_t x_empty = x_full + 8 * shape.x_slots;
  const uint32_t x_ring = x_full + shape.x_at;
  const bool multiplies = warp < shape.warps;
  uint32_t full = x_full + 8 * (2 * shape.x_slots + warp * shape.slots);
  uint32_t ring = x_full + shape.ring_at + warp * shape.slots * kSlot;
  asm volatile("" : "+r"(full), "+r"(ring));

  // The copying end of the ring: the turn, where its next stage is, its stages left (0 after the last turn) and tiles.
  int copy_begin = 0;
  const uint8_t* copy_from = nullptr;
  int copy_left = 0;
  int copy_tiles = 0;
  const auto locate = [&] {
    if (copy_begin >= work.tiles) return;
    copy_tiles = work.count(shape, copy_begin);
    if (copy_tiles == 0) return;  // nor later: only the last turn is short
    copy_from = view.weight + (work.first + copy_begin + work.lead) * view.tile_bytes;
    copy_left = stages;
  };
  const auto fill = [&](uint32_t to, uint32_t barrier) {
    if (copy_left == 0) return;
    const int bytes = min(kUnit, copy_left) * kStage;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (elect_lane()) {
      const bool pair = kEach == 2 && copy_tiles == 2;
      mbarrier_expect(barrier, static_cast<uint32_t>(pair ? 2 * bytes : bytes));
      copy_bulk_more(to, copy_from, static_cast<uint32_t>(bytes), barrier);
      if (pair) {
        copy_bulk_more(to + kSecond, copy_from + kSchedulers * view.tile_bytes, static_cast<uint32_t>(bytes), barrier);
      }
    }
#else
    for (int at = 16 * lane; at < bytes; at += 16 * 32) {
      copy_async16(to + at, copy_from + at, true);
      if (kEach == 2 && copy_tiles == 2) {
        copy_async16(to + kSecond + at, copy_from + kSchedulers * view.tile_bytes + at, true);
      }
    }
    mbarrier_arrive_after_copies(barrier);
#endif
    copy_from += bytes;
    copy_left -= kUnit;
    if (copy_left <= 0) {
      copy_left = 0;
      copy_begin += shape.turn;
      locate();
    }
  };
  if (multiplies) {
    if (lane == 0) {
#pragma unroll 1
      for (int i = 0; i < shape.slots; ++i) mbarrier_init(full + 8 * i, kCopyArrivals);
      mbarrier_init_done();
    }
    __syncwarp();
    locate();
#pragma unroll 1
    for (int i = 0; i < shape.slots; ++i) fill(ring + i * kSlot, full + 8 * i);
  } else if (lane < shape.x_slots) {
    mbarrier_init(x_full + 8 * lane, 32);
    mbarrier_init(x_empty + 8 * lane, shape.warps);
    mbarrier_init_done();
  }
  __syncthreads();
  pdl_wait();
  if (!multiplies) {
    mbarrier_init_done();  // what earlier kernels wrote, for the copies too
    bring_windows<kUnit>(args, shape, view, work.tiles, x_ring, x_full, x_empty, lane);
    return;
  }

  const int x_slot_bytes = args.rows * kStride;
  uint32_t x_rows[kRowTiles];
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) x_rows[j] = min(8 * j + lane / 4, args.rows - 1) * kStride + 16 * (lane % 4);
  int slot = 0, x_slot = 0;
  uint32_t parity = 0, x_parity = 0;
  // After a slot's or a window's last stage: on to the next one. A slot is filled again, a window given back.
  const auto next_slot = [&] {
    fill(ring + slot * kSlot, full + 8 * slot);
    if (++slot == shape.slots) slot = 0, parity ^= 1;
  };
  const auto next_window = [&] {
    if (lane == 0) mbarrier_arrive(x_empty + 8 * x_slot);
    if (++x_slot == shape.x_slots) x_slot = 0, x_parity ^= 1;
  };

  const auto multiply_tiles = [&](auto tile_count, int tile) {
    constexpr int kTiles = decltype(tile_count)::value;
    float acc[kTiles][kRowTiles][4] = {};
    // The stage at hand in [0] or [1], the next one in the other.
    WeightStage<kKind, kSets> weights[2][kTiles];
    uint4 b[2][2][kRowTiles];  // [stage][half]
    const auto load = [&](int to, uint32_t from, uint32_t x) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) weights[to][m].load_shared(from + m * kSecond, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) b[to][half][j] = load_shared16(x + x_rows[j] + 64 * half);
      }
    };
    const auto multiply = [&](int which) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Bf16x2 a[kTiles][2][4];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) weights[which][m].fragments(half, a[m]);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
#pragma unroll
            for (int j = 0; j < kRowTiles; ++j) {
              const uint4 x = b[which][half][j];
              mma_m16n8k16(acc[m][j], a[m][step], step == 0 ? x.x : x.z, step == 0 ? x.y : x.w);
            }
          }
        }
      }
    };

    uint32_t at = ring + slot * kSlot, x = x_ring + x_slot * x_slot_bytes;
    mbarrier_wait(x_full + 8 * x_slot, x_parity);
    mbarrier_wait(full + 8 * slot, parity);
    load(0, at, x);
    int left = stages;
#pragma unroll 1
    for (; left >= kUnit; left -= kUnit) {
      // Where the next unit is; its barriers are asked early, so that nobody waits for the answers.
      const bool more = left > kUnit;
      const bool wraps = slot + 1 == shape.slots, x_wraps = x_slot + 1 == shape.x_slots;
      const uint32_t next_full = wraps ? full : full + 8 * (slot + 1);
      const uint32_t next_parity = wraps ? parity ^ 1 : parity;
      const uint32_t next_x_full = x_wraps ? x_full : x_full + 8 * (x_slot + 1);
      const uint32_t next_x_parity = x_wraps ? x_parity ^ 1 : x_parity;
      const bool there = !more || mbarrier_test(next_full, next_parity);
      const bool x_there = !more || mbarrier_test(next_x_full, next_x_parity);
      uint32_t next_at = wraps ? ring : ring + (slot + 1) * kSlot;
      uint32_t next_x = x_wraps ? x_ring : x_ring + (x_slot + 1) * x_slot_bytes;
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if (i + 1 < kUnit) {
          load((i + 1) % 2, at + (i + 1) * kStage, x + (i + 1) * 2 * kStageColumns);
        } else {
          if (!there) mbarrier_wait(next_full, next_parity);
          if (!x_there) mbarrier_wait(next_x_full, next_x_parity);
          load(0, more ? next_at : at, more ? next_x : x);  // else anything that is there
        }
        multiply(i % 2);
      }
      at = next_at;
      x = next_x;
      __syncwarp();
      next_slot();
      next_window();
    }
    if (left > 0) {  // less than a unit is left
#pragma unroll 1
      for (; left > 0; --left) {
        load(0, at, x);
        multiply(0);
        at += kStage;
        x += 2 * kStageColumns;
      }
      __syncwarp();
      next_slot();
      next_window();
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      float one[1][kRowTiles][4];
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) one[0][j][i] = acc[m][j][i];
      }
      store_accumulators(view, args.epilogue, args.rows, tile + m * kSchedulers, 0, lane, one);
    }
  };

#pragma unroll 1
  for (int begin = 0; begin < work.tiles; begin += shape.turn) {
    const int count = work.count(shape, begin);
    const int tile = work.first + begin + work.lead;
    if (kEach == 2 && count == 2) {
      if constexpr (kEach == 2) multiply_tiles(std::integral_constant<int, 2>{}, tile);
    } else if (count == 1) {
      multiply_tiles(std::integral_constant<int, 1>{}, tile);
    } else {
      for (int stage = 0; stage < stages; stage += kUnit) {
        mbarrier_wait(x_full + 8 * x_slot, x_parity);
        next_window();
      }
    }
  }
  copy_async_commit();  // a warp that had no tile leaves no copy behind
  copy_async_wait<0>();
}

}  // namespace tensorfold
