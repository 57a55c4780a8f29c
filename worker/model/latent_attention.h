// Sparse attention over latents (glm5_next): no keys and values of heads are kept, only a latent a token that every
// head reads in its own space; an indexer chooses which windows of tokens a row sees.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "worker/model/families.h"

namespace tensorfold {

/// The layers of the row cache that an attention layer has.
struct LatentRows {
  int64_t latent = 0;
  int64_t index = -1;   // the indexer's keys | gates, a row a token
  int64_t pooled = -1;  // its pooled keys
};

/// Adds the row layers of one attention layer, with an indexer of its own or without.
LatentRows add_latent_rows(const ModelConfig& config, bool indexer, std::vector<RowCacheLayer>& layers);

class LatentAttentionBlock {
 public:
  static absl::StatusOr<std::unique_ptr<LatentAttentionBlock>> load(LoadContext& load, const std::string& prefix,
                                                                    const LatentRows& rows);
  /// `selected` [rows, windows of top-k]: this layer's choice, or where it has no indexer that of the one before.
  absl::Status add_to(PassContext& pass, int layer, Tensor x, Tensor selected, Tensor residual) const;
  /// Only leaves what later rows read.
  void write_rows(PassContext& pass, Tensor x) const { project(pass, x); }
  WeightCost cost() const;

 private:
  // One product's outputs, and the queries' latent after its norm.
  struct Projected {
    Tensor query;
    Tensor index_weights;
  };
  static absl::Status load_heads(LoadContext& load, const std::string& prefix, LatentAttentionBlock& block);
  static absl::Status load_indexer(LoadContext& load, const std::string& prefix, LatentAttentionBlock& block,
                                   std::vector<MatrixSource>& in);
  Projected project(PassContext& pass, Tensor x) const;
  bool indexer() const { return rows_.index >= 0; }

  LatentConfig config_;
  LatentRows rows_;
  int64_t value_dim_ = 0;
  int64_t first_head_ = 0;
  int64_t heads_ = 0;  // this rank's
  float eps_ = 0;
  std::unique_ptr<Weight> in_;     // q_a | kv_a | indexer: wk | gate | weights; whole everywhere
  std::unique_ptr<Weight> query_;  // q_b of this rank's heads | indexer: wq_b, whole everywhere
  std::unique_ptr<Vector> q_norm_;
  std::unique_ptr<Vector> kv_norm_;
  std::unique_ptr<Vector> index_norm_, index_bias_;
  std::unique_ptr<Vector> pool_bias_;
  std::vector<std::unique_ptr<Weight>> keys_;    // a head's queries to the latent's space [kv_rank, key_dim]
  std::vector<std::unique_ptr<Weight>> values_;  // and its mixed latents to values [value_dim, kv_rank]
  SlicedProjection out_;
};

}  // namespace tensorfold
