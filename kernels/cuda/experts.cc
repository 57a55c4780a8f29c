// One call of experts(): which way, in which pieces, and where in the workspace everything lies.
#include "kernels/cuda/experts.h"

#include <algorithm>

#include "kernels/cuda/experts_groups.h"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

// Rows up to which a row's slots are a launch's work one after the other. Rows share no weights then (they meet in L2),
// but two launches fewer are needed.
constexpr int64_t kRowsWayRows = 1;
// Bounds of the workspace: outputs of pairs (fp32) of one piece.
constexpr int64_t kMostOutputs = int64_t{48} << 20;
constexpr int64_t kAlign = 256;

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
int64_t inner_stride(const CudaExperts& experts) { return (experts.widest() + 15) / 16 * 16; }
int64_t output_stride(const CudaExperts& experts) { return (experts.hidden() + 3) / 4 * 4; }

// Rows that are done together, and slices; prompts of many rows are done in pieces. No bits depend on it.
struct Pieces {
  int64_t rows, slices;
  Pieces(const CudaExperts& experts, int64_t all_rows, int64_t slots) {
    const int64_t row = slots * output_stride(experts);
    rows = std::clamp<int64_t>(kMostOutputs / row, 1, all_rows);
    slices = std::clamp<int64_t>(kMostOutputs / (rows * row), 1, experts.slices());
  }
};

// Where a piece's data lie, the outputs last: the way by rows has none.
struct Workspace {
  int64_t inner = 0, pairs, chunks, chunk_count, outputs, bytes;
  Workspace(const CudaExperts& experts, const Pieces& pieces, int64_t slots) {
    const int64_t count = pieces.rows * slots;
    pairs = inner + aligned(count * inner_stride(experts) * 2);
    chunks = pairs + aligned(count * 4);
    chunk_count = chunks + aligned(count * static_cast<int64_t>(sizeof(ExpertChunk)));
    outputs = chunk_count + kAlign;
    bytes = outputs + aligned(pieces.slices * count * output_stride(experts) * 4);
  }
};

class Piece {
 public:
  Piece(cudaStream_t stream, const CudaExpertsArgs& args, const Pieces& pieces, int64_t first_row)
      : stream_(stream),
        args_(args),
        experts_(*args.experts),
        pieces_(pieces),
        first_(first_row),
        rows_(std::min(pieces.rows, args.x.rows - first_row)),
        slots_(args.ids.cols),
        chunk_rows_(expert_chunk_rows(args.x.rows)),
        place_(experts_, pieces, slots_),
        memory_(static_cast<std::byte*>(args.workspace)) {
    const bool few = args.way == ExpertsWay::kChosen ? args.x.rows <= kRowsWayRows : args.way == ExpertsWay::kRows;
    rows_way_ = few && experts_.outer_formats().size() == 1;
    grid_.rows = rows_;
    grid_.pairs = few ? rows_ * slots_ : most_expert_chunks(rows_ * slots_, experts_.count(), chunk_rows_);
    grouped_ = !few;
  }

  void run() {
    if (grouped_) {
      group_experts(stream_, ids(), args_.ids.stride, rows_, slots_, experts_.count(), chunk_rows_, lists());
    }
    inner();
    for (int64_t first = 0; first < experts_.slices(); first += pieces_.slices) {
      outer(first, std::min(pieces_.slices, experts_.slices() - first));
    }
  }

 private:
  const float* ids() const { return args_.ids.data + first_ * args_.ids.stride; }
  const float* weights() const { return args_.weights.data + first_ * args_.weights.stride; }
  ExpertLists lists() const {
    return {reinterpret_cast<int32_t*>(memory_ + place_.pairs), reinterpret_cast<ExpertChunk*>(memory_ + place_.chunks),
            reinterpret_cast<int32_t*>(memory_ + place_.chunk_count)};
  }

  ExpertProductArgs common() const {
    ExpertProductArgs p;
    p.experts = static_cast<int32_t>(experts_.count());
    p.ids = ids();
    p.weights = weights();
    p.ids_stride = args_.ids.stride;
    p.weights_stride = args_.weights.stride;
    p.slots = static_cast<int32_t>(slots_);
    if (grouped_) {
      const ExpertLists found = lists();
      p.pairs = found.pairs;
      p.chunks = found.chunks;
      p.chunk_count = found.chunk_count;
    }
    p.gated = experts_.gated();
    p.limit = args_.limit;
    return p;
  }

