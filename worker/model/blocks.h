// Building blocks that families share: attention, MLP and gated delta net, each cut into slices, each adding its result
// to the residual stream through the fixed tree.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/numerics/slices.h"
#include "worker/model/model.h"

namespace tensorfold {

/// What loading needs; lives while a model is loaded.
struct LoadContext {
  const ModelConfig& config;
  WeightReader& reader;
  Ops& ops;
  ShardSpec shard;
};

/// A norm's weight, packed.
absl::StatusOr<std::unique_ptr<Vector>> packed_norm(LoadContext& load, const std::string& name, int64_t size);
/// Values [first, first + count) of a vector of `size`, packed.
absl::StatusOr<std::unique_ptr<Vector>> packed_part(LoadContext& load, const std::string& name, int64_t size,
                                                    int64_t first, int64_t count);

/// Rows [first, first + count) of a matrix [rows, cols], packed.
absl::StatusOr<std::unique_ptr<Weight>> packed_rows(LoadContext& load, const std::string& module, int64_t rows,
                                                    int64_t cols, int64_t first, int64_t count);
/// Moves a loaded part to its place.
template <typename Part>
absl::Status take(absl::StatusOr<Part> part, Part* into) {
  if (!part.ok()) return part.status();
  *into = *std::move(part);
  return absl::OkStatus();
}

/// What one pass reads of a block's weights, and how many values those are (each is one multiply-add a row).
struct WeightCost {
  int64_t bytes = 0;
  int64_t values = 0;

  WeightCost& operator+=(const WeightCost& other);
};
WeightCost cost_of(const Weight& weight);

/// How one block's dimension is cut and which part this rank has.
struct Cut {
  Slices slices;
  SliceRange owned;
  int64_t first_unit() const { return owned.first * slices.units_per_slice(); }
  int64_t unit_count() const { return owned.count * slices.units_per_slice(); }
};

/// The largest S for `units` such that a slice of `unit_columns` columns a unit ends on a multiple of `column_unit`
/// (the quantisation group of the matrix that contracts over it).
Slices cut_dimension(int64_t units, int64_t unit_columns, int64_t column_unit);
Cut make_cut(const Slices& slices, ShardSpec shard);

/// A contraction over a cut dimension: one packed [out, slice columns] matrix a slice.
class SlicedProjection {
 public:
  struct Module {
    std::string name;
    int64_t rows = 0;
  };
  /// Modules [rows, units * unit_columns], one above the other, are cut along their columns.
  static absl::StatusOr<SlicedProjection> load(LoadContext& load, std::span<const Module> modules, const Cut& cut,
                                               int64_t unit_columns);
  static absl::StatusOr<SlicedProjection> load(LoadContext& load, const std::string& module, int64_t rows,
                                               const Cut& cut, int64_t unit_columns);
  /// residual += tree over slices of w x; x [rows, owned columns].
  absl::Status add_to(PassContext& pass, int layer, const char* op, Tensor x, Tensor residual) const;
  WeightCost cost() const;

 private:
  Cut cut_;
  int64_t slice_columns_ = 0;
  std::vector<std::unique_ptr<Weight>> slices_;
};

struct AttentionSpec {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  bool qk_norm = false;  // RMS norm of each query and key head
  bool gated = false;    // q_proj carries a gate per head: out * sigmoid(gate)
  Slices slices;         // of heads
  /// Layer of the row cache that this layer's index keys go to, their means to the next; -1: every key is attended to.
  int64_t index_rows = -1;
};

class IndexerBlock;

/// Causal attention with rotary positions, grouped key/value heads.
class AttentionBlock {
 public:
  AttentionBlock();
  ~AttentionBlock();
  /// `prefix` like "layers.3.self_attn"; keys and values go to `kv_layer` of the cache.
  static absl::StatusOr<std::unique_ptr<AttentionBlock>> load(LoadContext& load, const std::string& prefix,
                                                              const AttentionSpec& spec, int64_t kv_layer);
  /// residual += attention(x), x [rows, hidden] normed.
  absl::Status add_to(PassContext& pass, int layer, const RopeTable& rope, Tensor x, Tensor residual) const;
  /// Only writes keys and values.
  void write_keys(PassContext& pass, const RopeTable& rope, Tensor x) const;
  WeightCost cost() const;

