// Launching one configuration of the kernels of a product.
#pragma once

#include <algorithm>
#include <atomic>
#include <optional>
#include <type_traits>

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

/// Lets a kernel's blocks have so much shared memory, once a device.
template <typename Kernel>
bool allow_shared(Kernel kernel, int bytes, std::atomic<uint64_t>& allowed) {
  int device = 0;
  if (!cuda_ok(cudaGetDevice(&device), "matmul")) return false;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((allowed.load() & bit) != 0) return true;
  if (!cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "matmul"))
    return false;
  allowed.fetch_or(bit);
  return true;
}

/// A launch of stream_matmul_kernel.
struct StreamLaunch {
  StreamShape shape;
  int blocks = 0;
  int shared_bytes = 0;
};

/// Gives each view blocks of its own, as many as its share of the work; returns the most tiles of a block, or -1 where
/// there are more views than multiprocessors.
inline int share_blocks(MatmulArgs& args, const GpuFacts& gpu, int& blocks) {
  if (args.view_count > gpu.multiprocessors) return -1;
  int counts[kMaxMatmulViews];
  int64_t all = 0;
  for (int v = 0; v < args.view_count; ++v) all += int64_t{args.views[v].tiles} * args.views[v].stages;
  int given = 0;
  for (int v = 0; v < args.view_count; ++v) {
    const MatmulView& view = args.views[v];
    const int64_t share = int64_t{view.tiles} * view.stages * (gpu.multiprocessors - args.view_count) / all;
    counts[v] = static_cast<int>(std::clamp<int64_t>(share, 1, view.tiles));
    given += counts[v];
  }
  const auto tiles_of = [&](int v) { return (args.views[v].tiles + counts[v] - 1) / counts[v]; };
  // What is left goes to whoever takes longest.
  for (; given < gpu.multiprocessors; ++given) {
    int longest = 0;
    for (int v = 1; v < args.view_count; ++v) {
      if (int64_t{tiles_of(v)} * args.views[v].stages > int64_t{tiles_of(longest)} * args.views[longest].stages) {
        longest = v;
      }
    }
    if (counts[longest] == args.views[longest].tiles) break;
    ++counts[longest];
  }
  blocks = 0;
  int most = 0;
  for (int v = 0; v < args.view_count; ++v) {
    args.views[v].first_block = blocks;
    args.views[v].share = TileShare::of(args.views[v].tiles, counts[v]);
    blocks += counts[v];
    most = std::max(most, tiles_of(v));
  }
  return most;
}

/// False where rings of two slots do not fit beside the windows. `tiles`: most of a block; `slot`: bytes of one tile.
inline bool shape_stream(int rows, int stages, int tiles, int slot, int unit, int each, int most, const GpuFacts& gpu,
                         StreamLaunch& launch) {
  StreamShape& shape = launch.shape;
  constexpr int kLeftOver = 4096;  // for small kernels beside it
  const auto round = [](int bytes) { return (bytes + 127) / 128 * 128; };
  const int turns = (tiles + most * each - 1) / (most * each);
  shape.turn = (tiles + turns - 1) / turns;
  shape.warps = stream_warps(shape.turn, each);
  constexpr int kCheap = 24 * 1024;  // up to here windows ahead cost the rings next to nothing
  const int window = rows * stream_x_stride(unit);
  shape.x_slots = std::clamp(kCheap / window, kXSlots, std::clamp((stages + unit - 1) / unit, kXSlots, kMostXSlots));
  const int x_bytes = shape.x_slots * window;
  const int room = gpu.shared_bytes - kLeftOver - 8 * 2 * shape.x_slots - x_bytes - 2 * 128;
  shape.slots = std::min(room / (shape.warps * (each * slot + 8)), kMaxSlots);
  if (shape.warps > stream_most_warps(each) || shape.slots < 2) return false;
  shape.x_at = round(8 * (2 * shape.x_slots + shape.warps * shape.slots));
  shape.ring_at = round(shape.x_at + x_bytes);
  launch.shared_bytes = shape.ring_at + shape.warps * shape.slots * each * slot;
  return true;
}

template <CudaWeightKind kKind, int kSets, int kRowTiles, int kUnit, int kEach>
bool launch_stream(MatmulArgs& args, const GpuFacts& gpu, const StreamLaunch& launch, cudaStream_t stream) {
  const auto kernel = stream_matmul_kernel<kKind, kSets, kRowTiles, kUnit, kEach>;
  static std::atomic<uint64_t> allowed{0};  // a bit a device
  if (!allow_shared(kernel, gpu.shared_bytes, allowed)) return false;
  return launch_kernel(kernel, dim3(static_cast<unsigned>(launch.blocks)),
                       dim3(static_cast<unsigned>(32 * (launch.shape.warps + 1))),
                       static_cast<size_t>(launch.shared_bytes), stream, "matmul", args, launch.shape);
}