  void launch(ExpertFormat format, const ExpertProductArgs& p, bool rows_way) const {
    const int chunk = grouped_ ? chunk_rows_ : expert_chunk_rows(1);
    switch (format.kind) {
      case CudaWeightKind::kBf16:
        launch_experts_bf16(p, grid_, rows_way, chunk, stream_);
        return;
      case CudaWeightKind::kAffine4:
        launch_experts_affine4(p, format.sets, grid_, rows_way, chunk, stream_);
        return;
      case CudaWeightKind::kAffine8:
        launch_experts_affine8(p, format.sets, grid_, rows_way, chunk, stream_);
        return;
      case CudaWeightKind::kAffine4Wide:
      case CudaWeightKind::kAffine8Wide:
        launch_experts_wide(format.kind, p, format.sets, grid_, rows_way, chunk, stream_);
        return;
      case CudaWeightKind::kFp8:
      case CudaWeightKind::kFp4:
        launch_experts_small_floats(format.kind, p, format.sets, grid_, rows_way, chunk, stream_);
        return;
    }
  }

  void inner() const {
    ExpertProductArgs p = common();
    p.matrices = experts_.inner();
    p.x = args_.x.data + first_ * args_.x.stride;
    p.x_stride = args_.x.stride;
    p.inner = true;
    p.out = memory_ + place_.inner;
    p.out_stride = inner_stride(experts_);
    p.tiles = static_cast<int32_t>(experts_.inner_tiles());
    for (const ExpertFormat& format : experts_.inner_formats()) launch(format, p, false);
  }

  void outer(int64_t first, int64_t count) const {
    ExpertProductArgs p = common();
    p.matrices = experts_.outer();
    p.per_expert = static_cast<int32_t>(experts_.slices());
    p.first_matrix = static_cast<int32_t>(first);
    p.matrix_count = static_cast<int32_t>(count);
    p.x = reinterpret_cast<const __nv_bfloat16*>(memory_ + place_.inner);
    p.x_stride = inner_stride(experts_);
    p.tiles = static_cast<int32_t>(experts_.outer_tiles());
    p.partial_cols = static_cast<int32_t>(experts_.hidden());
    for (int64_t s = 0; s < count; ++s) {
      const DeviceMatrix& out = args_.partial[static_cast<size_t>(first + s)];
      p.partial[s] = out.data + first_ * out.stride;
    }
    if (rows_way_) {
      p.out_stride = args_.partial[0].stride;
      launch(experts_.outer_formats()[0], p, true);
      return;
    }
    p.out = memory_ + place_.outputs;
    p.out_stride = output_stride(experts_);
    p.matrix_stride = rows_ * slots_ * p.out_stride;
    for (const ExpertFormat& format : experts_.outer_formats()) launch(format, p, false);
    ExpertSumArgs sum;
    sum.y = static_cast<const float*>(p.out);
    sum.y_stride = p.out_stride;
    sum.matrix_stride = p.matrix_stride;
    sum.ids = p.ids;
    sum.weights = p.weights;
    sum.ids_stride = p.ids_stride;
    sum.weights_stride = p.weights_stride;
    sum.slots = p.slots;
    sum.experts = p.experts;
    sum.cols = p.partial_cols;
    sum.partial_stride = args_.partial[0].stride;
    std::copy(std::begin(p.partial), std::end(p.partial), std::begin(sum.partial));
    sum_experts(stream_, sum, rows_, count);
  }

  const cudaStream_t stream_;
  const CudaExpertsArgs& args_;
  const CudaExperts& experts_;
  const Pieces& pieces_;
  const int64_t first_, rows_, slots_;
  const int chunk_rows_;
  const Workspace place_;
  std::byte* const memory_;
  bool rows_way_ = false, grouped_ = false;
  ExpertGrid grid_;
};

}  // namespace

int64_t cuda_experts_workspace(const CudaExperts& experts, int64_t rows, int64_t slots) {
  return Workspace(experts, Pieces(experts, std::max<int64_t>(rows, 1), slots), slots).bytes;
}

void cuda_experts(cudaStream_t stream, const CudaExpertsArgs& args) {
  if (args.x.rows == 0) return;
  kernel_check(
      args.ids.cols <= kMostExpertSlots && args.x.stride % 8 == 0 && reinterpret_cast<uintptr_t>(args.x.data) % 16 == 0,
      "experts: shapes do not fit");
  for (const DeviceMatrix& out : args.partial) {
    kernel_check(out.stride == args.partial[0].stride, "experts: strides differ");
  }
  const Pieces pieces(*args.experts, args.x.rows, args.ids.cols);
  for (int64_t row = 0; row < args.x.rows; row += pieces.rows) Piece(stream, args, pieces, row).run();
}

}  // namespace tensorfold
