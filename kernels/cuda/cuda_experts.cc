// Ops' three operations of mixtures of experts.
#include <bit>

#include "kernels/cuda/cuda_ops_impl.h"
#include "kernels/cuda/experts.h"

namespace tensorfold {

std::unique_ptr<ExpertWeights> CudaOps::pack_experts(std::span<const ExpertSource> experts) {
  use_device();
  std::string error;
  std::unique_ptr<CudaExperts> packed = CudaExperts::create(experts, &error);
  if (packed == nullptr) {
    if (error.empty()) error = "experts: " + cuda_failure();
    kernel_check(false, error.c_str());
  }
  return packed;
}

void CudaOps::route(const RouteArgs& in) {
  flush();
  const bool gated = in.shared_gate.data != nullptr, shared = gated || in.shared_always;
  const int64_t experts = in.logits.cols, slots = in.ids.cols, chosen = slots - (shared ? 1 : 0);
  kernel_check(chosen >= 1 && chosen <= experts && slots <= kMostExpertSlots && in.weights.cols == slots &&
                   in.ids.rows == in.logits.rows && in.weights.rows == in.logits.rows &&
                   (!gated || in.shared_gate.rows == in.logits.rows) &&
                   (in.bias == nullptr || in.bias->size() == experts),
               "route: shapes differ");
  CudaRouteArgs args;
  args.logits = matrix_of(in.logits);
  if (gated) {
    args.shared_gate = matrix_of(in.shared_gate).data;
    args.shared_stride = in.shared_gate.stride;
  }
  args.shared = shared;
  args.given = in.given;
  args.score = in.score;
  args.bias = vector_data(in.bias);
  args.renormalise = in.renormalise;
  args.scale = in.scale;
  args.ids = matrix_of(in.ids);
  args.weights = matrix_of(in.weights);
  if (in.rows.device != nullptr) {
    const DeviceRows& rows = device_rows(in.rows);
    kernel_check(rows.rows == in.logits.rows, "route: not the rows of the pass");
    args.group_of = rows.group_of;
  }
  cuda_route(stream_, args);
}

void CudaOps::experts(const ExpertsArgs& in) {
  flush();
  const auto& experts = static_cast<const CudaExperts&>(*in.experts);
  kernel_check(in.x.cols == experts.hidden() && in.ids.rows == in.x.rows && in.weights.rows == in.x.rows &&
                   in.ids.cols == in.weights.cols && in.ids.cols >= 1 && in.ids.cols <= kMostExpertSlots &&
                   static_cast<int64_t>(in.partial.size()) == experts.slices(),
               "experts: shapes differ");
  std::array<DeviceMatrix, kMostExpertSlices> partial;
  for (size_t s = 0; s < in.partial.size(); ++s) {
    kernel_check(in.partial[s].rows == in.x.rows && in.partial[s].cols == in.x.cols, "experts: shapes differ");
    partial[s] = matrix_of(in.partial[s]);
  }
  const ScratchScope scope(*this);
  CudaExpertsArgs args;
  args.experts = &experts;
  args.x = rounded(in.x);
  args.ids = matrix_of(in.ids);
  args.weights = matrix_of(in.weights);
  args.partial = std::span<const DeviceMatrix>(partial.data(), in.partial.size());
  args.limit = in.limit;
  // For rows rounded up to a power of two: the arena gives nothing back, and prompts of every length come by.
  const auto bucket = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(in.x.rows, 1))));
  args.workspace = take(std::max(cuda_experts_workspace(experts, in.x.rows, in.ids.cols),
                                 cuda_experts_workspace(experts, bucket, in.ids.cols)));
  cuda_experts(stream_, args);
}

}  // namespace tensorfold
