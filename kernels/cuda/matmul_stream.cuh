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

#include <type_traits>

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

/// Bytes between rows of activations in shared memory: 64 more than a multiple of 128, so that the two rows of which 8
/// lanes read 64 bytes each lie in different banks.
__host__ __device__ constexpr int stream_x_stride(int stages) { return stages * 2 * kStageColumns + 64; }
__host__ __device__ constexpr int stream_windows(int stages) { return (stages + kWindowStages - 1) / kWindowStages; }
/// The first tile (numbered over all views) of a block.
__host__ __device__ constexpr int stream_first_tile(int tiles, int blocks, int block) {
  return static_cast<int>(static_cast<int64_t>(tiles) * block / blocks);
}

/// Shared memory of a block: barriers of windows, of slots; activations of its views; the warps' rings.
/// A copy brings a slot's `chunk` stages.
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
inline constexpr int kSlotArrivals = 1;
#else
inline constexpr int kSlotArrivals = 32;
#endif

/// Brings the activations of a block's views, in windows with a barrier each. Columns beyond K are zeros: what lies
/// there in x must not count. On sm_90 the first warp asks for whole rows of a window; elsewhere all threads copy.
__device__ __forceinline__ void bring_activations(const MatmulArgs& args, int first_view, int last_view, uint32_t to,
                                                  uint32_t window) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  mbarrier_init_done();  // what earlier kernels wrote, for the copies too
  for (int v = first_view; v <= last_view; ++v) {
    const MatmulView& view = args.views[v];
    const int stride = stream_x_stride(view.stages);
    for (int stage = 0; stage < view.stages; stage += kWindowStages) {
      const int cols = min(view.cols - stage * kStageColumns, kWindowStages * kStageColumns);
      const int padded = min(view.stages - stage, kWindowStages) * kStageColumns;
      for (int i = lane; i < args.rows * (padded - cols) / 8; i += 32) {  // of the last window only
        const int pieces = (padded - cols) / 8;
        store_shared16(to + i / pieces * stride + 2 * (stage * kStageColumns + cols) + 16 * (i % pieces),
                       make_uint4(0, 0, 0, 0));
      }
      __syncwarp();
      if (lane == 0) mbarrier_expect(window, static_cast<uint32_t>(args.rows * cols * 2));
      __syncwarp();
      for (int row = lane; row < args.rows; row += 32) {
        copy_bulk_more(to + row * stride + 2 * stage * kStageColumns,
                       view.x + row * view.x_stride + stage * kStageColumns, static_cast<uint32_t>(cols * 2), window);
      }
      window += 8;
    }
    to += args.rows * stride;
  }
#else
  constexpr int kPieces = kWindowStages * kStageColumns / 8;
  for (int v = first_view; v <= last_view; ++v) {
    const MatmulView& view = args.views[v];
    const int stride = stream_x_stride(view.stages);
    for (int piece0 = 0; piece0 < view.stages * (kStageColumns / 8); piece0 += kPieces) {
      for (int i = threadIdx.x; i < args.rows * kPieces; i += blockDim.x) {
        const int row = i / kPieces;
        const int piece = piece0 + i % kPieces;
        if (piece < view.stages * (kStageColumns / 8)) {
          copy_async16(to + row * stride + 16 * piece, view.x + row * view.x_stride + 8 * piece, 8 * piece < view.cols);
        }
      }
      mbarrier_arrive_after_copies(window);
      window += 8;
    }
    to += args.rows * stride;
  }
#endif
}

