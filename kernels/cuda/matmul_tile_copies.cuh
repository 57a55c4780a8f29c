// Copies into the ring of matmul_tile.cuh, which run ahead of the products, also into the block's next piece of work.
// Two forms of one interface: by the copy engine, two instructions a stage (compute capability 9 and up), or by
// cp.async, 16 bytes a thread.
//
// A place of the ring has the activations of a stage, [rows][64 columns] with swizzled pieces, then weights,
// [tiles][stage] as they are packed. Rows and tiles that there are not are anything, and are not stored; columns beyond
// K are zeros.
#pragma once

#include <cuda.h>

#include "kernels/cuda/matmul_format.cuh"
#include "kernels/cuda/mbarrier.cuh"

namespace tensorfold {

/// What the copy engine knows of each view: one box is a stage of a block's rows, or tiles.
struct TileMaps {
  CUtensorMap x[kMaxMatmulViews];
  CUtensorMap weight[kMaxMatmulViews];
};

/// Byte, in a stage of activations in shared memory, of columns 8 piece … + 7 of row `row`.
__host__ __device__ constexpr int x_piece_offset(int row, int piece) { return row * 128 + (piece ^ (row & 7)) * 16; }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// The box at (column, row) of a map to `shared`; its bytes count at the barrier.
__device__ __forceinline__ void copy_box(uint32_t shared, const CUtensorMap& map, int column, int row,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(shared),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

template <CudaWeightKind kKind, int kSets, typename Shape, bool kAdds>
class TileCopies {
 public:
  static constexpr int kArrivals = 1;  // at a place's barrier, which counts bytes too

  __device__ __forceinline__ TileCopies(const MatmulArgs& args, const TileMaps& maps, uint32_t ring, uint32_t full,
                                        uint32_t empty, int row_blocks, int warp)
      : args_(args),
        maps_(maps),
        ring_(ring),
        full_(full),
        empty_(empty),
        row_blocks_(row_blocks),
        warp_(warp),
        work_(static_cast<int>(blockIdx.x)) {
    begin();
  }
  /// Stages of the piece of work at hand that are still to be copied.
  __device__ __forceinline__ int left() const { return left_; }
  /// The first `count` stages: weights, which depend on no earlier kernel, then activations.
  __device__ __forceinline__ void first_weights(int count) const {
    if (warp_ != 0 || !elect_lane()) return;
    for (int s = 0; s < count; ++s) {
      mbarrier_expect(full_ + 8 * s, kBytes);
      copy_box(ring_ + s * kSlot + kXBytes, maps_.weight[view_], s * kStageWords, tile_, full_ + 8 * s);
    }
  }
  __device__ __forceinline__ void first_x(int count) {
    if (warp_ == 0 && elect_lane()) {
      for (int s = 0; s < count; ++s)
        copy_box(ring_ + s * kSlot, maps_.x[view_], s * kStageColumns, row_, full_ + 8 * s);
    }
    stage_ = count;
    left_ -= count;
  }
  /// The next stage to `place`, if there is one, when all warps are done with what it had. Warps take turns.
  __device__ __forceinline__ void next(int place, uint32_t free_phase) {
    if (left_ == 0) {
      if (kAdds && view_ < args_.view_count) {  // the other view of the piece
        view_ += args_.view_count;
        stage_ = 0;
        left_ = args_.views[view_].stages;
      } else {
        if (work_ + static_cast<int>(gridDim.x) >= args_.blocks) return;
        work_ += static_cast<int>(gridDim.x);
        begin();
      }
    }
    if (turn_ == warp_ && elect_lane()) {
      const uint32_t slot = ring_ + place * kSlot, barrier = full_ + 8 * place;
      mbarrier_wait(empty_ + 8 * place, free_phase);
      mbarrier_expect(barrier, kBytes);
      copy_box(slot, maps_.x[view_], stage_ * kStageColumns, row_, barrier);
      copy_box(slot + kXBytes, maps_.weight[view_], stage_ * kStageWords, tile_, barrier);
    }
    turn_ = turn_ + 1 == Shape::kWarps ? 0 : turn_ + 1;
    ++stage_;
    --left_;
  }

 private:
  static constexpr int kXBytes = Shape::kBlockRows * 128;
  static constexpr int kSlot = Shape::slot_bytes(kKind, kSets);
  static constexpr int kStageWords = stage_bytes(kKind, kSets) / 8;
  static constexpr uint32_t kBytes = kXBytes + Shape::kBlockTiles * stage_bytes(kKind, kSets);
  static_assert(stage_bytes(kKind, kSets) % 16 == 0 && kXBytes % 1024 == 0 && kSlot % 1024 == 0);

  __device__ __forceinline__ void begin() {
    view_ = view_of_block(args_, work_);
    const MatmulView& view = args_.views[view_];
    const int local = work_ - view.first_block;
    row_ = local % row_blocks_ * Shape::kBlockRows;
    tile_ = local / row_blocks_ * Shape::kBlockTiles;
    stage_ = 0;
    left_ = view.stages;
  }

  const MatmulArgs& args_;
  const TileMaps& maps_;
  uint32_t ring_, full_, empty_;
  int row_blocks_, warp_, work_;
  int view_ = 0, row_ = 0, tile_ = 0, stage_ = 0, left_ = 0, turn_ = 0;
};

#else

/// Weights: a warp kCopyTiles tiles, 16 bytes a lane. Activations: a thread piece tid % 8 of every kXStep-th row; rows
/// that there are not are the last one again. Pointers move before a copy: right after it they would wait for it to
/// read them.
template <CudaWeightKind kKind, int kSets, typename Shape, bool kAdds>
class TileCopies {
 public:
  static constexpr int kArrivals = Shape::kThreads;

  __device__ __forceinline__ TileCopies(const MatmulArgs& args, const TileMaps& /*maps*/, uint32_t ring, uint32_t full,
                                        uint32_t empty, int row_blocks, int warp)
      : args_(args),
        ring_(ring),
        full_(full),
        empty_(empty),
        w_to_(kXBytes + warp * kCopyTiles * kStage + threadIdx.x % 32 * 16),
        x_to_(x_piece_offset(threadIdx.x / 8, threadIdx.x % 8)),
        row_blocks_(row_blocks),
        warp_(warp),
        work_(static_cast<int>(blockIdx.x)) {
    begin(view_of_block(args_, work_));
  }
  __device__ __forceinline__ int left() const { return left_; }
  __device__ __forceinline__ void first_weights(int count) {
#pragma unroll
    for (int s = 0; s < Shape::kStages; ++s) {
      if (s < count) weights(ring_ + s * kSlot);
    }
  }
  __device__ __forceinline__ void first_x(int count) {
#pragma unroll
    for (int s = 0; s < Shape::kStages; ++s) {
      if (s >= count) continue;
      activations(ring_ + s * kSlot);
      mbarrier_arrive_after_copies(full_ + 8 * s);
    }
  }
  __device__ __forceinline__ void next(int place, uint32_t free_phase) {
    if (left_ == 0) {
      if (kAdds && view_ < args_.view_count) {  // the other view of the piece
        begin(view_ + args_.view_count);
      } else {
        if (work_ + static_cast<int>(gridDim.x) >= args_.blocks) return;
        work_ += static_cast<int>(gridDim.x);
        begin(view_of_block(args_, work_));
      }
    }
    mbarrier_wait(empty_ + 8 * place, free_phase);
    weights(ring_ + place * kSlot);
    activations(ring_ + place * kSlot);
    mbarrier_arrive_after_copies(full_ + 8 * place);
  }

 private:
  static constexpr int kStage = stage_bytes(kKind, kSets), kPieces = kStage / 16;
  static constexpr int kXBytes = Shape::kBlockRows * 128;
  static constexpr int kSlot = Shape::slot_bytes(kKind, kSets);
  static constexpr int kCopyTiles = Shape::kBlockTiles / Shape::kWarps;  // weight tiles that a warp copies
  static constexpr int kXStep = Shape::kThreads / 8;
  static_assert(kStage % 16 == 0 && kCopyTiles * Shape::kWarps == Shape::kBlockTiles);
  static_assert(Shape::kBlockRows % kXStep == 0 && kXStep % 8 == 0);

  __device__ __forceinline__ void begin(int number) {
    view_ = number;
    const MatmulView& view = args_.views[number];
    const int local = work_ - args_.views[number % args_.view_count].first_block, tid = static_cast<int>(threadIdx.x);
    const int first_row = local % row_blocks_ * Shape::kBlockRows;
    const int first_tile = local / row_blocks_ * Shape::kBlockTiles;
    left_ = view.stages;
    x_left_ = view.cols - tid % 8 * 8;
#pragma unroll
    for (int c = 0; c < kCopyTiles; ++c) {
      const int tile = min(first_tile + warp_ * kCopyTiles + c, view.tiles - 1);
      w_from_[c] = view.weight + tile * view.tile_bytes + tid % 32 * 16 - kStage;
    }
#pragma unroll
    for (int i = 0; i < Shape::kBlockRows / kXStep; ++i) {
      x_from_[i] =
          view.x + min(first_row + tid / 8 + i * kXStep, args_.rows - 1) * view.x_stride + tid % 8 * 8 - kStageColumns;
    }
  }
  __device__ __forceinline__ void weights(uint32_t slot) {
#pragma unroll
    for (int c = 0; c < kCopyTiles; ++c) {
      w_from_[c] += kStage;
#pragma unroll
      for (int i = 0; i < kPieces; i += 32) {
        copy_async16_if(slot + w_to_ + c * kStage + i * 16, w_from_[c] + i * 16,
                        static_cast<int>(threadIdx.x) % 32 < kPieces - i);
      }
    }
  }
  __device__ __forceinline__ void activations(uint32_t slot) {
#pragma unroll
    for (int i = 0; i < Shape::kBlockRows / kXStep; ++i) {
      x_from_[i] += kStageColumns;
      copy_async16(slot + x_to_ + i * kXStep * 128, x_from_[i], x_left_ > 0);
    }
    x_left_ -= kStageColumns;
    --left_;
  }

  const MatmulArgs& args_;
  uint32_t ring_, full_, empty_, w_to_, x_to_;
  int row_blocks_, warp_, work_;
  int view_ = 0, left_ = 0, x_left_ = 0;
  const uint8_t* w_from_[kCopyTiles];
  const __nv_bfloat16* x_from_[Shape::kBlockRows / kXStep];
};

#endif

}  // namespace tensorfold
