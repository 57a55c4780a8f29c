// Which plans of additions have kernels of their own.
#include <array>

#include "kernels/cuda/rowwise_vec.cuh"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

// Sums as numbers: 0..15 are the parts, and equal sums of two get equal numbers, whoever is left or right.
class SumNames {
 public:
  int add(int a, int b) {
    const std::array<int, 2> pair = a < b ? std::array<int, 2>{a, b} : std::array<int, 2>{b, a};
    for (int i = 0; i < count_; ++i) {
      if (pairs_[i] == pair) return 16 + i;
    }
    pairs_[count_] = pair;
    return 16 + count_++;
  }

 private:
  std::array<std::array<int, 2>, 32> pairs_;  // 16 steps of a plan and up to 7 of the balanced tree
  int count_ = 0;
};

}  // namespace

void check_tree(const CudaTreeSum& sum) {
  kernel_check(sum.part_count >= 1 && sum.part_count <= 16 && sum.step_count >= 0 && sum.step_count <= 16,
               "tree sum: 1 to 16 parts, at most 16 steps");
  for (int s = 0; s < sum.step_count; ++s) {
    const AddStep& step = sum.steps[s];
    kernel_check(step.dst >= 0 && step.dst < sum.part_count && step.src >= 0 && step.src < sum.part_count,
                 "tree sum: a step outside the parts");
  }
}

int balanced_parts(const CudaTreeSum& sum) {
  const int parts = sum.part_count;
  if (parts != 1 && parts != 2 && parts != 4 && parts != 8) return 0;
  SumNames names;
  std::array<int, 16> planned;
  std::array<int, 16> balanced;
  for (int i = 0; i < 16; ++i) planned[i] = balanced[i] = i;
  for (int s = 0; s < sum.step_count; ++s) {
    planned[sum.steps[s].dst] = names.add(planned[sum.steps[s].dst], planned[sum.steps[s].src]);
  }
  for (int distance = 1; distance < parts; distance *= 2) {
    for (int i = 0; i < parts; i += 2 * distance) balanced[i] = names.add(balanced[i], balanced[i + distance]);
  }
  return planned[0] == balanced[0] ? parts : 0;
}

}  // namespace tensorfold
