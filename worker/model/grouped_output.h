// The end of DeepSeek's attention: groups of heads, each through a projection of its own, then all through one whose
// columns are cut by groups.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "worker/model/families.h"

namespace tensorfold {

class GroupedOutput {
 public:
  /// `prefix`.wo_a [groups * rank, heads of a group * head_dim], `prefix`.wo_b [hidden, groups * rank].
  static absl::StatusOr<GroupedOutput> load(LoadContext& load, const std::string& prefix);

  /// This rank's heads.
  int64_t first_head() const { return first_group_ * group_heads_; }
  int64_t heads() const { return groups_ * group_heads_; }
  /// residual += what `heads` [rows, own heads * head_dim] give.
  absl::Status add_to(PassContext& pass, int layer, Tensor heads, Tensor residual) const;
  WeightCost cost() const;

 private:
  int64_t dim_ = 0;
  int64_t rank_ = 0;
  int64_t group_heads_ = 0;
  int64_t first_group_ = 0;
  int64_t groups_ = 0;                         // this rank's
  std::vector<std::unique_ptr<Weight>> wo_a_;  // one a group
  SlicedProjection out_;
};

}  // namespace tensorfold
