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
#include "kernels/cuda/tensor_map.h"

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

template <CudaWeightKind kKind, int kSets, int kRowTiles, int kUnit, int kEach>
bool launch_stream(MatmulArgs& args, const GpuFacts& gpu, const StreamLaunch& launch, cudaStream_t stream) {
  const auto kernel = stream_matmul_kernel<kKind, kSets, kRowTiles, kUnit, kEach>;
  static std::atomic<uint64_t> allowed{0};  // a bit a device
  if (!allow_shared(kernel, gpu.shared_bytes, allowed)) return false;
  return launch_kernel(kernel, dim3(static_cast<unsigned>(launch.blocks)),
                       dim3(static_cast<unsigned>(32 * (launch.shape.warps + 1))),
                       static_cast<size_t>(launch.shared_bytes), stream, "matmul", args, launch.shape);
}

template <CudaWeightKind kKind, int kSets, int kRowTiles>
std::optional<bool> launch_stream_tiles(MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream) {
  const std::optional<StreamLaunch> launch = choose_stream(kKind, kSets, args, gpu);
  if (!launch.has_value()) return std::nullopt;
  constexpr int kLong = kStreamLongUnit, kShort = kStreamShortUnit;
  if constexpr (kKind != CudaWeightKind::kBf16) {
    if (launch->each == 2) {
      if (launch->unit == kLong) return launch_stream<kKind, kSets, kRowTiles, kLong, 2>(args, gpu, *launch, stream);
      return launch_stream<kKind, kSets, kRowTiles, kShort, 2>(args, gpu, *launch, stream);
    }
  }
  if (launch->unit == kLong) return launch_stream<kKind, kSets, kRowTiles, kLong, 1>(args, gpu, *launch, stream);
  return launch_stream<kKind, kSets, kRowTiles, kShort, 1>(args, gpu, *launch, stream);
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

/// What the copy engine is told of the views.
template <CudaWeightKind kKind, int kSets, typename Shape>
bool tile_maps(const MatmulArgs& args, TileMaps& maps) {
  for (int v = 0; v < args.added * args.view_count; ++v) {
    const MatmulView& view = args.views[v];
    TensorMapShape x;
    x.data = view.x;
    x.cols = static_cast<uint64_t>(view.cols);
    x.rows = static_cast<uint64_t>(args.rows);
    x.stride = static_cast<uint64_t>(view.x_stride) * 2;
    x.box_cols = kStageColumns;
    x.box_rows = Shape::kBlockRows;
    x.swizzled = true;
    TensorMapShape weight;
    weight.data = view.weight;
    weight.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT64;  // 8 bytes, of whatever they are
    weight.cols = static_cast<uint64_t>(view.tile_bytes) / 8;
    weight.rows = static_cast<uint64_t>(view.tiles);
    weight.stride = static_cast<uint64_t>(view.tile_bytes);
    weight.box_cols = stage_bytes(kKind, kSets) / 8;
    weight.box_rows = Shape::kBlockTiles;
    if (!make_tensor_map(x, "matmul", &maps.x[v]) || !make_tensor_map(weight, "matmul", &maps.weight[v])) return false;
  }
  return true;
}

template <CudaWeightKind kKind, int kSets, typename Shape, bool kAdds = false>
bool launch_tile(MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream) {
  constexpr int kShared = Shape::shared_bytes(kKind, kSets, kAdds);
  const auto kernel = tile_matmul_kernel<kKind, kSets, Shape, kAdds>;
  static std::atomic<uint64_t> allowed{0};  // a bit a device
  if (!allow_shared(kernel, kShared, allowed)) return false;
  const int row_blocks = (args.rows + Shape::kBlockRows - 1) / Shape::kBlockRows;
  args.blocks = number_blocks(args, Shape::kBlockTiles, row_blocks);
  const int blocks = std::min(args.blocks, gpu.multiprocessors * Shape::kBlocksPerSm);
  TileMaps maps = {};
  if (pdl_supported() && !tile_maps<kKind, kSets, Shape>(args, maps)) return false;
  return launch_kernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(Shape::kThreads), kShared, stream, "matmul",
                       args, maps);
}

