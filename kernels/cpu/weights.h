// Packed weights of the CPU backend.
//
// A weight is a list of segments (one a MatrixSource), each a list of panels of 4 rows, zero-padded. Columns go in
// blocks of 16, the lanes of a sum. Layout of a panel, front to back in the order of reading:
//   f32, bf16, f16: for each k block: 4 rows x 16 values, as stored in the checkpoint. EXL3, and what FP8 and FP4
//   kept_as_stored() leaves out, are kept as their values: bf16 where every one is a bf16 number, f32 elsewhere.
//   affine: for each quantisation group: 4 scales, 4 biases (bf16 if the checkpoint's are, else fp32), then for each k
//   block
//     4 rows x codes of 16 values. Codes are planes of bits: 8 bits: 16 bytes, one a lane; otherwise the low plane of 4
//     or 2 bits, then the rest as a plane of 2 or 1 bits. In a 4-bit plane (8 bytes) lane l is at bit 32 (l % 2) + 4 (l
//     / 2); in a 2-bit (4 bytes) or 1-bit plane (2 bytes) at bit 2 l or l.
//   FP8, FP4: for each group 4 scales, filled up to 16 bytes, then for each k block 4 rows x codes of 16 values (bytes,
//   or a 4-bit plane). A group is what the segment has of a block's columns, so that the first may begin before the
//   segment and groups may meet inside a k block. Scales of FP8 are fp32 and times 2^8, or e8m0 bytes where they are
//   stored so; those of FP4 are the stored bytes, numbers of rows in a table of values (Fp4Tables). Scales come first
//   because what runs ahead of the codes of one panel fetches the begin of the next.
// The layout is the same for every instruction set.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/memory.h"
#include "kernels/cpu/small_float_pack.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

class CpuWeight : public Weight {
 public:
  struct Segment {
    PanelView view;
    int64_t first_row = 0;    // output column of the segment's first row
    int64_t first_panel = 0;  // panels of the segments before it
    int64_t panels = 0;
    SharedSpan memory;
    std::shared_ptr<const MemoryBlock> values;  // FP4: the view's
  };

  int64_t out_features() const override { return rows_; }
  int64_t in_features() const override { return cols_; }
  int64_t bytes() const override { return bytes_; }
  int64_t panels() const { return panels_; }
  const std::vector<Segment>& segments() const { return segments_; }
  /// The segment that holds row `row`.
  const Segment& segment_of_row(int64_t row) const;

 private:
  friend std::unique_ptr<CpuWeight> pack_weight(std::span<const MatrixSource>, BlockArena*, ThreadPool*, Fp4Tables*);
  friend std::unique_ptr<CpuWeight> view_weight_rows(const CpuWeight&, int64_t, int64_t);
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  int64_t bytes_ = 0;
  int64_t panels_ = 0;
  std::vector<Segment> segments_;
};

/// Copies the blocks (equal cols, at least one) into panels, with all threads of the pool.
std::unique_ptr<CpuWeight> pack_weight(std::span<const MatrixSource> blocks, BlockArena* arena, ThreadPool* pool,
                                       Fp4Tables* tables);

/// Rows of a weight, sharing its memory; null when they do not begin and end at panels (or segments).
std::unique_ptr<CpuWeight> view_weight_rows(const CpuWeight& weight, int64_t first, int64_t count);

class CpuVector : public Vector {
 public:
  explicit CpuVector(std::span<const float> values);
  int64_t size() const override { return size_; }
  const float* data() const { return memory_.floats(); }
  /// The vector seen as [size / inner, inner], transposed to [inner, size / inner]. Made at the first call, kept.
  /// Always called with the same `inner`. Thread-safe.
  const float* transposed(int64_t inner) const;

 private:
  int64_t size_ = 0;
  MemoryBlock memory_;
  mutable std::once_flag once_;
  mutable std::unique_ptr<MemoryBlock> transposed_;
  mutable int64_t inner_ = 0;
};

}  // namespace tensorfold
