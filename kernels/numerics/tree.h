// The one fixed binary tree over S slices (contract, section 2): ((s0+s1)+(s2+s3))+((s4+s5)+(s6+s7)) for S = 8.
//
// A rank adds inside the aligned subtrees that it owns whole; each such subtree is a node. Every rank then receives all
// nodes and finishes the same tree. Both halves are plans: lists of additions `buffer[dst] += buffer[src]`, to be done
// in order on whatever the caller's elements are. IEEE addition commutes, so only the shape of the tree matters.
//
//   SliceRange mine = owned_slices(S, world, rank);
//   for (AddStep s : fold_plan(S, mine)) part[s.dst] += part[s.src];     // part[i] is slice mine.first + i
//   // node j of this rank is now part[owned_nodes(S, mine)[j].first - mine.first]; exchange nodes in rank order
//   for (AddStep s : finish_plan(S, world)) node[s.dst] += node[s.src];  // the sum is node[0]
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/numerics/slices.h"

namespace tensorfold {

/// buffer[dst] += buffer[src].
struct AddStep {
  int dst = 0;
  int src = 0;
  bool operator==(const AddStep&) const = default;
};

/// The maximal aligned subtrees inside `run`, ascending: sizes are powers of two and `first` is a multiple of the size.
/// S must be a power of two and hold the run.
std::vector<SliceRange> owned_nodes(int64_t slices, SliceRange run);

/// Additions that fold the slices of `run` to its nodes. Indices count from run.first; node n ends up at n.first -
/// run.first.
std::vector<AddStep> fold_plan(int64_t slices, SliceRange run);

/// The nodes of all ranks of a world, in rank order: rank r's are [offsets[r], offsets[r + 1]).
struct WorldNodes {
  std::vector<SliceRange> nodes;
  std::vector<int64_t> offsets;  // world + 1 entries
};
WorldNodes world_nodes(int64_t slices, int64_t world);

/// Additions that finish the tree from all nodes in rank order. Indices count nodes; the sum ends up at 0.
std::vector<AddStep> finish_plan(int64_t slices, int64_t world);

/// Runs a plan: add(dst, src) for each step, in order.
template <typename Add>
void run_plan(const std::vector<AddStep>& plan, Add&& add) {
  for (const AddStep& step : plan) add(step.dst, step.src);
}

}  // namespace tensorfold
