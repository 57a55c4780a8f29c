// Hashed n-grams: each token looks up a row of several tables by the n-grams that end with it; what they give is gated
// by the residual's streams and added to them.
#pragma once

#include "kernels/ops/stream_ops.h"
#include "worker/model/gated_streams.h"

namespace tensorfold {

/// Which row of each table a token's n-grams take. Pure arithmetic on token ids, the same on every rank.
class NgramHash {
 public:
  /// Of the `index`-th layer that has tables.
  NgramHash(const NgramConfig& config, int64_t vocab, int64_t index);

  /// Odd factors of the newest token, the one before it …
  const std::vector<int64_t>& multipliers() const { return heads_.multipliers; }
  /// Rows of each head's table: distinct primes. All 2-gram heads, then all 3-gram heads …
  const std::vector<int64_t>& table_rows() const { return heads_.table_rows; }
  /// First row of each head's table in all of them together.
  const std::vector<int64_t>& offsets() const { return offsets_; }
  int64_t padded_rows() const { return padded_rows_; }
  /// For Ops::embed_ngrams.
  const NgramHeads& heads() const { return heads_; }

 private:
  NgramHeads heads_;
  std::vector<int64_t> offsets_;
  int64_t padded_rows_ = 0;
};

/// Heads in slices: a rank holds its heads' tables and the columns of both projections that read them.
Slices ngram_slices(const ModelConfig& config);
/// The convolution's state, whole on every rank.
ShortConvShape ngram_state(const ModelConfig& config);

class NgramBlock {
 public:
  /// `prefix` like "layers.1.ple", the `index`-th layer with tables.
  static absl::StatusOr<std::unique_ptr<NgramBlock>> load(LoadContext& load, const std::string& prefix, int64_t index,
                                                          int64_t recurrent_layer);
  /// streams += what the rows' n-grams give.
  absl::Status add_to(PassContext& pass, int layer, Tensor streams) const;
  /// The projections' alone: of the tables a pass reads one row a token and head.
  WeightCost cost() const;

 private:
  absl::Status load_tables(LoadContext& load, const std::string& prefix);
  absl::Status load_projections(LoadContext& load, const std::string& prefix);

  explicit NgramBlock(const NgramHash& hash) : hash_(hash) {}

  NgramHash hash_;
  Cut cut_;
  int64_t head_dim_ = 0;
  int64_t count_ = 0;  // streams
  int64_t width_ = 0;  // of a stream
  int64_t recurrent_layer_ = 0;
  float eps_ = 0;
  ShortConvShape conv_shape_;
  std::vector<std::unique_ptr<Weight>> tables_;  // one an own head
  SlicedProjection projection_;                  // [count * width + width]: keys | value
  StreamNorm key_norm_, query_norm_, conv_norm_;
  std::unique_ptr<Vector> conv_;
};

}  // namespace tensorfold
