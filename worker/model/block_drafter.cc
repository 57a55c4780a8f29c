#include "worker/model/block_drafter.h"

#include <fmt/format.h>

#include "worker/model/families.h"

namespace tensorfold {
namespace {

// Columns that a slice may end on: whole groups, whole vectors, or less where there would not be as many slices as a
// world may have ranks.
int64_t unit_of(const TapProjection::Size& size) {
  if (size.group.has_value()) return *size.group;
  int64_t unit = 16;
  while (unit > 1 && (size.width % unit != 0 || make_slices(size.taps * size.width / unit).count < kMaxSlices)) {
    unit /= 2;
  }
  return unit;
}

Slices slices_of(const TapProjection::Size& size) { return make_slices(size.taps * size.width / unit_of(size)); }

}  // namespace

absl::StatusOr<SlicePlan> TapProjection::plan(const Size& size, ShardSpec shard) {
  const int64_t columns = size.taps * size.width, unit = unit_of(size);
  if (columns % unit != 0) {
    return absl::InvalidArgumentError(
        fmt::format("the drafter's {} tap columns do not end on a quantisation group of {}", columns, unit));
  }
  ModelShape shape;
  if (absl::Status s = add_dimension(shape, "drafter's tap columns", slices_of(size), shard); !s.ok()) return s;
  return shape.slices;
}

absl::StatusOr<TapProjection> TapProjection::load(LoadContext& load, const std::string& projection,
                                                  const std::string& norm, const Size& size) {
  TapProjection taps;
  const Cut cut = make_cut(slices_of(size), load.shard);
  const int64_t unit = unit_of(size);
  taps.first_column_ = cut.first_unit() * unit;
  taps.columns_ = cut.unit_count() * unit;
  absl::Status status = take(SlicedProjection::load(load, projection, size.hidden, cut, unit), &taps.projection_);
  if (!status.ok()) return status;
  if (status = take(packed_norm(load, norm, size.hidden), &taps.norm_); !status.ok()) return status;
  return taps;
}

absl::Status TapProjection::make_rows(PassContext& pass, Tensor taps, float eps, Tensor normed) const {
  Ops& ops = *pass.ops;
  const ScratchScope scope(ops);
  const Tensor context = ops.scratch(taps.rows, normed.cols);
  ops.clear(context);
  const absl::Status summed =
      projection_.add_to(pass, -1, "drafter.taps", taps.columns(first_column_, columns_), context);
  if (!summed.ok()) return summed;
  ops.rms_norm(context, 1, *norm_, eps, normed);
  return absl::OkStatus();
}

int64_t DrafterShape::row_page_bytes() const {
  int64_t values = 0;
  for (const RowCacheLayer& layer : row_layers) values += kPageTokens / layer.tokens * layer.width;
  return values * static_cast<int64_t>(sizeof(float));
}

absl::Status BlockDrafter::check_backend(const Ops& ops, std::string_view source) {
  if (ops.supports_block_drafts()) return absl::OkStatus();
  return absl::UnimplementedError(fmt::format(
      "{} drafts blocks of rows at once, which backend {} does not compute: run it with backend cpu, or with "
      "another draft.kind",
      source, ops.fingerprint_name()));
}

}  // namespace tensorfold
