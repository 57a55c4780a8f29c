// A model family on one rank: its share of the weights and the forward pass, written against Ops.
//
// A family never knows about requests, sockets or ranks: it sees the slices it owns, the rows of a pass and a SliceSum.
// Thread-safety: one thread uses a Model at a time (the pass runner's).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/ops/ops.h"
#include "worker/checkpoint/model_config.h"
#include "worker/checkpoint/weights.h"
#include "worker/model/slice_sum.h"

namespace tensorfold {

/// How tensor parallelism cuts a family, each dimension's S a fact of the model and its format, never of the cluster.
struct SlicePlan {
  struct Dimension {
    std::string name;    // "attention heads"
    int64_t units = 0;   // what is cut, in the model's own units
    int64_t slices = 0;  // S
  };
  std::vector<Dimension> dimensions;

  /// The widest legal world: the smallest S.
  int64_t widest_world() const;
  /// "attention heads 8/8, mlp columns 512/8 …": enters the fingerprint and the join checks.
  std::string text() const;
};

/// What a rank of a world must hold; known from the config alone.
struct ModelShape {
  int64_t hidden = 0;
  int64_t row_width = 0;  // of the rows that forward() hands out; 0: hidden. Wider where the MTP layer reads more.
  int64_t vocab = 0;
  int64_t layers = 0;
  int64_t context_length = 0;
  bool has_mtp = false;
  SlicePlan slices;
  // This rank's share:
  int64_t kv_layers = 0;  // attention layers, the MTP layer's included
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t first_vocab_id = 0;
  int64_t local_vocab = 0;
  std::vector<RowCacheLayer> row_layers;  // per-token rows beside keys and values, the MTP layer's included
  std::vector<StateShape> recurrent;      // one per recurrent layer

  int64_t row_values() const { return row_width > 0 ? row_width : hidden; }

  /// Bytes of one page of the row layers.
  int64_t row_page_bytes() const {
    int64_t values = 0;
    for (const RowCacheLayer& layer : row_layers) values += kPageTokens / layer.tokens * layer.width;
    return values * static_cast<int64_t>(sizeof(float));
  }
};

/// Everything one pass needs besides weights. Lives for the pass.
struct PassContext {
  Ops* ops = nullptr;
  KvCache* kv = nullptr;
  RowCache* row_cache = nullptr;  // null where the shape has no row layers
  SliceSum* sum = nullptr;
  Trace* trace = nullptr;  // null unless the differential tester looks
  RowBatch rows;
  // For a block drafter: the layers whose outputs are handed out beside forward()'s rows, in its order.
  std::span<const int64_t> tap_layers;
  int64_t tap_width = 0;  // of one layer's output; the mean over streams, where a residual has several
  Tensor handed;          // [rows, tap_layers.size() * tap_width + values]: set by make_rows()

  /// The tensor that forward() hands out, [rows, values]: the last columns of `handed`, behind the taps.
  Tensor make_rows(int64_t values) {
    const int64_t taps = static_cast<int64_t>(tap_layers.size()) * tap_width;
    handed = ops->scratch(rows.rows(), taps + values);
    return handed.columns(taps, values);
  }
  /// To be called after each layer with the residual as the layer leaves it.
  void tap(int64_t layer, Tensor residual) const {
    for (size_t i = 0; i < tap_layers.size(); ++i) {
      if (tap_layers[i] != layer) continue;
      ops->mean_streams(residual, residual.cols / tap_width,
                        handed.columns(static_cast<int64_t>(i) * tap_width, tap_width));
    }
  }

  void record(int layer, const char* op, Tensor value, int64_t first_unit = 0, int64_t units = 1) const {
    if (trace != nullptr) trace->record(layer, op, value, first_unit, units);
  }
};

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelShape& shape() const = 0;
  /// Bytes of packed weights that one pass reads on this rank.
  virtual int64_t weight_bytes() const = 0;
  /// Values in them: a row of a pass costs one multiply-add for each.
  virtual int64_t weight_values() const = 0;

  /// Runs all rows; `*hidden` [rows, row_values()] is the state after the final norm, in the pass arena (its last
  /// `hidden` columns where it is wider).
  virtual absl::Status forward(PassContext& pass, Tensor* hidden) = 0;
  /// logits [rows, local_vocab] of final-normed rows.
  virtual void logits(PassContext& pass, Tensor hidden, Tensor logits) = 0;
  /// One MTP layer over pairs (final-normed hidden of position p, token at p + 1), pair index p in pass.rows.
  /// `*out` [rows, row_values()] is its normed output, which both feeds the head and the next draft step. With
  /// keys_only the pairs only leave their keys and values, and `*out` is not set. Unimplemented if the family has no
  /// MTP layer.
  virtual absl::Status mtp(PassContext& pass, Tensor hidden, bool keys_only, Tensor* out) = 0;
  /// Whether forward() takes its rows from make_rows() and calls tap(), and embed() is there: what a drafter of its own
  /// needs of its target.
  virtual bool serves_drafters() const { return false; }
  /// out [rows, hidden]: the embeddings of the tokens of pass.rows.
  virtual void embed(PassContext& /*pass*/, Tensor /*out*/) {}
};

/// The rank whose share is wanted.
struct ShardSpec {
  int world = 1;
  int rank = 0;
};

/// Shape and slices of a family for a rank, from the config alone. InvalidArgument when the world is wider than the
/// smallest S, naming the dimension.
absl::StatusOr<ModelShape> model_shape(const ModelConfig& config, ShardSpec shard);

/// Loads this rank's slices. Errors name the tensor or the option.
absl::StatusOr<std::unique_ptr<Model>> load_model(const ModelConfig& config, WeightReader& reader, Ops& ops,
                                                  ShardSpec shard);

/// The model_types that load_model reads, for messages.
std::vector<std::string> known_families();

}  // namespace tensorfold
