// A Mamba2 mixer, cut into whole groups of heads.
#pragma once

#include "worker/model/blocks.h"

namespace tensorfold {

struct Mamba2Spec {
  Mamba2Config config;
  Slices slices;  // of groups
};

/// This rank's part.
Mamba2Shape local_mamba2(const Mamba2Spec& spec, const Cut& cut);

/// Short convolution with bias, selective state space, gate, norm of each group.
class Mamba2Block {
 public:
  /// `prefix` like "layers.0.mixer".
  static absl::StatusOr<std::unique_ptr<Mamba2Block>> load(LoadContext& load, const std::string& prefix,
                                                           const Mamba2Spec& spec, int64_t recurrent_layer);
  /// residual += mixer(x), x [rows, hidden] normed.
  absl::Status add_to(PassContext& pass, int layer, Tensor x, Tensor residual) const;
  WeightCost cost() const { return cost_of(*in_) += out_.cost(); }

 private:
  Mamba2Shape shape_;
  int64_t first_group_ = 0;
  int64_t recurrent_layer_ = 0;
  float eps_ = 0;
  float least_step_ = 0;
  float most_step_ = 0;
  std::unique_ptr<Weight> in_;  // z | x | B | C | dt
  std::unique_ptr<Vector> conv_;
  std::unique_ptr<Vector> conv_bias_;  // null: none
  std::unique_ptr<Vector> a_log_;
  std::unique_ptr<Vector> dt_bias_;
  std::unique_ptr<Vector> d_;
  std::unique_ptr<Vector> norm_;
  SlicedProjection out_;
};

}  // namespace tensorfold
