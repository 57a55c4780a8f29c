// Qwen3.8 Flash Next (model_type "qwen4_exp"): gated delta nets and gated attention over chosen keys, experts in every
// layer, a residual of several gated streams, hashed n-grams in some layers, an MTP layer. No final norm: a last mixer
// feeds the head.
#include <fmt/format.h>

#include "kernels/ops/stream_ops.h"
#include "worker/model/experts.h"
#include "worker/model/families.h"
#include "worker/model/gated_streams.h"
#include "worker/model/indexer.h"
#include "worker/model/ngrams.h"
#include "worker/model/qwen3_5.h"
#include "worker/model/rope.h"

namespace tensorfold {
namespace {

absl::StatusOr<ModelShape> qwen4_exp_shape(const ModelConfig& config, ShardSpec shard) {
  absl::StatusOr<ModelShape> shape = qwen3_5_shape(config, shard);
  if (!shape.ok()) return shape;
  // Rows carry the streams for the MTP layer, then what the head reads.
  if (shape->has_mtp) shape->row_width = (config.gated_streams.count + 1) * config.hidden_size;
  for (int64_t layer = 0; layer < shape->kv_layers; ++layer) {
    for (const RowCacheLayer& rows : indexer_layers(config.indexer)) shape->row_layers.push_back(rows);
  }
  if (config.ngrams.layers.empty()) return shape;
  if (absl::Status s = add_dimension(*shape, "n-gram heads", ngram_slices(config), shard); !s.ok()) return s;
  for (size_t i = 0; i < config.ngrams.layers.size(); ++i) shape->recurrent.emplace_back(ngram_state(config));
  return shape;
}

struct Layer {
  std::unique_ptr<NgramBlock> ngrams;  // null: none
  std::unique_ptr<GatedStreams> mixer_streams;
  std::unique_ptr<AttentionBlock> attention;
  std::unique_ptr<DeltaNetBlock> delta_net;
  std::unique_ptr<GatedStreams> mlp_streams;
  std::unique_ptr<ExpertsBlock> experts;

  WeightCost cost() const {
    WeightCost cost = attention != nullptr ? attention->cost() : delta_net->cost();
    cost += experts->cost();
    cost += mixer_streams->cost();
    cost += mlp_streams->cost();
    if (ngrams != nullptr) cost += ngrams->cost();
    return cost;
  }
};

template <typename T>
absl::Status take(absl::StatusOr<std::unique_ptr<T>> loaded, std::unique_ptr<T>* into) {
  if (!loaded.ok()) return loaded.status();
  *into = *std::move(loaded);
  return absl::OkStatus();
}

// What mixes tokens in a layer, and its place among the caches or states.
struct Mixer {
  LayerKind kind;
  int64_t index;
};

absl::StatusOr<Layer> load_layer(LoadContext& load, const std::string& prefix, Mixer mixer) {
  const ModelConfig& config = load.config;
  Layer layer;
  absl::Status s = take(GatedStreams::load(load, prefix + ".attn_hyper_connection", true), &layer.mixer_streams);
  if (!s.ok()) return s;
  if (mixer.kind == LayerKind::kFullAttention) {
    const AttentionSpec spec = {.heads = config.heads,
                                .kv_heads = config.kv_heads,
                                .head_dim = config.head_dim,
                                .qk_norm = true,
                                .gated = true,
                                .slices = head_slices(config),
                                .index_rows = 2 * mixer.index};
    s = take(AttentionBlock::load(load, prefix + ".self_attn", spec, mixer.index), &layer.attention);
  } else {
    s = take(DeltaNetBlock::load(load, prefix + ".linear_attn", qwen3_5_delta_net(config), mixer.index),
             &layer.delta_net);
  }
  if (!s.ok()) return s;
  s = take(GatedStreams::load(load, prefix + ".mlp_hyper_connection", true), &layer.mlp_streams);
  if (!s.ok()) return s;
  s = take(ExpertsBlock::load(load, prefix + ".mlp"), &layer.experts);
  if (!s.ok()) return s;
  return layer;
}

class Qwen4Exp : public Model {
 public:
  static absl::StatusOr<std::unique_ptr<Model>> load(LoadContext& load, const ModelShape& shape);

  const ModelShape& shape() const override { return shape_; }
  int64_t weight_bytes() const override { return cost().bytes; }
  int64_t weight_values() const override { return cost().values; }
  absl::Status forward(PassContext& pass, Tensor* hidden) override;
  void logits(PassContext& pass, Tensor hidden, Tensor logits) override {
    vocabulary_->logits(pass, hidden.columns(hidden.cols - shape_.hidden, shape_.hidden), logits);
  }
  absl::Status mtp(PassContext& pass, Tensor hidden, bool keys_only, Tensor* out) override;
  bool serves_drafters() const override { return true; }
  void embed(PassContext& pass, Tensor out) override { vocabulary_->embed(pass, out); }

