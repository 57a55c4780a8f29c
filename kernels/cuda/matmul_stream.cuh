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
// depend on and which are not stored. Codes become values in two ways, which give the same bits (matmul_quick.cuh).
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_format.cuh"
#include "kernels/cuda/matmul_quick.cuh"
#include "kernels/cuda/matmul_store.cuh"
#include "kernels/cuda/mbarrier.cuh"

namespace tensorfold {

inline constexpr int kStreamRows = 16;    // most rows
inline constexpr int kStreamWarps = 20;   // most warps of a block
inline constexpr int kWindowStages = 16;  // activations come in windows of so many stages, so that work begins early
inline constexpr int kMaxWindows = 64;    // of a block
inline constexpr int kMaxSlots = 32;      // of a warp

/// Stages that are worked on together: their loads and conversions mix with each other's products.
__host__ __device__ constexpr int stream_unit(CudaWeightKind kind, int row_tiles) {
  if (kind == CudaWeightKind::kBf16) return 1;
  return kind == CudaWeightKind::kAffine4 && row_tiles == 1 ? 4 : 2;
}

/// Bytes between rows of activations in shared memory: 64 more than a multiple of 128, so that the two rows of which 8
/// lanes read 64 bytes each lie in different banks.
__host__ __device__ constexpr int stream_x_stride(int stages) { return stages * 2 * kStageColumns + 64; }
__host__ __device__ constexpr int stream_windows(int stages) { return (stages + kWindowStages - 1) / kWindowStages; }
/// The first tile (numbered over all views) of a block.
__host__ __device__ constexpr int stream_first_tile(int tiles, int blocks, int block) {
  return static_cast<int>(static_cast<int64_t>(tiles) * block / blocks);
}

/// Shared memory of a block: barriers of windows, of slots; activations of its views; the warps' rings.
/// A copy brings a slot's `chunk` stages, a multiple of stream_unit().
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

template <CudaWeightKind kKind, int kSets, int kRowTiles>
__global__ void __launch_bounds__(32 * kStreamWarps, 1)
    stream_matmul_kernel(const __grid_constant__ MatmulArgs args, const __grid_constant__ StreamShape shape) {
  constexpr int kStage = stage_bytes(kKind, kSets);
  constexpr int kUnit = stream_unit(kKind, kRowTiles);
  // Halves of a stage that activations are loaded ahead.
  constexpr int kAhead = kRowTiles == 1 && kUnit > 1 ? 4 : 2;
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

  for (int i = threadIdx.x; i < kMaxWindows; i += blockDim.x) mbarrier_init(windows + 8 * i, blockDim.x);
  __syncthreads();
  pdl_wait();

  const int first_view = view_of_block(args, first);
  {
    const int last_view = view_of_block(args, end - 1);
    uint32_t to = windows + shape.x_at;
    uint32_t window = windows;
    for (int v = first_view; v <= last_view; ++v) {
      const MatmulView& view = args.views[v];
      const int stride = stream_x_stride(view.stages);
      constexpr int kPieces = kWindowStages * kStageColumns / 8;
      for (int piece0 = 0; piece0 < view.stages * (kStageColumns / 8); piece0 += kPieces) {
        for (int i = threadIdx.x; i < args.rows * kPieces; i += blockDim.x) {
          const int row = i / kPieces;
          const int piece = piece0 + i % kPieces;
          // Columns beyond K are zeros: what lies there in x must not count.
          if (piece < view.stages * (kStageColumns / 8)) {
            copy_async16(to + row * stride + 16 * piece, view.x + row * view.x_stride + 8 * piece,
                         8 * piece < view.cols);
          }
        }
        mbarrier_arrive_after_copies(window);
        window += 8;
      }
      to += args.rows * stride;
    }
  }

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
    const auto multiply = [&](const Bf16x2(&a)[2][4], const uint4(&b)[kRowTiles]) {
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) mma_m16n8k16(acc[0][j], a[0], b[j].x, b[j].y);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) mma_m16n8k16(acc[0][j], a[1], b[j].z, b[j].w);
    };
    const auto load_x = [&](uint4(&b)[kRowTiles], int half) {
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) b[j] = load_shared16(xs[j] + 64 * half);
    };
    // A stage of those at `at`; slower.
    const auto step = [&](uint32_t at, int i) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        uint4 b[kRowTiles];
        load_x(b, 2 * i + half);
        Bf16x2 a[2][4];
        WeightStage<kKind, kSets>::shared_fragments(at + i * kStage, half, lane, a);
        multiply(a, b);
      }
    };
    // kUnit stages; false when their scales do not allow it, and acc is as it was.
    const auto quick_unit = [&](uint32_t at) {
      QuickStage<kKind, kSets> stage[kUnit];
      uint4 b[kAhead][kRowTiles];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load_x(b[i], i);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) stage[i].load(at + i * kStage, lane);
      float before[kRowTiles][4];
      memcpy(before, acc, sizeof(acc));
      Bf16x2 bad = 0;
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        Bf16x2 a[2][2][4];
        stage[i].fragments(bad, a);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int block = 2 * i + half;
          multiply(a[half], b[block % kAhead]);
          if (block + kAhead < 2 * kUnit) load_x(b[block % kAhead], block + kAhead);
        }
      }
      if constexpr (kKind != CudaWeightKind::kBf16) {
        if (__any_sync(0xffffffff, (bad & 0x7fff) != 0)) {
          memcpy(acc, before, sizeof(acc));
          return false;
        }
      }
      return true;
    };
    const int stages = view.stages;
    int come = 0;  // stages whose activations are known to have come
    for (int done = 0; done < stages; done += shape.chunk) {
      const int count = min(shape.chunk, stages - done);
      for (; come < done + count; come += kWindowStages, window += 8) mbarrier_wait(window, 0);
      mbarrier_wait(barriers + 8 * slot, parity);
      uint32_t at = ring + slot * slot_bytes;
#pragma unroll 1
      for (int left = count; left > 0; left -= kUnit) {
        if (left < kUnit || !quick_unit(at)) {
#pragma unroll 1
          for (int i = 0; i < min(kUnit, left); ++i) step(at, i);
        }
        at += kUnit * kStage;
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) xs[j] += kUnit * 2 * kStageColumns;
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
  copy_async_commit();
  copy_async_wait<0>();  // a warp that had no tile leaves no copy behind
}

}  // namespace tensorfold
