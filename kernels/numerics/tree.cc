#include "kernels/numerics/tree.h"

#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

// Additions that fold the aligned subtree [first, first + count) onto its first element, shifted by -origin.
void fold_subtree(int64_t first, int64_t count, int64_t origin, std::vector<AddStep>* plan) {
  if (count == 1) return;
  const int64_t half = count / 2;
  fold_subtree(first, half, origin, plan);
  fold_subtree(first + half, half, origin, plan);
  plan->push_back({static_cast<int>(first - origin), static_cast<int>(first + half - origin)});
}

// Finishes the subtree [first, first + count) from `nodes`; returns the index of the node that holds its sum. A subtree
// is either one node or the sum of its two halves, each of which is made of whole nodes.
int finish_subtree(int64_t first, int64_t count, const std::vector<SliceRange>& nodes, std::vector<AddStep>* plan) {
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].first == first && nodes[i].count == count) return static_cast<int>(i);
  }
  kernel_check(count > 1, "finish_plan: nodes do not cover all slices");
  const int64_t half = count / 2;
  const int left = finish_subtree(first, half, nodes, plan);
  const int right = finish_subtree(first + half, half, nodes, plan);
  plan->push_back({left, right});
  return left;
}

void check_slices(int64_t slices) {
  kernel_check(slices >= 1 && slices <= kMaxSlices && (slices & (slices - 1)) == 0,
               "the tree needs 1, 2, 4 or 8 slices");
}

}  // namespace

std::vector<SliceRange> owned_nodes(int64_t slices, SliceRange run) {
  check_slices(slices);
  kernel_check(run.first >= 0 && run.count >= 0 && run.end() <= slices, "owned_nodes: run outside the slices");
  std::vector<SliceRange> nodes;
  int64_t at = run.first;
  while (at < run.end()) {
    int64_t size = 1;
    while (at % (2 * size) == 0 && at + 2 * size <= run.end()) size *= 2;
    nodes.push_back({at, size});
    at += size;
  }
  return nodes;
}

std::vector<AddStep> fold_plan(int64_t slices, SliceRange run) {
  std::vector<AddStep> plan;
  for (const SliceRange& node : owned_nodes(slices, run)) fold_subtree(node.first, node.count, run.first, &plan);
  return plan;
}

WorldNodes world_nodes(int64_t slices, int64_t world) {
  WorldNodes all;
  all.offsets.push_back(0);
  for (int64_t rank = 0; rank < world; ++rank) {
    for (const SliceRange& node : owned_nodes(slices, owned_slices(slices, world, rank))) all.nodes.push_back(node);
    all.offsets.push_back(static_cast<int64_t>(all.nodes.size()));
  }
  return all;
}

std::vector<AddStep> finish_plan(int64_t slices, int64_t world) {
  std::vector<AddStep> plan;
  finish_subtree(0, slices, world_nodes(slices, world).nodes, &plan);
  return plan;
}

}  // namespace tensorfold
