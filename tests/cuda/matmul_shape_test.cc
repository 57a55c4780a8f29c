// How products of few rows are cut into blocks, warps and shared memory, on GPUs that are not here: an H200's and a
// GB10's sizes. Runs without a GPU.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "kernels/cuda/matmul_stream_shape.h"

namespace tensorfold {
namespace {

struct Format {
  CudaWeightKind kind;
  int sets;
};
constexpr Format kFormats[] = {
    {CudaWeightKind::kBf16, 0},    {CudaWeightKind::kAffine4, 1}, {CudaWeightKind::kAffine4, 2},
    {CudaWeightKind::kAffine8, 1}, {CudaWeightKind::kAffine8, 2}, {CudaWeightKind::kFp8, 1},
    {CudaWeightKind::kFp8, 2},     {CudaWeightKind::kFp4, 1},     {CudaWeightKind::kFp4, 2}};
constexpr GpuFacts kH200{132, 232448}, kGb10{48, 101376}, kFewProcessors{16, 101376};

struct View {
  int tiles;
  int cols;
};
MatmulArgs args_of(const std::vector<View>& views, int rows) {
  MatmulArgs args;
  args.rows = rows;
  for (const View& view : views) {
    MatmulView& to = args.views[args.view_count++];
    to.tiles = view.tiles;
    to.cols = view.cols;
    to.stages = (view.cols + kStageColumns - 1) / kStageColumns;
  }
  return args;
}
const std::vector<std::vector<View>> kProducts = {
    {{1, 64}},
    {{3, 24}},
    {{1030, 5120}},
    {{2176, 5120}},
    {{15520, 5120}},
    {{384, 4096}, {6, 4096}, {6, 4096}},
    std::vector<View>(8, {320, 2176}),
    std::vector<View>(16, {7, 1000}),
    {{5, 16384}, {4000, 128}},
};

template <int kEach>
void count_tiles(const MatmulArgs& args, const StreamLaunch& launch, std::vector<std::map<int, int>>& taken) {
  for (int block = 0; block < launch.blocks; ++block) {
    int v = 0;
    while (v + 1 < args.view_count && block >= args.views[v + 1].first_block) ++v;
    for (int warp = 0; warp < launch.shape.warps; ++warp) {
      const StreamWork<kEach> work(args.views[v], block, warp);
      for (int begin = 0; begin < work.tiles; begin += launch.shape.turn) {
        for (int i = 0; i < work.count(launch.shape, begin); ++i) {
          ++taken[static_cast<size_t>(v)][work.first + begin + work.lead + i * kSchedulers];
        }
      }
    }
  }
}

// Protects: each tile of each view is computed by one warp, once, whatever the GPU; and a launch's shared memory holds
// what the kernel puts there. A product for which nothing fits would take a kernel that nobody measured.
TEST(MatmulShape, EveryTileOnceAndWithinSharedMemory) {
  for (const GpuFacts& gpu : {kH200, kGb10, kFewProcessors}) {
    for (const Format& format : kFormats) {
      for (size_t p = 0; p < kProducts.size(); ++p) {
        for (int rows = 1; rows <= kStreamRows; ++rows) {
          const std::string what = std::to_string(gpu.multiprocessors) + " processors, kind " +
                                   std::to_string(static_cast<int>(format.kind)) + ", product " + std::to_string(p) +
                                   ", " + std::to_string(rows) + " rows";
          MatmulArgs args = args_of(kProducts[p], rows);
          const std::optional<StreamLaunch> launch = choose_stream(format.kind, format.sets, args, gpu);
          ASSERT_TRUE(launch.has_value()) << what;
          const StreamShape& shape = launch->shape;
          const int slot = launch->each * launch->unit * stage_bytes(format.kind, format.sets);
          ASSERT_LE(launch->blocks, gpu.multiprocessors) << what;
          ASSERT_GE(shape.slots, 2) << what;
          ASSERT_LE(shape.warps, stream_most_warps(launch->each)) << what;
          ASSERT_LE(shape.x_slots, kMostXSlots) << what;
          ASSERT_LE(8 * (2 * shape.x_slots + shape.warps * shape.slots), shape.x_at) << what;
          ASSERT_LE(shape.x_at + shape.x_slots * rows * stream_x_stride(launch->unit), shape.ring_at) << what;
          ASSERT_LE(shape.ring_at + shape.warps * shape.slots * slot, launch->shared_bytes) << what;
          ASSERT_LE(launch->shared_bytes, gpu.shared_bytes - 1024) << what;  // 1,024 are the system's

          std::vector<std::map<int, int>> taken(static_cast<size_t>(args.view_count));
          launch->each == 2 ? count_tiles<2>(args, *launch, taken) : count_tiles<1>(args, *launch, taken);
          for (int v = 0; v < args.view_count; ++v) {
            const auto& tiles = taken[static_cast<size_t>(v)];
            ASSERT_EQ(static_cast<int>(tiles.size()), args.views[v].tiles) << what << ", view " << v;
            ASSERT_EQ(tiles.begin()->first, 0) << what << ", view " << v;
            for (const auto& [tile, times] : tiles) ASSERT_EQ(times, 1) << what << ", view " << v << ", tile " << tile;
          }
        }
      }
    }
  }
}

// Protects: the shares of views follow their work, so that no block has much more than the others.
TEST(MatmulShape, ViewsGetBlocksByTheirWork) {
  MatmulArgs args = args_of(std::vector<View>(8, {320, 2176}), 16);
  int blocks = 0;
  EXPECT_EQ(share_blocks(args, kH200, blocks), 20);
  EXPECT_EQ(blocks, 132);
  args = args_of({{1000, 5120}, {10, 5120}}, 16);
  EXPECT_EQ(share_blocks(args, kH200, blocks), 8);
  args = args_of(std::vector<View>(16, {7, 1000}), 1);
  EXPECT_EQ(share_blocks(args, {8, 101376}, blocks), -1);
}

// Protects: schedulers of a multiprocessor get alike many tiles, pairs or not.
TEST(MatmulShape, WarpsOfATurn) {
  EXPECT_EQ(stream_warps(17, 2), 9);
  EXPECT_EQ(stream_warps(20, 2), 12);
  EXPECT_EQ(stream_warps(24, 2), 12);
  EXPECT_EQ(stream_warps(3, 2), 3);
  EXPECT_EQ(stream_warps(17, 1), 17);
}

}  // namespace
}  // namespace tensorfold