/// 33 to 64 rows of quantised weights: blocks of 128 weight rows by 64 rows, three a multiprocessor where they fit.
template <CudaWeightKind kKind, int kSets>
bool launch_low_tiles(MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream) {
  using Low = TileShape<4, 1, 2, 8, 4, 3>;
  static_assert(Low::shared_bytes(kKind, kSets) <= 99 * 1024);
  return launch_tile<kKind, kSets, Low>(args, gpu, stream);
}

/// Makes one output of every two views, in the first one's place: half as much goes through memory.
inline void add_pairs(MatmulArgs& args) {
  const MatmulArgs before = args;
  args.added = 2;
  args.view_count = before.view_count / 2;
  for (int v = 0; v < before.view_count; ++v) args.views[v % 2 * args.view_count + v / 2] = before.views[v];
}

/// Takes the last `tiles` tiles of the last view out of args; they become `tail`.
inline void split_tail(MatmulArgs& args, int tiles, MatmulArgs& tail) {
  tail = args;
  tail.view_count = 1;
  MatmulView& kept = args.views[args.view_count - 1];
  MatmulView& cut = tail.views[0];
  cut = kept;
  kept.tiles -= tiles;
  cut.tiles = tiles;
  cut.weight += kept.tiles * kept.tile_bytes;
  const bool plain = args.epilogue == MatmulEpilogue::kStore;
  const int first_col = kept.tiles * (plain ? 16 : 8);
  cut.out = static_cast<char*>(cut.out) + int64_t{first_col} * (plain ? sizeof(float) : sizeof(__nv_bfloat16));
  cut.out_cols -= first_col;
  kept.out_cols = first_col;
}

/// Large tiles where they fit and fill the device, else small ones. A last wave that would have work for less than half
/// of the multiprocessors becomes a launch of small tiles.
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
  const auto large = [&] {
    if constexpr (kLow) {
      if (Large::shared_bytes(kKind, kSets) > gpu.shared_bytes) {
        return launch_tile<kKind, kSets, Low>(args, gpu, stream);
      }
    }
    return launch_tile<kKind, kSets, Large>(args, gpu, stream);
  };
  // A wave of small tiles takes about 0.6 of the time of one of large tiles (estimated from instruction counts).
  const bool fits = kLow || Large::shared_bytes(kKind, kSets) <= gpu.shared_bytes;
  if (fits && 10 * waves(Large::kBlockTiles) <= 6 * waves(Small::kBlockTiles)) {
    const int pieces = number_blocks(args, Large::kBlockTiles, row_blocks);
    if constexpr (kLow) {
      const int sums = pieces / 2, sum_waves = (sums + gpu.multiprocessors - 1) / gpu.multiprocessors;
      if (args.may_add && 10 * sums >= 9 * sum_waves * gpu.multiprocessors &&
          Low::shared_bytes(kKind, kSets, true) <= gpu.shared_bytes) {
        add_pairs(args);
        return launch_tile<kKind, kSets, Low, true>(args, gpu, stream);
      }
    }
    const int more = pieces % gpu.multiprocessors;
    const int more_tiles = (more + row_blocks - 1) / row_blocks * Large::kBlockTiles;  // in whole columns of blocks
    const MatmulView& last = args.views[args.view_count - 1];
    // A last block column may be short of tiles; what is cut off begins with a whole one.
    const int ragged = last.tiles % Large::kBlockTiles;
    const int tail_tiles = more_tiles - (ragged == 0 ? 0 : Large::kBlockTiles - ragged);
    const int tail_blocks = (tail_tiles + Small::kBlockTiles - 1) / Small::kBlockTiles * row_blocks;
    if (more == 0 || tail_tiles >= last.tiles || tail_blocks > gpu.multiprocessors) return large();
    MatmulArgs tail;
    split_tail(args, tail_tiles, tail);
    return large() && launch_tile<kKind, kSets, Small>(tail, gpu, stream);
  }
  return launch_tile<kKind, kSets, Small>(args, gpu, stream);
}

}  // namespace tensorfold
