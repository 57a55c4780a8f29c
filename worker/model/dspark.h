// DSpark: the block drafter that checkpoints of deepseek_v4 and deepseek_v41 bring along, stages under `mtp.*` made
// like the model's layers.
//
// A context row is made of the taps by one projection and a norm; each stage keeps a latent of it, key and value at
// once. A block's rows see the last `sliding_window` of those before the block and all rows of the block, without
// order. Row j guesses the token behind its own position: of the target head's logits plus what a Markov head says of
// the token guessed before, the best. Tokens are therefore chosen one after the other, each with an exchange. The
// confidence head is left unread: how wide a window is, is decided before its block is computed.
#pragma once

#include <memory>
#include <vector>

#include "worker/model/block_drafter.h"
#include "worker/model/grouped_output.h"
#include "worker/model/streamed_layer.h"

namespace tensorfold {

/// `config.dspark` has stages. InvalidArgument when the world is wider than the smallest S, naming the dimension.
absl::StatusOr<DrafterShape> dspark_shape(const ModelConfig& config, ShardSpec shard);
DrafterFacts dspark_facts(const ModelConfig& config);

class DsparkDrafter : public BlockDrafter {
 public:
  /// Loads this rank's slices from the model's own files, of which `reader` reads the drafter's (Layout::of_drafter).
  /// Errors name the tensor or what the backend lacks.
  static absl::StatusOr<std::unique_ptr<BlockDrafter>> load(const ModelConfig& config, WeightReader& reader, Ops& ops,
                                                            ShardSpec shard);

  const DrafterFacts& facts() const override { return facts_; }
  const DrafterShape& shape() const override { return shape_; }
  int64_t weight_bytes() const override { return cost().bytes; }
  int64_t context_bytes() const override;
  absl::Status add_context(PassContext& pass, Tensor taps) const override;
  absl::Status block(PassContext& pass, Model& target, Tensor* hidden) const override;
  absl::StatusOr<std::vector<std::vector<int32_t>>> choose(const BlockRows& rows) const override;

 private:
  struct Stage {
    StreamedLayer blocks;
    std::unique_ptr<Weight> query_a;  // whole everywhere
    std::unique_ptr<Weight> query_b;  // of this rank's heads
    std::unique_ptr<Weight> keys;     // whole everywhere
    std::unique_ptr<Vector> query_norm, keys_norm, sinks;
    GroupedOutput out;
  };

  DsparkDrafter(const ModelConfig& config, DrafterShape shape);
  absl::Status load_parts(LoadContext& load);
  absl::Status load_head(LoadContext& load);
  absl::StatusOr<Stage> load_stage(LoadContext& load, int64_t index) const;
  // Rows [rows, head_dim] of a stage, as they are cached.
  Tensor make_keys(PassContext& pass, const Stage& stage, const RopeTable& rope, Tensor x) const;
  absl::Status attend(PassContext& pass, int64_t index, const RopeTable& rope, Tensor x, Tensor out) const;
  WeightCost cost() const;

  const ModelConfig config_;  // the model's, with the drafter's experts
  const DrafterFacts facts_;
  const DrafterShape shape_;
  const bool v41_;     // streams are collapsed by what the site before said; queries are not normed by head
  const bool rounds_;  // cached rows are rounded as a part of the model
  const float eps_;
  TapProjection taps_;
  std::unique_ptr<Vector> norm_;
  std::unique_ptr<Vector> inv_freq_;
  std::unique_ptr<Vector> ones_;  // deepseek_v4: each head's query is normed without weights
  std::vector<Stage> stages_;
  std::unique_ptr<HyperHead> head_;     // deepseek_v4
  std::unique_ptr<Weight> markov_in_;   // [vocab, rank]: every rank reads any row
  std::unique_ptr<Weight> markov_out_;  // [local vocab, rank]
};

}  // namespace tensorfold
