// A residual of several streams, mixed in and out of each block by manifold-constrained hyper-connections (glm5_next,
// deepseek_v4). Replicated on every rank: its products are small, and streams are whole everywhere.
#pragma once

#include "worker/model/blocks.h"

namespace tensorfold {

/// The residual of one pass, in the pass arena.
struct Streams {
  int64_t count = 0;
  Tensor all;      // [rows, count * hidden]
  Tensor input;    // [rows, hidden]: what a block gets, before its norm
  Tensor output;   // [rows, hidden]: what a block adds to, 0 at its beginning
  Tensor weights;  // [rows, count + count^2] of the block at hand
  /// [rows, count], or no data: what the next block's input is summed by, where that is told by the block before it.
  Tensor carried = {};

  static Streams make(Ops& ops, int64_t rows, int64_t count, int64_t hidden);
  /// Begins to carry: the first block takes the first stream alone.
  void carry(Ops& ops);
  /// Streams -> input by what is carried, at the end.
  void collapse_carried(Ops& ops) const;
};

/// One block's connection to the streams.
class HyperConnection {
 public:
  /// Tensors `name`_fn [(2 + n) n, n * hidden], `name`_base, `name`_scale: "layers.3.hc_attn".
  static absl::StatusOr<std::unique_ptr<HyperConnection>> load(LoadContext& load, const std::string& name);
  /// Streams -> input and weights; output = 0.
  void collapse(PassContext& pass, int layer, const char* op, const Streams& streams) const;
  /// Streams <- output, by the weights.
  void expand(PassContext& pass, int layer, const char* op, const Streams& streams) const;
  WeightCost cost() const { return cost_of(*mix_); }

 private:
  int64_t count_ = 0;
  float norm_eps_ = 0;
  float eps_ = 0;
  int64_t iterations_ = 0;
  std::unique_ptr<Vector> ones_;  // the norm before the product has no weights
  std::unique_ptr<Weight> mix_;
  std::unique_ptr<Vector> base_;
  std::unique_ptr<Vector> scale_;
};

/// The end of the streams: their sum by weights of the row's own.
class HyperHead {
 public:
  /// Tensors `prefix`hc_head_fn [n, n * hidden], hc_head_base, hc_head_scale, or hc_head.hc_fn and so on.
  static absl::StatusOr<std::unique_ptr<HyperHead>> load(LoadContext& load, const std::string& prefix = "");
  /// Streams -> input.
  void collapse(PassContext& pass, const Streams& streams) const;
  WeightCost cost() const { return cost_of(*mix_); }

 private:
  int64_t count_ = 0;
  float norm_eps_ = 0;
  float eps_ = 0;
  std::unique_ptr<Vector> ones_;
  std::unique_ptr<Weight> mix_;
  std::unique_ptr<Vector> base_;
  std::unique_ptr<Vector> scale_;
};

}  // namespace tensorfold