 private:
  struct Projected {
    Tensor q, gate, k, v;
  };
  Projected project(PassContext& pass, const RopeTable& rope, Tensor x) const;

  AttentionSpec spec_;
  int64_t kv_layer_ = 0;
  int64_t first_head_ = 0;
  int64_t local_heads_ = 0;
  int64_t local_kv_heads_ = 0;
  std::vector<int32_t> kv_head_of_;
  float eps_ = 0;
  std::unique_ptr<Weight> qkv_;  // q heads | gates | k heads | v heads
  std::unique_ptr<Vector> q_norm_;
  std::unique_ptr<Vector> k_norm_;
  std::unique_ptr<IndexerBlock> indexer_;  // null: every key is attended to
  SlicedProjection out_;
};

/// Key/value heads that the query heads of a cut need: contiguous, shared by neighbouring slices when S exceeds them.
struct KvShare {
  int64_t first = 0;
  int64_t count = 0;
};
KvShare kv_share(const AttentionSpec& spec, const Cut& cut);

/// down(silu(gate x) * up x).
class MlpBlock {
 public:
  static absl::StatusOr<std::unique_ptr<MlpBlock>> load(LoadContext& load, const std::string& prefix,
                                                        int64_t intermediate, const Slices& slices);
  absl::Status add_to(PassContext& pass, int layer, Tensor x, Tensor residual) const;
  WeightCost cost() const { return cost_of(*gate_up_) += down_.cost(); }

 private:
  int64_t columns_ = 0;  // owned
  float limit_ = 0.0f;   // of gates and ups; 0: none
  std::unique_ptr<Weight> gate_up_;
  SlicedProjection down_;
};

struct DeltaNetSpec {
  int64_t k_heads = 0;
  int64_t v_heads = 0;
  int64_t dk = 0;
  int64_t dv = 0;
  int64_t conv_kernel = 4;
  bool fused = false;  // in_proj_qkvz and in_proj_ba, each key head's rows together
  bool sigmoid_gate = false;
  Slices slices;  // of v heads
};

/// This rank's part of a delta net.
DeltaNetShape local_delta_net(const DeltaNetSpec& spec, const Cut& cut);

/// Gated delta net (Qwen3.5, Qwen3-Next): short convolution, delta rule, gated norm.
class DeltaNetBlock {
 public:
  static absl::StatusOr<std::unique_ptr<DeltaNetBlock>> load(LoadContext& load, const std::string& prefix,
                                                             const DeltaNetSpec& spec, int64_t recurrent_layer);
  absl::Status add_to(PassContext& pass, int layer, Tensor x, Tensor residual) const;
  WeightCost cost() const { return cost_of(*in_) += out_.cost(); }

 private:
  DeltaNetShape shape_;
  int64_t first_v_head_ = 0;
  int64_t recurrent_layer_ = 0;
  bool sigmoid_gate_ = false;
  float eps_ = 0;
  std::unique_ptr<Weight> in_;  // q | k | v | z | b | a
  std::unique_ptr<Vector> conv_;
  std::unique_ptr<Vector> a_log_;
  std::unique_ptr<Vector> dt_bias_;
  std::unique_ptr<Vector> norm_;
  SlicedProjection out_;
};

/// Embedding, final norm and the head's vocabulary slices; the head of a tied model is a view of the table where the
/// backend can make one.
class VocabularyBlock {
 public:
  static absl::StatusOr<std::unique_ptr<VocabularyBlock>> load(LoadContext& load, const Slices& slices);
  void embed(PassContext& pass, Tensor out) const;
  void logits(PassContext& pass, Tensor hidden, Tensor out) const;
  /// The head's: the embedding reads one row a token.
  WeightCost cost() const { return cost_of(*head_); }

 private:
  std::unique_ptr<Weight> table_;  // [vocab, hidden]: every rank reads any row
  std::unique_ptr<Weight> head_;   // [owned rows, hidden]
};

}  // namespace tensorfold
