#include "kernels/numerics/slices.h"

#include <algorithm>

#include "kernels/numerics/check.h"

namespace tensorfold {

int64_t slice_count(int64_t units) {
  kernel_check(units >= 1, "slice_count: a dimension has at least one unit");
  int64_t count = kMaxSlices;
  while (units % count != 0) count /= 2;
  return count;
}

Slices make_slices(int64_t units) { return {units, slice_count(units)}; }

SliceRange owned_slices(int64_t slices, int64_t world, int64_t rank) {
  kernel_check(world >= 1 && world <= slices && rank >= 0 && rank < world,
               "owned_slices: world must be 1..slices and rank 0..world-1");
  const int64_t each = slices / world;
  const int64_t larger = slices % world;
  return {rank * each + std::min(rank, larger), each + (rank < larger ? 1 : 0)};
}

int64_t widest_world(const std::vector<Slices>& dimensions) {
  int64_t widest = kMaxSlices;
  for (const Slices& d : dimensions) widest = std::min(widest, d.count);
  return widest;
}

}  // namespace tensorfold
