// A layer of DeepSeek's on a residual of several streams, all but its attention: two connections to the streams, two
// norms, experts.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "worker/model/experts.h"
#include "worker/model/streams.h"

namespace tensorfold {

class StreamedLayer {
 public:
  /// Tensors `prefix`.hc_attn_*, hc_ffn_*, attn_norm, ffn_norm and ffn.*; `by_token`: experts are given by the token.
  static absl::StatusOr<StreamedLayer> load(LoadContext& load, const std::string& prefix, bool by_token);

  /// output += attention(normed).
  using Attention = std::function<absl::Status(Tensor normed, Tensor output)>;
  /// The whole layer; `normed` [rows, hidden] is used as scratch.
  absl::Status run(PassContext& pass, int index, const Streams& streams, Tensor normed,
                   const Attention& attention) const;
  WeightCost cost() const;

 private:
  float eps_ = 0;
  std::unique_ptr<HyperConnection> mixer_streams_, mlp_streams_;
  std::unique_ptr<Vector> mixer_norm_, mlp_norm_;
  std::unique_ptr<ExpertsBlock> experts_;
};

}  // namespace tensorfold
