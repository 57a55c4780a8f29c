// How a launch of stream_matmul_kernel (matmul_stream.cuh) is cut: which block and warp take which tiles, and what a
// block's shared memory holds. For the host, the kernel and tests alike. None of it touches a chain.
#pragma once

#include <algorithm>
#include <optional>

#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/matmul_launch.h"
#include "kernels/cuda/matmul_views.h"

namespace tensorfold {

inline constexpr int kStreamRows = 16;      // most rows
inline constexpr int kXSlots = 3;           // fewest windows of activations that a block holds
inline constexpr int kMostXSlots = 16;      // a lane of the warp that brings them makes each one's barriers
inline constexpr int kMaxSlots = 32;        // of a warp
inline constexpr int kSchedulers = 4;       // of a multiprocessor
inline constexpr int kStreamLongUnit = 8;   // stages of a unit
inline constexpr int kStreamShortUnit = 4;  // where long ones leave no room
/// Most warps that multiply, of one tile at a time or of two; one more brings activations.
__host__ __device__ constexpr int stream_most_warps(int each) { return each == 1 ? 20 : 12; }

/// Bytes between rows of activations in shared memory: 64 more than a multiple of 128, so that the two rows of which 8
/// lanes read 64 bytes each lie in different banks.
__host__ __device__ constexpr int stream_x_stride(int stages) { return stages * 2 * kStageColumns + 64; }

/// Shared memory of a block: barriers; windows of activations; the warps' rings. A ring's slot has one unit of stages
/// of one tile, then of the other; a window has one unit.
struct StreamShape {
  int32_t warps = 0;    // that multiply
  int32_t turn = 0;     // tiles of all warps at a time
  int32_t slots = 0;    // of a warp
  int32_t x_slots = 0;  // windows
  int32_t x_at = 0;
  int32_t ring_at = 0;
};

/// What a block's warp knows of its work: turns of up to StreamShape::turn tiles. kEach: tiles of a warp at a time.
template <int kEach>
struct StreamWork {
  int first = 0;  // tile of the view
  int tiles = 0;
  int lead = 0;  // the warp's first tile among those of a turn

  __host__ __device__ StreamWork(const MatmulView& view, int block, int warp) {
    const int own = block - view.first_block;
    first = view.share.first(own);
    tiles = view.share.first(own + 1) - first;
    lead = warp % kSchedulers + warp / kSchedulers * kSchedulers * kEach;
  }
  /// How many tiles the warp has in the turn that begins with the block's tile `begin`; a second one is kSchedulers
  /// further on than the first.
  __host__ __device__ int count(const StreamShape& shape, int begin) const {
    const int left = (shape.turn < tiles - begin ? shape.turn : tiles - begin) - lead;
    return left <= 0 ? 0 : kEach == 2 && left > kSchedulers ? 2 : 1;
  }
};

/// Warps that `tiles` tiles at a time occupy.
constexpr int stream_warps(int tiles, int each) {
  const int rest = tiles % (kSchedulers * each);
  return tiles / (kSchedulers * each) * kSchedulers + (rest < kSchedulers ? rest : kSchedulers);
}

struct StreamLaunch {
  StreamShape shape;
  int unit = 0;  // stages of a slot
  int each = 0;  // tiles of a warp at a time
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

/// False where rings of two slots for `most` warps do not fit beside the windows. `tiles`: most of a block; `slot`:
/// bytes of one tile.
inline bool shape_stream(int rows, int stages, int tiles, int slot, int most, const GpuFacts& gpu,
                         StreamLaunch& launch) {
  StreamShape& shape = launch.shape;
  constexpr int kLeftOver = 4096;  // for small kernels beside it
  const auto round = [](int bytes) { return (bytes + 127) / 128 * 128; };
  const int turns = (tiles + most * launch.each - 1) / (most * launch.each);
  shape.turn = (tiles + turns - 1) / turns;
  shape.warps = stream_warps(shape.turn, launch.each);
  const int cheap = gpu.shared_bytes / 10;  // up to here windows ahead cost the rings next to nothing
  const int window = rows * stream_x_stride(launch.unit), windows = (stages + launch.unit - 1) / launch.unit;
  shape.x_slots = std::clamp(cheap / window, kXSlots, std::clamp(windows, kXSlots, kMostXSlots));
  const int x_bytes = shape.x_slots * window;
  const int room = gpu.shared_bytes - kLeftOver - 8 * 2 * shape.x_slots - x_bytes - 2 * 128;
  shape.slots = std::min(room / (shape.warps * (launch.each * slot + 8)), kMaxSlots);
  if (shape.warps > stream_most_warps(launch.each) || shape.slots < 2) return false;
  shape.x_at = round(8 * (2 * shape.x_slots + shape.warps * shape.slots));
  shape.ring_at = round(shape.x_at + x_bytes);
  launch.shared_bytes = shape.ring_at + shape.warps * shape.slots * launch.each * slot;
  return true;
}

/// Numbers the blocks of all views and chooses: the first of a few configurations whose rings fit. The longer a unit,
/// the fewer instructions that come with each (barriers, places, copies). Pairs of tiles where a block has many: they
/// load activations half as often, but few warps hide each other's waiting less; bf16 has no arithmetic for which that
/// would count. Fewer warps only where the memory of a block is small.
inline std::optional<StreamLaunch> choose_stream(CudaWeightKind kind, int sets, MatmulArgs& args, const GpuFacts& gpu) {
  StreamLaunch launch;
  const int tiles = share_blocks(args, gpu, launch.blocks);
  if (tiles < 0) return std::nullopt;
  int stages = 0;
  for (int v = 0; v < args.view_count; ++v) stages = std::max(stages, args.views[v].stages);
  const auto fits = [&](int unit, int each, int most) {
    launch.unit = unit;
    launch.each = each;
    return shape_stream(args.rows, stages, tiles, unit * stage_bytes(kind, sets), most, gpu, launch);
  };
  constexpr int kOnes = stream_most_warps(1), kPairs = stream_most_warps(2);
  // Tiles of a block up to which warps take them one by one: measured in a layer of qwen3.8-27b.
  const int alone = args.rows <= 4 ? kOnes : 17;
  if (kind != CudaWeightKind::kBf16 && tiles > alone) {
    if (fits(kStreamLongUnit, 2, kPairs) || fits(kStreamShortUnit, 2, kPairs)) return launch;
  }
  if (fits(kStreamLongUnit, 1, kOnes)) return launch;
  for (int most = kOnes; most >= 1; --most) {
    if (fits(kStreamShortUnit, 1, most)) return launch;
  }
  return std::nullopt;
}

}  // namespace tensorfold