 private:
  explicit Qwen4Exp(const ModelShape& shape) : shape_(shape) {}
  absl::Status load_mtp(LoadContext& load);
  absl::Status run_layer(PassContext& pass, int index, const Layer& layer, const RopeTable& rope, Tensor streams) const;
  /// Of the row that is handed out: the streams where the MTP layer reads them, then the mixer's output. Streams that
  /// nobody reads are elsewhere.
  Tensor streams_of(Tensor row, Ops& ops) const;
  void finish(PassContext& pass, int layer, const GatedStreams& mixer, Tensor streams, Tensor row) const;
  WeightCost cost() const;

  ModelShape shape_;
  int64_t count_ = 0;  // streams
  float eps_ = 0;
  std::unique_ptr<Vector> inv_freq_;
  double attention_factor_ = 1.0;
  std::unique_ptr<VocabularyBlock> vocabulary_;
  std::vector<Layer> layers_;
  std::unique_ptr<GatedStreams> final_mixer_;
  std::unique_ptr<Vector> mtp_embedding_norm_;  // [hidden]
  std::unique_ptr<Vector> mtp_hidden_norm_;     // [streams * hidden]: one norm over all
  std::unique_ptr<Weight> mtp_embedding_;       // [hidden, hidden]
  std::unique_ptr<Weight> mtp_hidden_;          // the same, for every stream
  Layer mtp_layer_;
  std::unique_ptr<GatedStreams> mtp_mixer_;
};

absl::StatusOr<std::unique_ptr<Model>> Qwen4Exp::load(LoadContext& load, const ModelShape& shape) {
  const ModelConfig& config = load.config;
  std::unique_ptr<Qwen4Exp> model(new Qwen4Exp(shape));
  model->count_ = config.gated_streams.count;
  model->eps_ = static_cast<float>(config.rms_norm_eps);
  model->inv_freq_ = load.ops.pack_vector(inverse_frequencies(config));
  model->attention_factor_ = rope_attention_factor(config);
  if (absl::Status s = take(VocabularyBlock::load(load, vocab_slices(config)), &model->vocabulary_); !s.ok()) return s;
  int64_t kv_layer = 0;
  int64_t recurrent_layer = 0;
  int64_t table = 0;
  for (int64_t i = 0; i < config.layer_count(); ++i) {
    const LayerKind kind = config.layers[static_cast<size_t>(i)];
    const std::string prefix = fmt::format("layers.{}", i);
    const int64_t index = kind == LayerKind::kFullAttention ? kv_layer++ : recurrent_layer++;
    absl::StatusOr<Layer> layer = load_layer(load, prefix, {kind, index});
    if (!layer.ok()) return layer.status();
    if (table < static_cast<int64_t>(config.ngrams.layers.size()) &&
        config.ngrams.layers[static_cast<size_t>(table)] == i) {
      // Their states come after those of the delta nets.
      const int64_t state = config.count(LayerKind::kLinearAttention) + table;
      if (absl::Status s = take(NgramBlock::load(load, prefix + ".ple", table, state), &layer->ngrams); !s.ok()) {
        return s;
      }
      ++table;
    }
    model->layers_.push_back(*std::move(layer));
  }
  absl::Status s = take(GatedStreams::load(load, "hyper_connection_mixer", false), &model->final_mixer_);
  if (!s.ok()) return s;
  if (shape.has_mtp) {
    if (s = model->load_mtp(load); !s.ok()) return s;
  }
  return model;
}

absl::Status Qwen4Exp::load_mtp(LoadContext& load) {
  const int64_t hidden = load.config.hidden_size;
  absl::StatusOr<std::vector<float>> embedding_norm = load.reader.norm("mtp.pre_fc_norm_embedding", hidden);
  if (!embedding_norm.ok()) return embedding_norm.status();
  absl::StatusOr<std::vector<float>> hidden_norm = load.reader.norm("mtp.pre_fc_norm_hidden", count_ * hidden);
  if (!hidden_norm.ok()) return hidden_norm.status();
  mtp_embedding_norm_ = load.ops.pack_vector(*embedding_norm);
  mtp_hidden_norm_ = load.ops.pack_vector(*hidden_norm);
  absl::StatusOr<MatrixSource> embedding = load.reader.matrix("mtp.fc_embedding", hidden, hidden);
  if (!embedding.ok()) return embedding.status();
  absl::StatusOr<MatrixSource> state = load.reader.matrix("mtp.fc_hidden", hidden, hidden);
  if (!state.ok()) return state.status();
  mtp_embedding_ = load.ops.pack({&*embedding, 1});
  mtp_hidden_ = load.ops.pack({&*state, 1});
  absl::StatusOr<Layer> layer = load_layer(load, "mtp.layers.0", {LayerKind::kFullAttention, shape_.kv_layers - 1});
  if (!layer.ok()) return layer.status();
  mtp_layer_ = *std::move(layer);
  return take(GatedStreams::load(load, "mtp.hyper_connection_mixer", false), &mtp_mixer_);
}

WeightCost Qwen4Exp::cost() const {
  WeightCost cost = vocabulary_->cost();
  for (const Layer& layer : layers_) cost += layer.cost();
  return cost += final_mixer_->cost();
}

absl::Status Qwen4Exp::run_layer(PassContext& pass, int index, const Layer& layer, const RopeTable& rope,
                                 Tensor streams) const {
  Ops& ops = *pass.ops;
  if (layer.ngrams != nullptr) {
    if (absl::Status s = layer.ngrams->add_to(pass, index, streams); !s.ok()) return s;
  }
  const ScratchScope scope(ops);
  const Tensor input = ops.scratch_input(streams.rows, shape_.hidden);
  const Tensor y = ops.scratch(streams.rows, shape_.hidden);
  {
    const ScratchScope site(ops);
    const Tensor inject = layer.mixer_streams->mix(pass, index, streams, input);
    ops.clear(y);
    const absl::Status mixed = layer.attention != nullptr ? layer.attention->add_to(pass, index, rope, input, y)
                                                          : layer.delta_net->add_to(pass, index, input, y);
    if (!mixed.ok()) return mixed;
    layer.mixer_streams->inject(pass, inject, y, streams);
    pass.record(index, "mixer.residual", streams);
  }
  const Tensor inject = layer.mlp_streams->mix(pass, index, streams, input);
  ops.clear(y);
  if (absl::Status s = layer.experts->add_to(pass, index, input, y); !s.ok()) return s;
  layer.mlp_streams->inject(pass, inject, y, streams);
  pass.record(index, "mlp.residual", streams);
  return absl::OkStatus();
}

Tensor Qwen4Exp::streams_of(Tensor row, Ops& ops) const {
  const int64_t all = count_ * shape_.hidden;
  return shape_.has_mtp ? row.columns(0, all) : ops.scratch(row.rows, all);
}

void Qwen4Exp::finish(PassContext& pass, int layer, const GatedStreams& mixer, Tensor streams, Tensor row) const {
  const ScratchScope scope(*pass.ops);
  mixer.mix(pass, layer, streams, row.columns(row.cols - shape_.hidden, shape_.hidden));
}

absl::Status Qwen4Exp::forward(PassContext& pass, Tensor* hidden) {
  Ops& ops = *pass.ops;
  *hidden = pass.make_rows(shape_.row_values());
  const Tensor streams = streams_of(*hidden, ops);
  const RopeTable rope = ops.rope_table(pass.rows, *inv_freq_, attention_factor_);
  for (int64_t s = 0; s < count_; ++s) vocabulary_->embed(pass, streams.columns(s * shape_.hidden, shape_.hidden));
  pass.record(-1, "embed", streams);
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (absl::Status s = run_layer(pass, static_cast<int>(i), layers_[i], rope, streams); !s.ok()) return s;
    pass.tap(static_cast<int64_t>(i), streams);
  }
  finish(pass, static_cast<int>(layers_.size()), *final_mixer_, streams, *hidden);
  return absl::OkStatus();
}

absl::Status Qwen4Exp::mtp(PassContext& pass, Tensor hidden, bool keys_only, Tensor* out) {
  if (!shape_.has_mtp) return absl::UnimplementedError("this checkpoint has no MTP layer");
  Ops& ops = *pass.ops;
  const int64_t width = shape_.hidden;
  *out = ops.scratch(hidden.rows, shape_.row_values());
  const Tensor streams = streams_of(*out, ops);
  const RopeTable rope = ops.rope_table(pass.rows, *inv_freq_, attention_factor_);
  const Tensor embedding = ops.scratch(hidden.rows, width), projected = ops.scratch(hidden.rows, width);
  vocabulary_->embed(pass, embedding);
  ops.rms_norm(embedding, 1, *mtp_embedding_norm_, eps_, embedding);
  ops.matmul(*mtp_embedding_, embedding, projected);
  const Tensor normed = ops.scratch_input(hidden.rows, count_ * width);
  ops.rms_norm(hidden.columns(0, count_ * width), 1, *mtp_hidden_norm_, eps_, normed);
  for (int64_t s = 0; s < count_; ++s) {
    const Tensor stream = streams.columns(s * width, width);
    ops.matmul(*mtp_hidden_, normed.columns(s * width, width), stream);
    ops.add(stream, projected, stream);
  }
  const int index = static_cast<int>(layers_.size());
  if (keys_only) {
    const ScratchScope scope(ops);
    const Tensor input = ops.scratch_input(hidden.rows, width);
    mtp_layer_.mixer_streams->mix(pass, index, streams, input);
    mtp_layer_.attention->write_keys(pass, rope, input);
    return absl::OkStatus();
  }
  if (absl::Status s = run_layer(pass, index, mtp_layer_, rope, streams); !s.ok()) return s;
  finish(pass, index + 1, *mtp_mixer_, streams, *out);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Model>> load_qwen4_exp(LoadContext& load, const ModelShape& shape) {
  return Qwen4Exp::load(load, shape);
}

}  // namespace

const FamilyEntry kQwen4ExpEntry = {Family::kQwen4Exp, "qwen4_exp", qwen4_exp_shape, load_qwen4_exp};

}  // namespace tensorfold
