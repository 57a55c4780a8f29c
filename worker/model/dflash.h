// Block drafters (DFlash and DFlash2): a few layers on one rank that draft a block of tokens in one forward pass.
//
// What they read of the target are outputs of some of its layers ("taps"), one context row for each committed token:
// add_context() writes each layer's keys and values of those rows into a cache of the drafter's own, in the pages of
// the sequence's page table. block() computes the rows of a block, [last token | mask …], each over all cached rows
// before the block (or a window of them) and over the whole block. Embedding and head are the target's.
//
// A context row's keys depend on its taps alone, so they are written for all rows of a pass, tentative ones included:
// those of rejected rows lie behind the committed position and are written again before anybody reads them.
// Thread-safety: as Model.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "worker/checkpoint/dflash_config.h"
#include "worker/model/blocks.h"

namespace tensorfold {

/// What a rank of a world must hold for a drafter; known from its config alone.
struct DrafterShape {
  SlicePlan slices;
  int64_t kv_layers = 0;
  int64_t kv_heads = 0;  // this rank's
  int64_t head_dim = 0;
};

/// InvalidArgument when the world is wider than the smallest S, naming the dimension.
absl::StatusOr<DrafterShape> drafter_shape(const DflashConfig& config, ShardSpec shard);

class BlockDrafter {
 public:
  ~BlockDrafter();
  /// Unimplemented, naming the backend, where it computes no blocks.
  static absl::Status check_backend(const Ops& ops);
  /// Loads this rank's slices. Errors name the tensor or what the backend lacks.
  static absl::StatusOr<std::unique_ptr<BlockDrafter>> load(const DflashConfig& config, WeightReader& reader, Ops& ops,
                                                            ShardSpec shard);

  const DflashConfig& config() const { return config_; }
  const DrafterShape& shape() const { return shape_; }
  int64_t weight_bytes() const { return cost().bytes; }
  /// Bytes that adding context rows reads.
  int64_t context_bytes() const;

  /// Keys and values of pass.rows into pass.kv (the drafter's own cache), from their taps [rows, taps * hidden].
  absl::Status add_context(PassContext& pass, Tensor taps) const;
  /// Blocks of block_size rows, one a group of pass.rows, whose first position is the anchor's: `*hidden` [rows,
  /// hidden] is normed, for the target's head. Row j of a block predicts the token of its own position.
  absl::Status block(PassContext& pass, Model& target, Tensor* hidden) const;

  /// How many of the target head's best tokens choose() wants of each row; 1: the best one is the draft.
  int64_t candidates() const { return config_.second ? config_.selector_candidates : 1; }
  /// DFlash2: one block's drafts. `hidden` [n, hidden] are its rows behind the anchor, `candidates` their best tokens.
  /// Float64 on the host in a fixed order, so that every rank chooses alike.
  std::vector<int32_t> choose(Ops& ops, Tensor hidden, std::span<const std::vector<Candidate>> candidates,
                              int32_t anchor) const;

 private:
  struct Layer;
  struct Conv;

  BlockDrafter(DflashConfig config, DrafterShape shape);
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
  const DrafterShape shape_;
  float eps_ = 0;
  int64_t local_heads_ = 0;
  std::vector<int32_t> kv_head_of_;
  int64_t first_tap_column_ = 0;  // of this rank's slices of fc
  int64_t tap_columns_ = 0;
  SlicedProjection fc_;
  std::unique_ptr<Vector> inv_freq_;
  double attention_factor_ = 1.0;
  std::unique_ptr<Vector> hidden_norm_;
  std::unique_ptr<Vector> norm_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::unique_ptr<Weight> selector_hidden_;       // [rank, hidden]
  std::unique_ptr<Weight> selector_predecessor_;  // [vocab, rank]: every rank reads any row
  std::unique_ptr<Weight> selector_successor_;
};

}  // namespace tensorfold
