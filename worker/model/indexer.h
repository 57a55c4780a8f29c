// The indexer of attention over chosen keys (qwen4_exp): scores windows of consecutive tokens by their mean index key.
// Replicated: every rank chooses the same windows.
#pragma once

#include "worker/model/blocks.h"

namespace tensorfold {

class IndexerBlock {
 public:
  /// `prefix` like "layers.3.self_attn.indexer"; index keys go to layer `rows` of the row cache, means to the next.
  static absl::StatusOr<std::unique_ptr<IndexerBlock>> load(LoadContext& load, const std::string& prefix, int64_t rows);
  /// Writes the rows' index keys and the means that they complete.
  void write_keys(PassContext& pass, Tensor x) const;
  /// The same, then the windows of each row: [rows, budget / tokens], numbers ascending, then -1.
  Tensor select(PassContext& pass, int layer, const RopeTable& rope, Tensor x) const;
  int64_t window_tokens() const { return config_.tokens; }
  WeightCost cost() const { return cost_of(*qk_); }

 private:
  /// Index queries and keys [rows, (heads + 1) * head_dim], the keys written.
  Tensor project(PassContext& pass, Tensor x) const;

  IndexerConfig config_;
  int64_t rows_ = 0;
  float eps_ = 0;
  std::unique_ptr<Weight> qk_;
  std::unique_ptr<Vector> q_norm_;
  std::unique_ptr<Vector> k_norm_;
  std::unique_ptr<Vector> inv_freq_;
};

/// The row cache layers of one indexer: a key a token, a mean a window.
std::vector<RowCacheLayer> indexer_layers(const IndexerConfig& config);

}  // namespace tensorfold
