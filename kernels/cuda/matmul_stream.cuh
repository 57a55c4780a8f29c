// Products of 1 to 16 rows: a pass is as fast as the weights can be read.
//
// One block a multiprocessor, its warps as many as its tiles of 16 weight rows allow. A warp takes tiles one after the
// other, each for all of K and all rows of the pass; warps share nothing but the activations, which the block brings
// into shared memory once. Each warp has a ring of slots in shared memory, a few stages of weights each, which
// asynchronous copies keep full across the ends of tiles: copies wait in barriers, of which there are as many as slots,
// while loads to registers wait in the warp's six scoreboards, which bounds how many can be told apart. The ring is
// filled before the kernels ahead have ended (weights do not depend on them).
//
// Contract: an output is mma.m16n8k16 chained over K ascending, from +0, in the order of columns that matmul_format.cuh
// gives; lanes of rows that there are not take the last row's values, in columns of B which no other column's bits
// depend on and which are not stored.
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_format.cuh"
#include "kernels/cuda/matmul_store.cuh"
#include "kernels/cuda/mbarrier.cuh"

namespace tensorfold {

inline constexpr int kStreamRows = 16;    // most rows
inline constexpr int kStreamWarps = 20;   // most warps of a block
inline constexpr int kWindowStages = 16;  // activations come in windows of so many stages, so that work begins early
inline constexpr int kMaxWindows = 64;    // of a block
inline constexpr int kMaxSlots = 32;      // of a warp

/// Stages that are written out one after the other, so that conversions and loads mix with products; the next stage's
/// operands come from shared memory meanwhile.
__host__ __device__ constexpr int stream_unit(CudaWeightKind kind) { return kind == CudaWeightKind::kBf16 ? 2 : 4; }
/// The same for up to kLongUnitRows where slots of so many stages leave the block all its warps: what comes with each
/// unit (barriers, places, bounds) is about as many instructions as a stage of 4-bit weights. Activations of more rows
/// leave no room for such slots.
inline constexpr int kLongUnitRows = 4;
__host__ __device__ constexpr int stream_long_unit(CudaWeightKind kind) {
  return kind == CudaWeightKind::kAffine4 ? 8 : stream_unit(kind);
}

/// Bytes between rows of activations in shared memory: 64 more than a multiple of 128, so that the two rows of which 8
/// lanes read 64 bytes each lie in different banks.
__host__ __device__ constexpr int stream_x_stride(int stages) { return stages * 2 * kStageColumns + 64; }
__host__ __device__ constexpr int stream_windows(int stages) { return (stages + kWindowStages - 1) / kWindowStages; }
/// The first tile (numbered over all views) of a block.
__host__ __device__ constexpr int stream_first_tile(int tiles, int blocks, int block) {
  return static_cast<int>(static_cast<int64_t>(tiles) * block / blocks);
}

/// Shared memory of a block: barriers of windows, of slots; activations of its
/// views; the warps' rings. A copy brings a slot's `chunk` stages, a multiple of stream_unit().
struct StreamShape {
  int32_t tiles = 0;
  int32_t slots = 0;  // of a warp
  int32_t chunk = 0;  // stages of a slot
  int32_t x_at = 0;
  int32_t ring_at = 0;
};

/// `bytes` of a ring's slot, copied by a warp.
__device__ __forceinline__ void copy_slot(uint32_t slot, const uint8_t* from, int bytes, uint32_t barrier, int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (lane == 0) copy_bulk(slot, from, static_cast<uint32_t>(bytes), barrier);
#else
  for (int at = 16 * lane; at < bytes; at += 16 * 32) copy_async16(slot + at, from + at, true);
  mbarrier_arrive_after_copies(barrier);
#endif
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr int kCopyArrivals = 1;
#else
inline constexpr int kCopyArrivals = 32;
#endif

/// Brings the activations of a block's views, in windows with a barrier each, by a warp. Columns beyond K are zeros:
/// what lies there in x must not count.
__device__ __forceinline__ void bring_activations(const MatmulArgs& args, int first_view, int last_view, uint32_t to,
                                                  uint32_t window, int lane) {
  for (int v = first_view; v <= last_view; ++v) {
    const MatmulView& view = args.views[v];
    const int stride = stream_x_stride(view.stages);
    for (int stage = 0; stage < view.stages; stage += kWindowStages) {
      const int cols = min(view.cols - stage * kStageColumns, kWindowStages * kStageColumns);
      const int padded = min(view.stages - stage, kWindowStages) * kStageColumns;
      const uint32_t at = to + 2 * stage * kStageColumns;
      const __nv_bfloat16* from = view.x + stage * kStageColumns;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      const int zeros = (padded - cols) / 8;
      for (int i = lane; i < args.rows * zeros; i += 32) {
        store_shared16(at + i / zeros * stride + 2 * cols + 16 * (i % zeros), make_uint4(0, 0, 0, 0));
      }
      __syncwarp();
      if (lane == 0) mbarrier_expect(window, static_cast<uint32_t>(args.rows * cols * 2));
      __syncwarp();
      for (int row = lane; row < args.rows; row += 32) {
        copy_bulk_more(at + row * stride, from + row * view.x_stride, static_cast<uint32_t>(cols * 2), window);
      }
#else
      for (int i = lane; i < args.rows * padded / 8; i += 32) {
        const int row = i / (padded / 8);
        const int piece = i % (padded / 8);
        copy_async16(at + row * stride + 16 * piece, from + row * view.x_stride + 8 * piece, 8 * piece < cols);
      }
      mbarrier_arrive_after_copies(window);
#endif
      window += 8;
    }
    to += args.rows * stride;
  }
}

/// kUnit: stream_unit() or stream_long_unit(), of which a slot has a multiple.
template <CudaWeightKind kKind, int kSets, int kRowTiles, int kUnit>
__global__ void __launch_bounds__(32 * kStreamWarps, 1)
    stream_matmul_kernel(const __grid_constant__ MatmulArgs args, const __grid_constant__ StreamShape shape) {
  constexpr int kStage = stage_bytes(kKind, kSets);
  static_assert(kUnit % 2 == 0);
  extern __shared__ __align__(128) uint8_t shared[];
  pdl_launch();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int first = stream_first_tile(shape.tiles, gridDim.x, blockIdx.x);
  const int end = stream_first_tile(shape.tiles, gridDim.x, blockIdx.x + 1);
  const int slot_bytes = shape.chunk * kStage;
  uint32_t windows = shared_address(shared);
  asm volatile("" : "+r"(windows));  // opaque, so that it is not computed again and again
  uint32_t full = windows + 8 * (kMaxWindows + warp * shape.slots);
  uint32_t ring = windows + shape.ring_at + warp * shape.slots * slot_bytes;
  asm volatile("" : "+r"(full), "+r"(ring));

  // The copying end of the ring: the tile, where its next stage is, and its stages left, 0 after the last tile.
  int copy_tile = first + warp;
  const uint8_t* copy_from = nullptr;
  int copy_left = 0;
  const auto locate = [&] {
    if (copy_tile >= end) return;
    const MatmulView& view = args.views[view_of_block(args, copy_tile)];
    copy_from = view.weight + (copy_tile - view.first_block) * view.tile_bytes;
    copy_left = view.stages;
  };
  const auto fill = [&](uint32_t to, uint32_t barrier) {
    if (copy_left == 0) return;
    const int count = min(shape.chunk, copy_left);
    copy_slot(to, copy_from, count * kStage, barrier, lane);
    copy_from += count * kStage;
    copy_left -= count;
    if (copy_left == 0) {
      copy_tile += warps;
      locate();
    }
  };
  if (lane == 0) {
#pragma unroll 1
    for (int i = 0; i < shape.slots; ++i) mbarrier_init(full + 8 * i, kCopyArrivals);
    mbarrier_init_done();
  }
  __syncwarp();
  locate();
#pragma unroll 1
  for (int i = 0; i < shape.slots; ++i) fill(ring + i * slot_bytes, full + 8 * i);

  for (int i = threadIdx.x; i < kMaxWindows; i += blockDim.x) mbarrier_init(windows + 8 * i, kCopyArrivals);
  mbarrier_init_done();
  __syncthreads();
  pdl_wait();

  const int first_view = view_of_block(args, first);
  if (warp == 0) {
    mbarrier_init_done();  // what earlier kernels wrote, for the copies too
    bring_activations(args, first_view, view_of_block(args, end - 1), windows + shape.x_at, windows, lane);
  }

  int slot = 0;
  uint32_t parity = 0;
  uint32_t at = ring;       // the stage at hand
  uint32_t come = windows;  // the first window that is not known to have come
  for (int tile = first + warp; tile < end; tile += warps) {
    uint32_t x = windows + shape.x_at + 16 * (lane % 4);
    uint32_t window = windows;
    int v = first_view;
    for (; v + 1 < args.view_count && tile >= args.views[v + 1].first_block; ++v) {
      x += args.rows * stream_x_stride(args.views[v].stages);
      window += 8 * stream_windows(args.views[v].stages);
    }
    const MatmulView& view = args.views[v];
    const int stages = view.stages;
    uint32_t xs[kRowTiles];
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      xs[j] = x + min(8 * j + lane / 4, args.rows - 1) * stream_x_stride(stages);
    }
    float acc[1][kRowTiles][4] = {};
    // The stage at hand in [0] or [1], the next one in the other.
    WeightStage<kKind, kSets> weights[2];
    uint4 b[2][2][kRowTiles];  // [stage][half]
    const auto load = [&](int to, uint32_t from, int x_stage) {
      weights[to].load_shared(from, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) b[to][half][j] = load_shared16(xs[j] + 128 * x_stage + 64 * half);
      }
    };
    const auto multiply = [&](int which) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Bf16x2 a[2][4];
        weights[which].fragments(half, a);
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) mma_m16n8k16(acc[0][j], a[0], b[which][half][j].x, b[which][half][j].y);
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) mma_m16n8k16(acc[0][j], a[1], b[which][half][j].z, b[which][half][j].w);
      }
    };
    const auto await_x = [&](int stage) {
      const uint32_t needed = window + 8 * (stage / kWindowStages);
      if (needed >= come) {
        for (come = max(come, window); come <= needed; come += 8) mbarrier_wait(come, 0);
      }
    };
    // After a slot's last stage: fills it again, and goes on to the next one.
    const auto next_slot = [&] {
      __syncwarp();
      fill(ring + slot * slot_bytes, full + 8 * slot);
      if (++slot == shape.slots) slot = 0, parity ^= 1, at = ring;
    };

    await_x(0);
    mbarrier_wait(full + 8 * slot, parity);
    load(0, at, 0);
    int left = stages;
    int left_in_slot = shape.chunk;
