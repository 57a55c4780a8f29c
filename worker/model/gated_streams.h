// One place where a residual of several streams meets a block: the streams are normed and mixed into the block's input
// by gates of low rank, and what the block gives is added to each with a weight of its own. Replicated.
#pragma once

#include "worker/model/blocks.h"

namespace tensorfold {

/// Norm weights [count * width] of grouped norms: each stream its own.
class StreamNorm {
 public:
  static absl::StatusOr<StreamNorm> load(LoadContext& load, const std::string& module);
  /// x and out [rows, count * width]; may alias.
  void apply(Ops& ops, float eps, Tensor x, Tensor out) const;

 private:
  std::vector<std::unique_ptr<Vector>> weights_;
};

class GatedStreams {
 public:
  /// `prefix` like "layers.0.attn_hyper_connection"; `injects`: a block follows (not at the model's end).
  static absl::StatusOr<std::unique_ptr<GatedStreams>> load(LoadContext& load, const std::string& prefix, bool injects);
  /// `input` [rows, width] of the block from `streams` [rows, count * width]; returns what inject() needs.
  Tensor mix(PassContext& pass, int layer, Tensor streams, Tensor input) const;
  /// Adds what the block gave.
  void inject(PassContext& pass, Tensor inject, Tensor y, Tensor streams) const;
  WeightCost cost() const { return cost_of(*down_) += cost_of(*up_); }

 private:
  int64_t count_ = 0;
  int64_t rank_ = 0;
  float eps_ = 0;
  StreamNorm norm_;
  std::unique_ptr<Weight> down_;  // [rank, or rank + count: the injections, count * width]
  std::unique_ptr<Weight> up_;    // [count * width, rank]
};

}  // namespace tensorfold
