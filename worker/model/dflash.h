// DFlash and DFlash2: block drafters that are checkpoints of their own.
//
// A context row is made of the taps by one projection and a norm; each layer keeps its keys and values. Row j of a
// block guesses the token of its own position.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "worker/checkpoint/dflash_config.h"
#include "worker/model/block_drafter.h"

namespace tensorfold {

/// InvalidArgument when the world is wider than the smallest S, naming the dimension.
absl::StatusOr<DrafterShape> drafter_shape(const DflashConfig& config, ShardSpec shard);

DrafterFacts drafter_facts(const DflashConfig& config);

class DflashDrafter : public BlockDrafter {
 public:
  ~DflashDrafter() override;
  /// Loads this rank's slices. Errors name the tensor or what the backend lacks.
  static absl::StatusOr<std::unique_ptr<BlockDrafter>> load(const DflashConfig& config, WeightReader& reader, Ops& ops,
                                                            ShardSpec shard);

  const DrafterFacts& facts() const override { return facts_; }
  const DrafterShape& shape() const override { return shape_; }
  int64_t weight_bytes() const override { return cost().bytes; }
  int64_t context_bytes() const override;
  absl::Status add_context(PassContext& pass, Tensor taps) const override;
  absl::Status block(PassContext& pass, Model& target, Tensor* hidden) const override;
  absl::StatusOr<std::vector<std::vector<int32_t>>> choose(const BlockRows& rows) const override;

 private:
  struct Layer;
  struct Conv;

  DflashDrafter(DflashConfig config, DrafterShape shape);
  // DFlash2: one block's drafts. `hidden` [n, hidden] are its rows behind the anchor, `candidates` their best tokens.
  // Float64 on the host in a fixed order, so that every rank chooses alike.
  std::vector<int32_t> select(Ops& ops, Tensor hidden, std::span<const std::vector<Candidate>> candidates,
                              int32_t anchor) const;
  absl::Status load_parts(LoadContext& load);
  absl::StatusOr<std::unique_ptr<Layer>> load_layer(LoadContext& load, int64_t index);
  absl::StatusOr<std::unique_ptr<Conv>> load_conv(LoadContext& load, const std::string& prefix);
  void project_keys(PassContext& pass, const Layer& layer, const RopeTable& rope, Tensor x, Tensor kv) const;
  absl::Status attend(PassContext& pass, int64_t index, const RopeTable& rope, Tensor x, Tensor out) const;
  /// residual += sublayer(normed), with the layer's convolutions around it where it has some.
  template <typename Sublayer>
  absl::Status run_sublayer(PassContext& pass, const Conv* conv, Tensor normed, Tensor residual,
                            const Sublayer& sublayer) const;
  WeightCost cost() const;

  const DflashConfig config_;
  const DrafterFacts facts_;
  const DrafterShape shape_;
  float eps_ = 0;
  int64_t local_heads_ = 0;
  std::vector<int32_t> kv_head_of_;
  TapProjection taps_;
  std::unique_ptr<Vector> inv_freq_;
  double attention_factor_ = 1.0;
  std::unique_ptr<Vector> norm_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::unique_ptr<Weight> selector_hidden_;       // [rank, hidden]
  std::unique_ptr<Weight> selector_predecessor_;  // [vocab, rank]: every rank reads any row
  std::unique_ptr<Weight> selector_successor_;
};

}  // namespace tensorfold
