#include "worker/model/decoder.h"

#include <fmt/format.h>

#include "worker/model/rope.h"

namespace tensorfold {
WeightCost DecoderLayer::cost() const {
  return (attention != nullptr ? attention->cost() : delta_net->cost()) +=
         (mlp != nullptr ? mlp->cost() : experts->cost());
}

absl::StatusOr<DecoderLayer> load_decoder_layer(LoadContext& load, const std::string& prefix, LayerKind kind,
                                                MlpKind mlp_kind, const DecoderSpec& spec, int64_t kv_layer,
                                                int64_t recurrent_layer) {
  DecoderLayer layer;
  absl::StatusOr<std::unique_ptr<Vector>> input_norm =
      packed_norm(load, prefix + ".input_layernorm", load.config.hidden_size);
  if (!input_norm.ok()) return input_norm.status();
  layer.input_norm = *std::move(input_norm);
  if (kind == LayerKind::kFullAttention) {
    auto attention = AttentionBlock::load(load, prefix + ".self_attn", spec.attention, kv_layer);
    if (!attention.ok()) return attention.status();
    layer.attention = *std::move(attention);
  } else {
    auto delta_net = DeltaNetBlock::load(load, prefix + ".linear_attn", spec.delta_net, recurrent_layer);
    if (!delta_net.ok()) return delta_net.status();
    layer.delta_net = *std::move(delta_net);
  }
  absl::StatusOr<std::unique_ptr<Vector>> post_norm =
      packed_norm(load, prefix + ".post_attention_layernorm", load.config.hidden_size);
  if (!post_norm.ok()) return post_norm.status();
  layer.post_norm = *std::move(post_norm);
  if (mlp_kind == MlpKind::kExperts) {
    auto experts = ExpertsBlock::load(load, prefix + ".mlp");
    if (!experts.ok()) return experts.status();
    layer.experts = *std::move(experts);
    return layer;
  }
  auto mlp = MlpBlock::load(load, prefix + ".mlp", load.config.intermediate_size, mlp_slices(load.config));
  if (!mlp.ok()) return mlp.status();
  layer.mlp = *std::move(mlp);
  return layer;
}

Decoder::Decoder(const ModelConfig& config, const ModelShape& shape)
    : shape_(shape), eps_(static_cast<float>(config.rms_norm_eps)) {}

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::load(LoadContext& load, const ModelShape& shape,
                                                       const DecoderSpec& spec) {
  std::unique_ptr<Decoder> decoder(new Decoder(load.config, shape));
  if (absl::Status status = load_parts(*decoder, load, spec); !status.ok()) return status;
  return decoder;
}

absl::Status Decoder::load_parts(Decoder& decoder, LoadContext& load, const DecoderSpec& spec) {
  decoder.inv_freq_ = load.ops.pack_vector(inverse_frequencies(load.config));
  decoder.attention_factor_ = rope_attention_factor(load.config);
  auto vocabulary = VocabularyBlock::load(load, vocab_slices(load.config));
  if (!vocabulary.ok()) return vocabulary.status();
  decoder.vocabulary_ = *std::move(vocabulary);
  int64_t kv_layer = 0;
  int64_t recurrent_layer = 0;
  for (int64_t i = 0; i < load.config.layer_count(); ++i) {
    const LayerKind kind = load.config.layers[static_cast<size_t>(i)];
    absl::StatusOr<DecoderLayer> layer =
        load_decoder_layer(load, fmt::format("layers.{}", i), kind, load.config.mlps[static_cast<size_t>(i)], spec,
                           kv_layer, recurrent_layer);
    if (!layer.ok()) return layer.status();
    decoder.layers_.push_back(*std::move(layer));
    ++(kind == LayerKind::kFullAttention ? kv_layer : recurrent_layer);
  }
  absl::StatusOr<std::unique_ptr<Vector>> final_norm = packed_norm(load, "norm", load.config.hidden_size);
  if (!final_norm.ok()) return final_norm.status();
  decoder.final_norm_ = *std::move(final_norm);
  return absl::OkStatus();
}

WeightCost Decoder::cost() const {
  WeightCost cost = vocabulary_->cost();
  for (const DecoderLayer& layer : layers_) cost += layer.cost();
  return cost;
}

RopeTable Decoder::rope_for(PassContext& pass) const {
  return pass.ops->rope_table(pass.rows, *inv_freq_, attention_factor_);
}

absl::Status Decoder::run_layer(PassContext& pass, int index, const DecoderLayer& layer, const RopeTable& rope,
                                Tensor normed, Tensor residual) const {
  const ScratchScope scope(*pass.ops);
  pass.ops->rms_norm(residual, 1, *layer.input_norm, eps_, normed);
  pass.record(index, "input_norm", normed);
  const absl::Status mixed = layer.attention != nullptr ? layer.attention->add_to(pass, index, rope, normed, residual)
                                                        : layer.delta_net->add_to(pass, index, normed, residual);
  if (!mixed.ok()) return mixed;
  pass.record(index, "mixer.residual", residual);
  pass.ops->rms_norm(residual, 1, *layer.post_norm, eps_, normed);
  pass.record(index, "post_norm", normed);
  const absl::Status added = layer.mlp != nullptr ? layer.mlp->add_to(pass, index, normed, residual)
                                                  : layer.experts->add_to(pass, index, normed, residual);
  if (!added.ok()) return added;
  pass.record(index, "mlp.residual", residual);
  return absl::OkStatus();
}

absl::Status Decoder::forward(PassContext& pass, Tensor* hidden) {
  // What outlives a layer is taken before the first: a layer's own scratch is given back at its end.
  const Tensor residual = pass.ops->scratch(pass.rows.rows(), shape_.hidden);
  const Tensor normed = pass.ops->scratch_input(residual.rows, shape_.hidden);
  *hidden = pass.make_rows(shape_.hidden);
  const RopeTable rope = rope_for(pass);
  vocabulary_->embed(pass, residual);
  pass.record(-1, "embed", residual);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const absl::Status status = run_layer(pass, static_cast<int>(i), layers_[i], rope, normed, residual);
    if (!status.ok()) return status;
    pass.tap(static_cast<int64_t>(i), residual);
  }
  pass.ops->rms_norm(residual, 1, *final_norm_, eps_, *hidden);
  pass.record(static_cast<int>(layers_.size()), "final_norm", *hidden);
  return absl::OkStatus();
}

void Decoder::logits(PassContext& pass, Tensor hidden, Tensor logits) { vocabulary_->logits(pass, hidden, logits); }

absl::Status Decoder::mtp(PassContext&, Tensor, bool, Tensor*) {
  return absl::UnimplementedError("this family has no MTP layer");
}

}  // namespace tensorfold
