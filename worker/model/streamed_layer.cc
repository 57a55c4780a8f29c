#include "worker/model/streamed_layer.h"

#include <utility>

#include "worker/model/families.h"

namespace tensorfold {

absl::StatusOr<StreamedLayer> StreamedLayer::load(LoadContext& load, const std::string& prefix, bool by_token) {
  StreamedLayer layer;
  layer.eps_ = static_cast<float>(load.config.rms_norm_eps);
  auto mixer_streams = HyperConnection::load(load, prefix + ".hc_attn");
  if (!mixer_streams.ok()) return mixer_streams.status();
  auto mlp_streams = HyperConnection::load(load, prefix + ".hc_ffn");
  if (!mlp_streams.ok()) return mlp_streams.status();
  auto mixer_norm = packed_norm(load, prefix + ".attn_norm", load.config.hidden_size);
  if (!mixer_norm.ok()) return mixer_norm.status();
  auto mlp_norm = packed_norm(load, prefix + ".ffn_norm", load.config.hidden_size);
  if (!mlp_norm.ok()) return mlp_norm.status();
  auto experts = ExpertsBlock::load(load, prefix + ".ffn", by_token);
  if (!experts.ok()) return experts.status();
  layer.mixer_streams_ = *std::move(mixer_streams);
  layer.mlp_streams_ = *std::move(mlp_streams);
  layer.mixer_norm_ = *std::move(mixer_norm);
  layer.mlp_norm_ = *std::move(mlp_norm);
  layer.experts_ = *std::move(experts);
  return layer;
}

absl::Status StreamedLayer::run(PassContext& pass, int index, const Streams& streams, Tensor normed,
                                const Attention& attention) const {
  Ops& ops = *pass.ops;
  const ScratchScope scope(ops);
  mixer_streams_->collapse(pass, index, "mixer.streams", streams);
  ops.rms_norm(streams.input, 1, *mixer_norm_, eps_, normed);
  pass.record(index, "input_norm", normed);
  if (absl::Status s = attention(normed, streams.output); !s.ok()) return s;
  mixer_streams_->expand(pass, index, "mixer.residual", streams);
  mlp_streams_->collapse(pass, index, "mlp.streams", streams);
  ops.rms_norm(streams.input, 1, *mlp_norm_, eps_, normed);
  pass.record(index, "post_norm", normed);
  if (absl::Status s = experts_->add_to(pass, index, normed, streams.output); !s.ok()) return s;
  mlp_streams_->expand(pass, index, "mlp.residual", streams);
  return absl::OkStatus();
}

WeightCost StreamedLayer::cost() const {
  WeightCost cost = mixer_streams_->cost();
  cost += mlp_streams_->cost();
  cost += experts_->cost();
  return cost;
}

}  // namespace tensorfold
