// Ops' products, and the sums over slices of their outputs. Both wait for the operation after them: products of many
// rows for the sum whose parts they are, so that blocks add up what they can, and a sum for the norm of what it is
// added to, which is one launch with it. Whatever else comes calls flush() first. The bits are those of one after
// another.
#include "kernels/cuda/cuda_ops_impl.h"
#include "kernels/cuda/matmul_views.h"

namespace tensorfold {
namespace {

constexpr size_t kMostJobs = 8;  // of a call of cuda_matmul

CudaTreeSum tree_of(std::span<const Tensor> parts, std::span<const AddStep> steps) {
  CudaTreeSum sum;
  kernel_check(parts.size() <= std::size(sum.parts) && steps.size() <= std::size(sum.steps), "sum: too many parts");
  for (const Tensor& part : parts) {
    kernel_check(part.stride == parts[0].stride, "sum: strides differ");
    sum.parts[sum.part_count++] = matrix_of(part).data;
  }
  sum.part_stride = parts[0].stride;
  for (const AddStep& step : steps) sum.steps[sum.step_count++] = step;
  return sum;
}

// Whether cuda_matmul_sum() takes them and may add anything up.
bool could_be_added(std::span<const CudaMatmulJob> jobs) {
  return (jobs.size() == 2 || jobs.size() == 4 || jobs.size() == 8) && jobs[0].x.rows > kSkinnyRows;
}

}  // namespace

void CudaOps::matmul_many(std::span<const MatmulJob> jobs) {
  flush();
  const std::vector<DeviceInput> inputs = rounded_inputs(jobs);
  std::vector<CudaMatmulJob> products;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const MatmulJob& job = jobs[i];
    kernel_check(job.x.cols == job.weight->in_features() && job.out.cols == job.weight->out_features() &&
                     job.x.rows == job.out.rows,
                 "matmul: shapes differ");
    products.push_back({&cuda_weight(*job.weight), inputs[i], matrix_of(job.out)});
  }
  if (could_be_added(products)) {
    held_products_ = std::move(products);
    return;
  }
  for (size_t first = 0; first < products.size(); first += kMostJobs) {
    cuda_matmul(stream_, std::span(products).subspan(first, std::min(kMostJobs, products.size() - first)));
  }
}

void CudaOps::sum_tree(std::span<const Tensor> parts, std::span<const AddStep> steps, Tensor into) {
  held_sum_ = sum_of(parts, steps);
  held_residual_ = matrix_of(into);
  held_ = true;
}

void CudaOps::fold(std::span<const Tensor> parts, std::span<const AddStep> steps, std::span<const int> roots,
                   std::span<const Tensor> out) {
  std::array<DeviceMatrix, 16> outs;
  kernel_check(roots.size() == out.size() && out.size() <= outs.size(), "fold: too many roots");
  for (size_t i = 0; i < out.size(); ++i) outs[i] = matrix_of(out[i]);
  const bool one = roots.size() == 1 && roots[0] == 0;
  if (!one) flush();  // of several nodes each part counts
  const CudaTreeSum sum = one ? sum_of(parts, steps) : tree_of(parts, steps);
  cuda_fold(stream_, sum, parts[0].rows, parts[0].cols, roots.data(), static_cast<int>(roots.size()), outs.data());
}

CudaTreeSum CudaOps::sum_of(std::span<const Tensor> parts, std::span<const AddStep> steps) {
  const CudaTreeSum whole = tree_of(parts, steps);
  const size_t count = held_products_.size();
  bool products = count > 0 && parts.size() == count && balanced_parts(whole) == static_cast<int>(count);
  for (size_t i = 0; products && i < count; ++i) products = held_products_[i].out.data == whole.parts[i];
  if (!products) {
    flush();
    return whole;
  }
  const int added = cuda_matmul_sum(stream_, held_products_);
  held_products_.clear();
  CudaTreeSum left;
  left.part_stride = whole.part_stride;
  for (size_t i = 0; i < count; i += static_cast<size_t>(added)) left.parts[left.part_count++] = whole.parts[i];
  for (const AddStep& step : fold_plan(left.part_count, {0, left.part_count})) left.steps[left.step_count++] = step;
  return left;
}

void CudaOps::flush() {
  if (!held_products_.empty()) {
    cuda_matmul(stream_, held_products_);
    held_products_.clear();
  }
  if (!held_) return;
  held_ = false;
  // Wider than any norm (several streams at once): in pieces, each element by itself.
  for (int64_t first = 0; first < held_residual_.cols; first += kMostNormColumns) {
    CudaTreeSum sum = held_sum_;
    DeviceMatrix residual = held_residual_;
    for (int i = 0; i < sum.part_count; ++i) sum.parts[i] += first;
    residual.data += first;
    residual.cols = std::min(kMostNormColumns, held_residual_.cols - first);
    cuda_sum_norm(stream_, sum, residual, nullptr, 0, {}, {});
  }
}

}  // namespace tensorfold
