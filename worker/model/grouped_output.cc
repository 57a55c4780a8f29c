#include "worker/model/grouped_output.h"

namespace tensorfold {

absl::StatusOr<GroupedOutput> GroupedOutput::load(LoadContext& load, const std::string& prefix) {
  const ModelConfig& config = load.config;
  const Cut cut = make_cut(head_slices(config), load.shard);
  GroupedOutput output;
  output.dim_ = config.head_dim;
  output.rank_ = config.latent.out_rank;
  output.group_heads_ = config.heads / config.latent.out_groups;
  output.first_group_ = cut.first_unit();
  output.groups_ = cut.unit_count();
  const int64_t rank = output.rank_;
  absl::StatusOr<MatrixSource> wo_a =
      load.reader.matrix(prefix + ".wo_a", config.latent.out_groups * rank, output.group_heads_ * output.dim_);
  if (!wo_a.ok()) return wo_a.status();
  for (int64_t group = output.first_group_; group < output.first_group_ + output.groups_; ++group) {
    const MatrixSource part = wo_a->slice_rows(group * rank, rank);
    output.wo_a_.push_back(load.ops.pack({&part, 1}));
  }
  absl::StatusOr<SlicedProjection> out = SlicedProjection::load(load, prefix + ".wo_b", config.hidden_size, cut, rank);
  if (!out.ok()) return out.status();
  output.out_ = *std::move(out);
  return output;
}

absl::Status GroupedOutput::add_to(PassContext& pass, int layer, Tensor heads, Tensor residual) const {
  const Tensor grouped = pass.ops->scratch(heads.rows, groups_ * rank_);
  const int64_t columns = group_heads_ * dim_;
  std::vector<MatmulJob> jobs;
  for (int64_t g = 0; g < groups_; ++g) {
    jobs.push_back(
        {wo_a_[static_cast<size_t>(g)].get(), heads.columns(g * columns, columns), grouped.columns(g * rank_, rank_)});
  }
  pass.ops->matmul_many(jobs);
  pass.record(layer, "attention.groups", grouped, first_group_, groups_);
  return out_.add_to(pass, layer, "attention.wo_b", grouped, residual);
}

WeightCost GroupedOutput::cost() const {
  WeightCost cost = out_.cost();
  for (const auto& weight : wo_a_) cost += cost_of(*weight);
  return cost;
}

}  // namespace tensorfold
