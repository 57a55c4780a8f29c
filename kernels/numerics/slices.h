// Slices: how a dimension that tensor parallelism can cut is cut (contract, section 2).
//
// A dimension of `units` (heads, key/value groups, quantisation groups) has S slices, where S depends on the dimension
// alone and never on the cluster. A rank owns a contiguous run of whole slices.
#pragma once

#include <cstdint>
#include <vector>

namespace tensorfold {

/// The most slices that a dimension is cut into, and so the widest world.
inline constexpr int64_t kMaxSlices = 8;

/// A cut dimension: `units` units in `count` slices of units / count units each.
struct Slices {
  int64_t units = 0;
  int64_t count = 1;  // S: 1, 2, 4 or 8; divides units

  int64_t units_per_slice() const { return units / count; }
};

/// A contiguous run of slices: [first, first + count).
struct SliceRange {
  int64_t first = 0;
  int64_t count = 0;

  int64_t end() const { return first + count; }
  bool operator==(const SliceRange&) const = default;
};

/// S of a dimension with `units` units (>= 1): 8, or the largest power of two that divides `units`.
int64_t slice_count(int64_t units);

/// `units` with its slice count.
Slices make_slices(int64_t units);

/// The run that rank `rank` of `world` owns of S slices: as even as possible, larger runs first (S = 8, world = 3: 3,
/// 3, 2). Requires 1 <= world <= S and 0 <= rank < world.
SliceRange owned_slices(int64_t slices, int64_t world, int64_t rank);

/// The widest world of a model that cuts all these dimensions: the smallest S (kMaxSlices when there is none).
int64_t widest_world(const std::vector<Slices>& dimensions);

}  // namespace tensorfold
