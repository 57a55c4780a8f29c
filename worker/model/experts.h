// A mixture of experts in place of an MLP: router, experts, and a shared expert, with or without a sigmoid gate.
//
// Every rank has all experts and a slice of each one's columns, so any world works and no row travels. The router is
// replicated: every rank computes its logits whole and chooses the same experts.
#pragma once

#include "worker/model/blocks.h"

namespace tensorfold {

class ExpertsBlock {
 public:
  /// `prefix` like "layers.3.mlp". Reads `gate` (the router), the experts in any of three namings (one module each:
  /// `experts.E.gate_proj`; stacked: `experts.gate_up_proj`, or `experts.up_proj` without gates; stacked by MLX:
  /// `switch_mlp.gate_proj`, or `switch_mlp.fc1` without gates), and the shared expert with `shared_expert_gate` where
  /// the configuration has them. `by_token`: a table `gate.tid2eid` [vocabulary, chosen] gives each token's experts,
  /// and the router their weights.
  static absl::StatusOr<std::unique_ptr<ExpertsBlock>> load(LoadContext& load, const std::string& prefix,
                                                            bool by_token = false);
  /// residual += tree over slices of the sum, in ascending slot order, of weight * expert(x); x [rows, hidden] normed.
  absl::Status add_to(PassContext& pass, int layer, Tensor x, Tensor residual) const;
  /// What one row reads: its chosen experts, the shared one and the router.
  WeightCost cost() const;

 private:
  Cut cut_;
  int64_t count_ = 0;
  int64_t chosen_ = 0;  // experts of a row, the shared one not counted
  bool shared_ = false;
  bool shared_gate_ = false;
  bool renormalise_ = false;
  RouterScore score_ = RouterScore::kSoftmax;
  float scale_ = 1.0f;
  float limit_ = 0.0f;              // of gates and ups; 0: none
  std::unique_ptr<Weight> table_;   // a token's experts, as fp32 numbers; null: the router chooses
  std::unique_ptr<Vector> bias_;    // [experts], of the choice; null: none
  std::unique_ptr<Weight> router_;  // [experts, or one more: the shared expert's gate, hidden]
  std::unique_ptr<ExpertWeights> experts_;
};

}  // namespace tensorfold
