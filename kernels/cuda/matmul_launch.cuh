// Launching one configuration of the kernels of a product.
#pragma once

#include <atomic>
#include <cstdlib>

#include "kernels/cuda/matmul_launch.h"
#include "kernels/cuda/matmul_skinny.cuh"
#include "kernels/cuda/matmul_stream.cuh"
#include "kernels/cuda/matmul_tile.cuh"

namespace tensorfold {

/// Numbers the blocks of all views; returns how many.
inline int number_blocks(MatmulArgs& args, int tiles_per_block, int row_blocks) {
  int blocks = 0;
  for (int v = 0; v < args.view_count; ++v) {
    args.views[v].first_block = blocks;
    blocks += (args.views[v].tiles + tiles_per_block - 1) / tiles_per_block * row_blocks;
  }
  return blocks;
}

template <CudaWeightKind kKind, int kSets, int kRowTiles, int kTiles, int kDepth, int kAhead, int kBlocksPerSm>
bool launch_skinny(MatmulArgs& args, cudaStream_t stream) {
  const int blocks = number_blocks(args, kSkinnyWarps * kTiles, 1);
  return launch_kernel(skinny_matmul_kernel<kKind, kSets, kRowTiles, kTiles, kDepth, kAhead, kBlocksPerSm>,
                       dim3(static_cast<unsigned>(blocks)), dim3(32 * kSkinnyWarps), 0, stream, "matmul", args);
}

/// True where a launch is too small to fill the device with blocks of one tile a warp: then the configuration with more
/// bytes under way a warp, of which `blocks_per_sm` fit, is the better one.
inline bool few_blocks(MatmulArgs& args, const GpuFacts& gpu, int blocks_per_sm) {
  return number_blocks(args, kSkinnyWarps, 1) <= blocks_per_sm * gpu.multiprocessors;
}

inline int knob(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

/// False where the activations of a block and a ring do not fit in shared memory.
inline bool shape_stream(MatmulArgs& args, const GpuFacts& gpu, int chunk_bytes, int* blocks, int* warps,
                         StreamShape* shape, int* shared_bytes) {
  shape->tiles = number_blocks(args, 1, 1);
  *blocks = std::min(gpu.multiprocessors, shape->tiles);
  const int tiles = (shape->tiles + *blocks - 1) / *blocks;  // of a block
  const int max_warps = knob("TF_WARPS", kStreamWarps);
  const int turns = (tiles + max_warps - 1) / max_warps;
  *warps = (tiles + turns - 1) / turns;
  int x_bytes = 0;
  for (int b = 0; b < *blocks; ++b) {
    const int first = stream_first_tile(shape->tiles, *blocks, b), end = stream_first_tile(shape->tiles, *blocks, b + 1);
    int bytes = 0, windows = 0;
    for (int v = 0; v < args.view_count; ++v) {
      const MatmulView& view = args.views[v];
      if (view.first_block >= end || view.first_block + view.tiles <= first) continue;
      bytes += args.rows * stream_x_stride(view.stages);
      windows += stream_windows(view.stages);
    }
    if (windows > kMaxWindows) return false;
    x_bytes = std::max(x_bytes, bytes);
  }
  const int ring = *warps * (chunk_bytes + 8);  // a slot of each
  const int fixed = 8 * kMaxWindows + 2 * 128 + x_bytes;
  const int half = 113 * 1024, most = gpu.shared_bytes;  // half: two blocks a multiprocessor
  const int want = knob("TF_RING", 48) * 1024;
  int slots = (half - fixed) / ring;
  if (slots * ring < want || slots < 2) slots = std::min((most - fixed) / ring, std::max(2, want / ring + 1));
  slots = std::min(slots, knob("TF_SLOTS", 32));
  if (slots < 2) return false;
  shape->slots = slots;
  const auto round = [](int bytes) { return (bytes + 127) / 128 * 128; };
  shape->x_at = round(8 * (kMaxWindows + *warps * slots));
  shape->ring_at = round(shape->x_at + x_bytes);
  *shared_bytes = shape->ring_at + *warps * slots * chunk_bytes;
  if (knob("TF_SHOW", 0)) std::fprintf(stderr, "stream: %d tiles, %d blocks of %d warps, %d turns, %d slots, %d shared\n", shape->tiles, *blocks, *warps, turns, slots, *shared_bytes);
  return *shared_bytes <= most;
}

template <CudaWeightKind kKind, int kSets, int kRowTiles>
bool launch_stream(MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream, bool* fits) {
  constexpr int kChunkBytes = kChunkStages<kKind> * stage_bytes(kKind, kSets);
  StreamShape shape;
  int blocks = 0, warps = 0, shared_bytes = 0;
  *fits = !knob("TF_OLD", 0) && shape_stream(args, gpu, kChunkBytes, &blocks, &warps, &shape, &shared_bytes);
  if (!*fits) return false;
  const auto kernel = stream_matmul_kernel<kKind, kSets, kRowTiles>;
  static std::atomic<uint64_t> allowed{0};  // a bit a device
  int device = 0;
  if (!cuda_ok(cudaGetDevice(&device), "matmul")) return false;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((allowed.load() & bit) == 0) {
    if (!cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, gpu.shared_bytes), "matmul")) {
      return false;
    }
    allowed.fetch_or(bit);
  }
  return launch_kernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(32 * warps)),
                       static_cast<size_t>(shared_bytes), stream, "matmul", args, shape);
}

template <CudaWeightKind kKind, int kSets, int kWarpTiles, int kStages>
bool launch_tile(MatmulArgs& args, cudaStream_t stream) {
  constexpr int kShared = tile_shared_bytes(kKind, kSets, kWarpTiles, kStages);
  const auto kernel = tile_matmul_kernel<kKind, kSets, kWarpTiles, kStages>;
  static std::atomic<uint64_t> allowed{0};  // a bit a device
  int device = 0;
  if (!cuda_ok(cudaGetDevice(&device), "matmul")) return false;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((allowed.load() & bit) == 0) {
    if (!cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "matmul")) {
      return false;
    }
    allowed.fetch_or(bit);
  }
  const int row_blocks = (args.rows + kBlockRows - 1) / kBlockRows;
  const int blocks = number_blocks(args, kWarpsDown * kWarpTiles, row_blocks);
  return launch_kernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kTileThreads), kShared, stream, "matmul",
                       args);
}

/// Large tiles where they fit and fill the device, else small ones.
template <CudaWeightKind kKind, int kSets>
bool launch_tiles(MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream) {
  const int row_blocks = (args.rows + kBlockRows - 1) / kBlockRows;
  const auto waves = [&](int warp_tiles) {
    return (number_blocks(args, kWarpsDown * warp_tiles, row_blocks) + gpu.multiprocessors - 1) / gpu.multiprocessors;
  };
  const bool fits = tile_shared_bytes(kKind, kSets, 4, 4) <= gpu.shared_bytes;
  // A wave of large tiles takes nearly as long as two of small ones.
  if (fits && 18 * waves(4) <= 10 * waves(2)) return launch_tile<kKind, kSets, 4, 4>(args, stream);
  return launch_tile<kKind, kSets, 2, 3>(args, stream);
}

}  // namespace tensorfold