/// The first of a few configurations whose rings fit. The longer a unit, the fewer instructions that come with each
/// (barriers, places, copies). Pairs of tiles where a block has many: they load activations half as often, but few
/// warps hide each other's waiting less. bf16 has no arithmetic for which that would count.
template <CudaWeightKind kKind, int kSets, int kRowTiles>
std::optional<bool> launch_stream_tiles(MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream) {
  constexpr int kStage = stage_bytes(kKind, kSets), kLong = 8, kShort = 4;
  StreamLaunch launch;
  const int tiles = share_blocks(args, gpu, launch.blocks);
  if (tiles < 0) return std::nullopt;
  int stages = 0;
  for (int v = 0; v < args.view_count; ++v) stages = std::max(stages, args.views[v].stages);
  const auto fits = [&](int unit, int each, int most) {
    return shape_stream(args.rows, stages, tiles, unit * kStage, unit, each, most, gpu, launch);
  };
  constexpr int kOnes = stream_most_warps(1), kPairs = stream_most_warps(2);
  // Tiles of a block up to which warps take them one by one: measured in a layer of qwen3.8-27b.
  const int alone = args.rows <= 4 ? kOnes : 17;
  if constexpr (kKind != CudaWeightKind::kBf16) {
    if (tiles > alone) {
      if (fits(kLong, 2, kPairs)) {
        return launch_stream<kKind, kSets, kRowTiles, kLong, 2>(args, gpu, launch, stream);
      }
      if (fits(kShort, 2, kPairs)) {
        return launch_stream<kKind, kSets, kRowTiles, kShort, 2>(args, gpu, launch, stream);
      }
    }
  }
  if (fits(kLong, 1, kOnes)) return launch_stream<kKind, kSets, kRowTiles, kLong, 1>(args, gpu, launch, stream);
  for (int most = kOnes; most >= kOnes / 5; most /= 2) {
    if (fits(kShort, 1, most)) return launch_stream<kKind, kSets, kRowTiles, kShort, 1>(args, gpu, launch, stream);
  }
  return std::nullopt;
}

/// 1 to kStreamRows rows; nothing where the other kernel for few rows is the one to use.
template <CudaWeightKind kKind, int kSets>
std::optional<bool> launch_stream_rows(MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream) {
  if (args.rows > kStreamRows) return std::nullopt;
  if (args.rows > 8) return launch_stream_tiles<kKind, kSets, 2>(args, gpu, stream);
  if constexpr (kKind != CudaWeightKind::kBf16) {
    // Many short tiles: their blocks, which fill a multiprocessor each, would do one thing after the other, where small
    // ones of several kernels overlap (8 products of 5120 x 768 with 4 bits: 7.0 us against 6.0 on an H200; 16 rows are
    // as fast either way, and faster with their neighbours).
    constexpr int kManyTiles = 10;  // a multiprocessor
    constexpr int kShortStages = 16;
    int stages = 0;
    for (int v = 0; v < args.view_count; ++v) stages = std::max(stages, args.views[v].stages);
    if (stages <= kShortStages && number_blocks(args, 1, 1) > kManyTiles * gpu.multiprocessors) return std::nullopt;
  }
  return launch_stream_tiles<kKind, kSets, 1>(args, gpu, stream);
}

template <CudaWeightKind kKind, int kSets, typename Shape>
bool launch_tile(MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream) {
  constexpr int kShared = Shape::shared_bytes(kKind, kSets);
  const auto kernel = tile_matmul_kernel<kKind, kSets, Shape>;
  static std::atomic<uint64_t> allowed{0};  // a bit a device
  if (!allow_shared(kernel, kShared, allowed)) return false;
  const int row_blocks = (args.rows + Shape::kBlockRows - 1) / Shape::kBlockRows;
  args.blocks = number_blocks(args, Shape::kBlockTiles, row_blocks);
  const int blocks = std::min(args.blocks, gpu.multiprocessors * Shape::kBlocksPerSm);
  return launch_kernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(Shape::kThreads), kShared, stream, "matmul",
                       args);
}

/// 33 to 64 rows of quantised weights: blocks of 128 weight rows by 64 rows, three a multiprocessor where they fit.
template <CudaWeightKind kKind, int kSets>
bool launch_low_tiles(MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream) {
  using Low = TileShape<4, 1, 2, 8, 4, 3>;
  static_assert(Low::shared_bytes(kKind, kSets) <= 99 * 1024);
  return launch_tile<kKind, kSets, Low>(args, gpu, stream);
}

/// Large tiles where they fit and fill the device, else small ones.
template <CudaWeightKind kKind, int kSets>
bool launch_tiles(MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream) {
  constexpr bool kPlain = kKind == CudaWeightKind::kBf16;
  using Large = std::conditional_t<kPlain, TileShape<4, 2, 4, 8, 4, 1>, TileShape<8, 1, 2, 16, 4, 1>>;
  using Low = TileShape<8, 1, 2, 16, 3, 1>;  // 4 bits: large tiles in less shared memory
  constexpr bool kLow = kKind == CudaWeightKind::kAffine4 || kKind == CudaWeightKind::kFp4;
  using Small = TileShape<4, 2, 2, 8, 3, 1>;
  static_assert(Large::kBlockRows == Small::kBlockRows && Low::kBlockRows == Small::kBlockRows);
  static_assert(!kLow || Low::shared_bytes(kKind, kSets) <= 99 * 1024);
  static_assert(Small::shared_bytes(kKind, kSets) <= 99 * 1024);
  const int row_blocks = (args.rows + Small::kBlockRows - 1) / Small::kBlockRows;
  const auto waves = [&](int block_tiles) {
    return (number_blocks(args, block_tiles, row_blocks) + gpu.multiprocessors - 1) / gpu.multiprocessors;
  };
  // A wave of small tiles takes about 0.6 of the time of one of large tiles (estimated from instruction counts).
  if (10 * waves(Large::kBlockTiles) <= 6 * waves(Small::kBlockTiles)) {
    if (Large::shared_bytes(kKind, kSets) <= gpu.shared_bytes) {
      return launch_tile<kKind, kSets, Large>(args, gpu, stream);
    }
    if constexpr (kLow) return launch_tile<kKind, kSets, Low>(args, gpu, stream);
  }
  return launch_tile<kKind, kSets, Small>(args, gpu, stream);
}

}  // namespace tensorfold