#pragma unroll 1
    for (; left >= kUnit; left -= kUnit) {
      left_in_slot -= kUnit;
      const bool more = left > kUnit, turn = left_in_slot == 0;
      // Where the stage after these is; its slot's barrier is asked early, so that nobody waits for the answer.
      const bool wraps = slot + 1 == shape.slots;
      const uint32_t next_full = full + (wraps ? 0 : 8 * (slot + 1));
      const uint32_t next_parity = wraps ? parity ^ 1 : parity;
      bool there = !(more && turn) || mbarrier_test(next_full, next_parity);
      const uint32_t next_at = turn && wraps ? ring : at + kUnit * kStage;
      if (more) await_x(stages - left + kUnit);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if (i + 1 < kUnit) {
          load((i + 1) % 2, at + (i + 1) * kStage, i + 1);
        } else {
          if (!there) mbarrier_wait(next_full, next_parity);
          load(0, more ? next_at : at, more ? kUnit : 0);  // else anything that is there
        }
        multiply(i % 2);
      }
      at = next_at;
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) xs[j] += kUnit * 2 * kStageColumns;
      if (turn) {
        next_slot();
        left_in_slot = shape.chunk;
      }
    }
    if (left > 0) {  // less than a unit is left, at the begin of what the last copy brought or behind a unit of it
#pragma unroll 1
      for (; left > 0; --left) {
        load(0, at, 0);
        multiply(0);
        at += kStage;
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) xs[j] += 2 * kStageColumns;
      }
    }
    if (left_in_slot != shape.chunk || stages % kUnit != 0) {  // the tile ends inside a slot
      at = ring + (slot + 1) * slot_bytes;
      next_slot();
    }
    store_accumulators(view, args.epilogue, args.rows, tile - view.first_block, 0, lane, acc);
  }
  // A warp that had no tile leaves no copy behind (the first warp has one, and so has each view).
  copy_async_commit();
  copy_async_wait<0>();
}

}  // namespace tensorfold
