// Engram memory (deepseek_v41): each token looks up rows of several tables by the n-grams of token classes that end
// with it; what they give is gated by each of the residual's streams and added to it.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "worker/model/blocks.h"

namespace tensorfold {

/// Which row of each table a token's n-grams take. Pure arithmetic on classes, the same on every rank.
class EngramHash {
 public:
  /// Of the `index`-th layer that has tables.
  EngramHash(const EngramConfig& config, int64_t index);

  /// Odd factors of the newest token, the one before it …
  const std::vector<int64_t>& multipliers() const { return multipliers_; }
  /// Rows of each head's table: distinct primes over all layers. All 2-gram heads, then all 3-gram heads …
  const std::vector<int64_t>& table_rows() const { return table_rows_; }
  /// First row of each head's table in all of them together.
  const std::vector<int64_t>& offsets() const { return offsets_; }
  int64_t rows() const { return offsets_.back() + table_rows_.back(); }

  /// The row in its own table for each head. `classes`: of the token and the size - 1 before it, newest first.
  void rows_of(std::span<const int32_t> classes, std::span<int32_t> rows) const;

 private:
  int64_t heads_per_size_ = 0;
  std::vector<int64_t> multipliers_;
  std::vector<int64_t> table_rows_;
  std::vector<int64_t> offsets_;
};

/// Heads in slices: a rank holds its heads' tables and the columns of the projection that read them.
Slices engram_slices(const ModelConfig& config);

/// The classes of a pass' rows and of those before them, one look-up for all layers.
class TokenClasses {
 public:
  /// Writes the rows' classes to layer `cache_layer` of the row cache (width 1) and reads those before.
  static TokenClasses read(PassContext& pass, const EngramConfig& config, int64_t cache_layer);
  /// Of row `r` and the size - 1 before it, newest first.
  std::span<const int32_t> of(int64_t r) const;

 private:
  int64_t size_ = 0;
  std::vector<int32_t> classes_;
};

class EngramBlock {
 public:
  /// `prefix` like "layers.1.engram", the `index`-th layer with tables.
  static absl::StatusOr<std::unique_ptr<EngramBlock>> load(LoadContext& load, const std::string& prefix, int64_t index);
  /// streams [rows, count * hidden] += what the rows' n-grams give.
  absl::Status add_to(PassContext& pass, int layer, const TokenClasses& classes, Tensor streams) const;
  /// The projection's alone: of the tables a pass reads one row a token and head.
  WeightCost cost() const;

 private:
  explicit EngramBlock(EngramHash hash) : hash_(std::move(hash)) {}
  absl::Status load_tables(LoadContext& load, const std::string& prefix, int64_t index);
  absl::Status load_weights(LoadContext& load, const std::string& prefix);
  /// [rows, own heads * head_dim].
  Tensor look_up(PassContext& pass, const TokenClasses& classes) const;
  void norm_streams(Ops& ops, const std::vector<std::unique_ptr<Vector>>& weights, Tensor x, Tensor out) const;

  EngramHash hash_;
  Cut cut_;
  int64_t head_dim_ = 0;
  int64_t count_ = 0;  // streams
  int64_t width_ = 0;  // of a stream
  float eps_ = 0;
  std::vector<std::unique_ptr<Weight>> tables_;                   // one an own head
  SlicedProjection projection_;                                   // [count * width + width]: keys | value
  std::vector<std::unique_ptr<Vector>> query_norms_, key_norms_;  // one a stream
};

}  // namespace tensorfold