template <CudaWeightKind kKind, int kSets, int kRowTiles>
__global__ void __launch_bounds__(32 * kStreamWarps, 1)
    stream_matmul_kernel(const __grid_constant__ MatmulArgs args, const __grid_constant__ StreamShape shape) {
  constexpr int kStage = stage_bytes(kKind, kSets);
  constexpr int kUnit = stream_unit(kKind);
  extern __shared__ __align__(128) uint8_t shared[];
  pdl_launch();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int first = stream_first_tile(shape.tiles, gridDim.x, blockIdx.x);
  const int end = stream_first_tile(shape.tiles, gridDim.x, blockIdx.x + 1);
  uint32_t windows = shared_address(shared);
  int slot_bytes = shape.chunk * kStage;
  asm volatile("" : "+r"(windows), "+r"(slot_bytes));  // opaque, so that they are not computed again and again
  uint32_t barriers = windows + 8 * (kMaxWindows + warp * shape.slots);
  uint32_t ring = windows + shape.ring_at + warp * shape.slots * slot_bytes;
  asm volatile("" : "+r"(barriers), "+r"(ring));

  // The copying end of the ring: the tile, where its next stage is, and its stages left.
  int copy_tile = first + warp;
  const uint8_t* copy_from = nullptr;
  int copy_left = 0;
  const auto locate = [&] {
    if (copy_tile >= end) return;
    const MatmulView& view = args.views[view_of_block(args, copy_tile)];
    copy_from = view.weight + (copy_tile - view.first_block) * view.tile_bytes;
    copy_left = view.stages;
  };
  const auto fill = [&](int slot) {
    if (copy_tile >= end) return;
    const int bytes = min(shape.chunk, copy_left) * kStage;
    copy_slot(ring + slot * slot_bytes, copy_from, bytes, barriers + 8 * slot, lane);
    copy_from += bytes;
    copy_left -= shape.chunk;
    if (copy_left <= 0) {
      copy_tile += warps;
      locate();
    }
  };
  if (lane == 0) {
#pragma unroll 1
    for (int i = 0; i < shape.slots; ++i) mbarrier_init(barriers + 8 * i, kSlotArrivals);
    mbarrier_init_done();
  }
  __syncwarp();
  locate();
#pragma unroll 1
  for (int i = 0; i < shape.slots; ++i) fill(i);

  for (int i = threadIdx.x; i < kMaxWindows; i += blockDim.x) {
    mbarrier_init(windows + 8 * i, kSlotArrivals == 1 ? 1 : blockDim.x);
  }
  mbarrier_init_done();
  __syncthreads();
  pdl_wait();

  const int first_view = view_of_block(args, first);
  bring_activations(args, first_view, view_of_block(args, end - 1), windows + shape.x_at, windows);

  int slot = 0;
  uint32_t parity = 0;
  for (int tile = first + warp; tile < end; tile += warps) {
    uint32_t x = windows + shape.x_at + 16 * (lane % 4);
    uint32_t window = windows;
    int v = first_view;
    for (; v + 1 < args.view_count && tile >= args.views[v + 1].first_block; ++v) {
      x += args.rows * stream_x_stride(args.views[v].stages);
      window += 8 * stream_windows(args.views[v].stages);
    }
    const MatmulView& view = args.views[v];
    uint32_t xs[kRowTiles];
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      xs[j] = x + min(8 * j + lane / 4, args.rows - 1) * stream_x_stride(view.stages);
    }
    float acc[1][kRowTiles][4] = {};
    // The stage at hand in [0] or [1], the next one in the other.
    WeightStage<kKind, kSets> weights[2];
    uint4 b[2][2][kRowTiles];  // [stage][half]
    const auto load = [&](int to, uint32_t at, int x_stage) {
      weights[to].load_shared(at, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) b[to][half][j] = load_shared16(xs[j] + 128 * x_stage + 64 * half);
      }
    };
    // kCount stages from `at`, of which the first has been loaded; loads the one after them too, where there is one
    // (`more`; else the last again, so that nothing is read that did not come).
    const auto run = [&](auto count, uint32_t at, int more) {
      constexpr int kCount = decltype(count)::value;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int next = i + 1 < kCount ? i + 1 : kCount - 1 + more;
        load((i + 1) % 2, at + next * kStage, next);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Bf16x2 a[2][4];
          weights[i % 2].fragments(half, a);
#pragma unroll
          for (int j = 0; j < kRowTiles; ++j) mma_m16n8k16(acc[0][j], a[0], b[i % 2][half][j].x, b[i % 2][half][j].y);
#pragma unroll
          for (int j = 0; j < kRowTiles; ++j) mma_m16n8k16(acc[0][j], a[1], b[i % 2][half][j].z, b[i % 2][half][j].w);
        }
      }
    };
    const int stages = view.stages;
    int come = 0;  // stages whose activations are known to have come
    for (int done = 0; done < stages; done += shape.chunk) {
      const int count = min(shape.chunk, stages - done);
      for (; come < done + count; come += kWindowStages, window += 8) mbarrier_wait(window, 0);
      mbarrier_wait(barriers + 8 * slot, parity);
      uint32_t at = ring + slot * slot_bytes;
      load(0, at, 0);
      int left = count;
#pragma unroll 1
      for (; left >= kUnit; left -= kUnit) {
        run(std::integral_constant<int, kUnit>(), at, left > kUnit ? 1 : 0);
        at += kUnit * kStage;
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) xs[j] += kUnit * 2 * kStageColumns;
      }
#pragma unroll 1
      for (; left > 0; --left) {
        run(std::integral_constant<int, 1>(), at, left > 1 ? 1 : 0);
        weights[0] = weights[1];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int j = 0; j < kRowTiles; ++j) b[0][half][j] = b[1][half][j];
        }
        at += kStage;
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) xs[j] += 2 * kStageColumns;
      }
      __syncwarp();
      fill(slot);
      if (++slot == shape.slots) {
        slot = 0;
        parity ^= 1;
      }
    }
    store_accumulators(view, args.epilogue, args.rows, tile - view.first_block, 0, lane, acc);
  }
  // A warp that had no tile leaves no copy behind (the first warp has one, and so has each view).
  copy_async_commit();
  copy_async_wait<0>();
}

}  // namespace tensorfold
