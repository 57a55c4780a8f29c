// GLM-5.3-Flash (model_type "glm5_next"): Kimi delta attention with a sparse latent attention layer every few, MLPs or
// experts, all on a residual of several streams; one multi-token-prediction (MTP) layer on a plain residual, kept
// behind the other layers as layers.N.
#include <fmt/format.h>

#include <cmath>

#include "kernels/ops/latent_ops.h"
#include "worker/model/experts.h"
#include "worker/model/families.h"
#include "worker/model/latent_attention.h"
#include "worker/model/streams.h"

namespace tensorfold {
namespace {

// --- Kimi delta attention -------------------------------------------------------------------------------------------

Slices delta_slices(const ModelConfig& config) {
  return cut_dimension(config.linear.value_heads, config.linear.value_dim, column_unit(config, "self_attn.o_proj"));
}

DeltaNetShape delta_shape(const ModelConfig& config, const Cut& cut) {
  DeltaNetShape shape;
  shape.k_heads = shape.v_heads = cut.unit_count();
  shape.dk = config.linear.key_dim;
  shape.dv = config.linear.value_dim;
  shape.conv_kernel = config.linear.conv_kernel;
  shape.channel_decay = true;
  for (int64_t head = 0; head < shape.v_heads; ++head) shape.k_head_of.push_back(static_cast<int32_t>(head));
  return shape;
}

class KimiDeltaBlock {
 public:
  static absl::StatusOr<std::unique_ptr<KimiDeltaBlock>> load(LoadContext& load, const std::string& prefix,
                                                              int64_t recurrent_layer);
  absl::Status add_to(PassContext& pass, int layer, Tensor x, Tensor residual) const;
  WeightCost cost() const { return ((cost_of(*in_) += cost_of(*decay_)) += cost_of(*gate_)) += out_.cost(); }

 private:
  DeltaNetShape shape_;
  int64_t first_head_ = 0;
  int64_t recurrent_layer_ = 0;
  float eps_ = 0;
  float floor_ = 0;
  std::unique_ptr<Weight> in_;     // q | k | v | b of this rank's heads | f_a | g_a, which are whole everywhere
  std::unique_ptr<Weight> decay_;  // f_b, this rank's heads
  std::unique_ptr<Weight> gate_;   // g_b, this rank's heads
  std::unique_ptr<Vector> conv_;
  std::unique_ptr<Vector> a_log_;
  std::unique_ptr<Vector> dt_bias_;
  std::unique_ptr<Vector> norm_;
  SlicedProjection out_;
};

absl::StatusOr<std::unique_ptr<KimiDeltaBlock>> KimiDeltaBlock::load(LoadContext& load, const std::string& prefix,
                                                                     int64_t recurrent_layer) {
  auto block = std::make_unique<KimiDeltaBlock>();
  const ModelConfig& config = load.config;
  const Cut cut = make_cut(delta_slices(config), load.shard);
  const int64_t hidden = config.hidden_size, heads = config.linear.value_heads, dim = config.linear.key_dim;
  const int64_t taps = config.linear.conv_kernel, first = cut.first_unit(), count = cut.unit_count();
  std::vector<MatrixSource> rows;
  std::vector<float> conv;
  for (const char* part : {"q", "k", "v"}) {
    absl::StatusOr<MatrixSource> matrix =
        load.reader.matrix(fmt::format("{}.{}_proj", prefix, part), heads * dim, hidden);
    if (!matrix.ok()) return matrix.status();
    rows.push_back(matrix->slice_rows(first * dim, count * dim));
    absl::StatusOr<std::vector<float>> all =
        load.reader.convolution(fmt::format("{}.{}_conv1d", prefix, part), heads * dim, taps);
    if (!all.ok()) return all.status();
    conv.insert(conv.end(), all->begin() + first * dim * taps, all->begin() + (first + count) * dim * taps);
  }
  absl::StatusOr<MatrixSource> b = load.reader.matrix(prefix + ".b_proj", heads, hidden);
  if (!b.ok()) return b.status();
  rows.push_back(b->slice_rows(first, count));
  for (const char* part : {".f_a_proj", ".g_a_proj"}) {
    absl::StatusOr<MatrixSource> matrix = load.reader.matrix(prefix + part, dim, hidden);
    if (!matrix.ok()) return matrix.status();
    rows.push_back(*matrix);
  }
  block->in_ = load.ops.pack(rows);
  struct Second {
    const char* name;
    std::unique_ptr<Weight>* into;
  };
  for (const Second& part : {Second{".f_b_proj", &block->decay_}, Second{".g_b_proj", &block->gate_}}) {
    absl::StatusOr<MatrixSource> matrix = load.reader.matrix(prefix + part.name, heads * dim, dim);
    if (!matrix.ok()) return matrix.status();
    const MatrixSource owned = matrix->slice_rows(first * dim, count * dim);
    *part.into = load.ops.pack({&owned, 1});
  }
  absl::StatusOr<std::unique_ptr<Vector>> a_log = packed_part(load, prefix + ".A_log", heads, first, count);
  if (!a_log.ok()) return a_log.status();
  absl::StatusOr<std::unique_ptr<Vector>> dt_bias =
      packed_part(load, prefix + ".dt_bias", heads * dim, first * dim, count * dim);
  if (!dt_bias.ok()) return dt_bias.status();
  absl::StatusOr<std::unique_ptr<Vector>> norm = packed_norm(load, prefix + ".o_norm", dim);
  if (!norm.ok()) return norm.status();
  absl::StatusOr<SlicedProjection> out = SlicedProjection::load(load, prefix + ".o_proj", hidden, cut, dim);
  if (!out.ok()) return out.status();
  block->shape_ = delta_shape(config, cut);
  block->first_head_ = first;
  block->recurrent_layer_ = recurrent_layer;
  block->eps_ = static_cast<float>(config.rms_norm_eps);
  block->floor_ = static_cast<float>(config.linear.decay_floor);
  block->conv_ = load.ops.pack_vector(conv);
  block->a_log_ = *std::move(a_log);
  block->dt_bias_ = *std::move(dt_bias);
  block->norm_ = *std::move(norm);
  block->out_ = *std::move(out);
  return block;
}

absl::Status KimiDeltaBlock::add_to(PassContext& pass, int layer, Tensor x, Tensor residual) const {
  Ops& ops = *pass.ops;
  const int64_t channels = shape_.channels(), heads = shape_.v_heads, dim = shape_.dk, width = heads * dim;
  const Tensor in = ops.scratch(x.rows, in_->out_features());
  ops.matmul(*in_, x, in);
  const Tensor decay = ops.scratch(x.rows, width), gate = ops.scratch(x.rows, width);
  const MatmulJob jobs[] = {{decay_.get(), in.columns(channels + heads, dim), decay},
                            {gate_.get(), in.columns(channels + heads + dim, dim), gate}};
  ops.matmul_many(jobs);
  DeltaNetArgs args;
  args.shape = &shape_;
  args.qkv = in.columns(0, channels);
  args.b = in.columns(channels, heads);
  args.a = decay;
  args.z = gate;
  args.conv = conv_.get();
  args.a_log = a_log_.get();
  args.dt_bias = dt_bias_.get();
  args.decay_floor = floor_;
  args.norm = norm_.get();
  args.eps = eps_;
  args.out = ops.scratch_input(x.rows, width);
  args.rows = pass.rows;
  args.layer = recurrent_layer_;
  ops.delta_net(args);
  pass.record(layer, "delta_net.heads", args.out, first_head_, heads);
  return out_.add_to(pass, layer, "delta_net.o_proj", args.out, residual);
}

// --- The model ------------------------------------------------------------------------------------------------------

absl::StatusOr<ModelShape> glm5_next_shape(const ModelConfig& config, ShardSpec shard) {
  absl::StatusOr<ModelShape> shape = decoder_shape(config, shard);
  if (!shape.ok()) return shape;
  shape->has_mtp = config.mtp_layers > 0;
  shape->kv_layers = 0;
  const int64_t linear = config.count(LayerKind::kLinearAttention);
  if (linear > 0) {
    const Slices slices = delta_slices(config);
    if (absl::Status s = add_dimension(*shape, "linear attention heads", slices, shard); !s.ok()) return s;
    shape->recurrent.assign(static_cast<size_t>(linear), delta_shape(config, make_cut(slices, shard)));
  }
  for (size_t i = 0; i < config.layers.size(); ++i) {
    if (config.layers[i] != LayerKind::kFullAttention) continue;
    add_latent_rows(config, !config.latent.shared_choice[i], shape->row_layers);
  }
  if (shape->has_mtp) add_latent_rows(config, true, shape->row_layers);
  return shape;
}

// What mixes tokens and what follows.
struct Glm5Layer {
  std::unique_ptr<HyperConnection> mixer_streams, mlp_streams;  // null in the MTP layer
  std::unique_ptr<Vector> input_norm, post_norm;
  std::unique_ptr<KimiDeltaBlock> delta;
  std::unique_ptr<LatentAttentionBlock> attention;
  std::unique_ptr<MlpBlock> mlp;
  std::unique_ptr<ExpertsBlock> experts;

  WeightCost cost() const {
    WeightCost cost = delta != nullptr ? delta->cost() : attention->cost();
    cost += mlp != nullptr ? mlp->cost() : experts->cost();
    if (mixer_streams != nullptr) (cost += mixer_streams->cost()) += mlp_streams->cost();
    return cost;
  }
};

class Glm5Next : public Model {
 public:
  static absl::StatusOr<std::unique_ptr<Model>> load(LoadContext& load, const ModelShape& shape);

  const ModelShape& shape() const override { return shape_; }
  int64_t weight_bytes() const override { return cost().bytes; }
  int64_t weight_values() const override { return cost().values; }
  absl::Status forward(PassContext& pass, Tensor* hidden) override;
  void logits(PassContext& pass, Tensor hidden, Tensor logits) override { vocabulary_->logits(pass, hidden, logits); }
  absl::Status mtp(PassContext& pass, Tensor hidden, bool keys_only, Tensor* out) override;
  bool serves_drafters() const override { return true; }
  void embed(PassContext& pass, Tensor out) override { vocabulary_->embed(pass, out); }

 private:
  Glm5Next(const ModelConfig& config, const ModelShape& shape)
      : shape_(shape),
        streams_(config.streams.count),
        windows_(config.latent.index_windows),
        eps_(static_cast<float>(config.rms_norm_eps)) {}
  absl::Status load_layers(LoadContext& load);
  absl::Status load_mtp(LoadContext& load, const LatentRows& rows);
  static absl::StatusOr<Glm5Layer> load_layer(LoadContext& load, const std::string& prefix, LayerKind kind, MlpKind mlp,
                                              bool streams, const LatentRows& rows, int64_t recurrent);
  absl::Status mix(PassContext& pass, int index, const Glm5Layer& layer, Tensor normed, Tensor selected,
                   Tensor residual) const;
  absl::Status think(PassContext& pass, int index, const Glm5Layer& layer, Tensor normed, Tensor residual) const;
  WeightCost cost() const;

  ModelShape shape_;
  int64_t streams_ = 0;
  int64_t windows_ = 0;  // most that an indexer chooses
  float eps_ = 0;
  std::unique_ptr<VocabularyBlock> vocabulary_;
  std::vector<Glm5Layer> layers_;
  std::unique_ptr<Vector> final_norm_;
  std::unique_ptr<Vector> mtp_embedding_norm_, mtp_hidden_norm_, mtp_norm_;
  std::unique_ptr<Weight> mtp_in_;  // [hidden, 2 * hidden]: embedding half first
  Glm5Layer mtp_layer_;
};

absl::StatusOr<Glm5Layer> Glm5Next::load_layer(LoadContext& load, const std::string& prefix, LayerKind kind,
                                               MlpKind mlp, bool streams, const LatentRows& rows, int64_t recurrent) {
  Glm5Layer layer;
  const int64_t hidden = load.config.hidden_size;
  if (streams) {
    auto mixer_streams = HyperConnection::load(load, prefix + ".hc_attn");
    if (!mixer_streams.ok()) return mixer_streams.status();
    auto mlp_streams = HyperConnection::load(load, prefix + ".hc_ffn");
    if (!mlp_streams.ok()) return mlp_streams.status();
    layer.mixer_streams = *std::move(mixer_streams);
    layer.mlp_streams = *std::move(mlp_streams);
  }
  auto input_norm = packed_norm(load, prefix + ".input_layernorm", hidden);
  if (!input_norm.ok()) return input_norm.status();
  auto post_norm = packed_norm(load, prefix + ".post_attention_layernorm", hidden);
  if (!post_norm.ok()) return post_norm.status();
  layer.input_norm = *std::move(input_norm);
  layer.post_norm = *std::move(post_norm);
  if (kind == LayerKind::kLinearAttention) {
    auto delta = KimiDeltaBlock::load(load, prefix + ".self_attn", recurrent);
    if (!delta.ok()) return delta.status();
    layer.delta = *std::move(delta);
  } else {
    auto attention = LatentAttentionBlock::load(load, prefix + ".self_attn", rows);
    if (!attention.ok()) return attention.status();
    layer.attention = *std::move(attention);
  }
  if (mlp == MlpKind::kExperts) {
    auto experts = ExpertsBlock::load(load, prefix + ".mlp");
    if (!experts.ok()) return experts.status();
    layer.experts = *std::move(experts);
  } else {
    auto dense = MlpBlock::load(load, prefix + ".mlp", load.config.intermediate_size, mlp_slices(load.config));
    if (!dense.ok()) return dense.status();
    layer.mlp = *std::move(dense);
  }
  return layer;
}

absl::Status Glm5Next::load_layers(LoadContext& load) {
  const ModelConfig& config = load.config;
  std::vector<RowCacheLayer> row_layers;
  int64_t recurrent = 0;
  for (int64_t i = 0; i < config.layer_count(); ++i) {
    const auto at = static_cast<size_t>(i);
    const bool linear = config.layers[at] == LayerKind::kLinearAttention;
    const LatentRows rows =
        linear ? LatentRows{} : add_latent_rows(config, !config.latent.shared_choice[at], row_layers);
    absl::StatusOr<Glm5Layer> layer =
        load_layer(load, fmt::format("layers.{}", i), config.layers[at], config.mlps[at], true, rows, recurrent);
    if (!layer.ok()) return layer.status();
    layers_.push_back(*std::move(layer));
    recurrent += linear ? 1 : 0;
  }
  return shape_.has_mtp ? load_mtp(load, add_latent_rows(config, true, row_layers)) : absl::OkStatus();
}

absl::Status Glm5Next::load_mtp(LoadContext& load, const LatentRows& rows) {
  const int64_t hidden = load.config.hidden_size;
  const std::string prefix = fmt::format("layers.{}", load.config.layer_count());
  struct Part {
    const char* name;
    std::unique_ptr<Vector>* into;
  };
  for (const Part& part : {Part{".enorm", &mtp_embedding_norm_}, Part{".hnorm", &mtp_hidden_norm_},
                           Part{".shared_head.norm", &mtp_norm_}}) {
    auto norm = packed_norm(load, prefix + part.name, hidden);
    if (!norm.ok()) return norm.status();
    *part.into = *std::move(norm);
  }
  absl::StatusOr<MatrixSource> in = load.reader.matrix(prefix + ".eh_proj", hidden, 2 * hidden);
  if (!in.ok()) return in.status();
  mtp_in_ = load.ops.pack({&*in, 1});
  absl::StatusOr<Glm5Layer> layer =
      load_layer(load, prefix, LayerKind::kFullAttention, MlpKind::kExperts, false, rows, 0);
  if (!layer.ok()) return layer.status();
  mtp_layer_ = *std::move(layer);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Model>> Glm5Next::load(LoadContext& load, const ModelShape& shape) {
  std::unique_ptr<Glm5Next> model(new Glm5Next(load.config, shape));
  auto vocabulary = VocabularyBlock::load(load, vocab_slices(load.config));
  if (!vocabulary.ok()) return vocabulary.status();
  model->vocabulary_ = *std::move(vocabulary);
  if (absl::Status status = model->load_layers(load); !status.ok()) return status;
  auto norm = packed_norm(load, "norm", load.config.hidden_size);
  if (!norm.ok()) return norm.status();
  model->final_norm_ = *std::move(norm);
  return model;
}

WeightCost Glm5Next::cost() const {
  WeightCost cost = vocabulary_->cost();
  for (const Glm5Layer& layer : layers_) cost += layer.cost();
  return cost;
}

absl::Status Glm5Next::mix(PassContext& pass, int index, const Glm5Layer& layer, Tensor normed, Tensor selected,
                           Tensor residual) const {
  const ScratchScope scope(*pass.ops);
  pass.record(index, "input_norm", normed);
  return layer.delta != nullptr ? layer.delta->add_to(pass, index, normed, residual)
                                : layer.attention->add_to(pass, index, normed, selected, residual);
}

absl::Status Glm5Next::think(PassContext& pass, int index, const Glm5Layer& layer, Tensor normed,
                             Tensor residual) const {
  const ScratchScope scope(*pass.ops);
  pass.record(index, "post_norm", normed);
  return layer.mlp != nullptr ? layer.mlp->add_to(pass, index, normed, residual)
                              : layer.experts->add_to(pass, index, normed, residual);
}

absl::Status Glm5Next::forward(PassContext& pass, Tensor* hidden) {
  Ops& ops = *pass.ops;
  const int64_t rows = pass.rows.rows(), width = shape_.hidden;
  const Streams streams = Streams::make(ops, rows, streams_, width);
  const Tensor normed = ops.scratch_input(rows, width), selected = ops.scratch(rows, windows_);
  *hidden = pass.make_rows(width);
  for (int64_t s = 0; s < streams_; ++s) vocabulary_->embed(pass, streams.all.columns(s * width, width));
  pass.record(-1, "embed", streams.all);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Glm5Layer& layer = layers_[i];
    const int index = static_cast<int>(i);
    layer.mixer_streams->collapse(pass, index, "mixer.streams", streams);
    ops.rms_norm(streams.input, 1, *layer.input_norm, eps_, normed);
    if (absl::Status s = mix(pass, index, layer, normed, selected, streams.output); !s.ok()) return s;
    layer.mixer_streams->expand(pass, index, "mixer.residual", streams);
    layer.mlp_streams->collapse(pass, index, "mlp.streams", streams);
    ops.rms_norm(streams.input, 1, *layer.post_norm, eps_, normed);
    if (absl::Status s = think(pass, index, layer, normed, streams.output); !s.ok()) return s;
    layer.mlp_streams->expand(pass, index, "mlp.residual", streams);
    pass.tap(index, streams.all);
  }
  HyperArgs mean;
  mean.streams = streams.all;
  mean.count = streams_;
  mean.out = streams.input;
  ops.hyper_collapse(mean);
  ops.rms_norm(streams.input, 1, *final_norm_, eps_, *hidden);
  pass.record(static_cast<int>(layers_.size()), "final_norm", *hidden);
  return absl::OkStatus();
}

absl::Status Glm5Next::mtp(PassContext& pass, Tensor hidden, bool keys_only, Tensor* out) {
  if (!shape_.has_mtp) return absl::UnimplementedError("this checkpoint has no MTP layer");
  Ops& ops = *pass.ops;
  const int64_t rows = hidden.rows, width = shape_.hidden;
  const Tensor residual = ops.scratch(rows, width), normed = ops.scratch_input(rows, width);
  const Tensor selected = ops.scratch(rows, windows_), both = ops.scratch_input(rows, 2 * width);
  *out = ops.scratch(rows, width);
  vocabulary_->embed(pass, residual);
  ops.rms_norm(residual, 1, *mtp_embedding_norm_, eps_, both.columns(0, width));
  ops.rms_norm(hidden, 1, *mtp_hidden_norm_, eps_, both.columns(width, width));
  ops.matmul(*mtp_in_, both, residual);
  ops.rms_norm(residual, 1, *mtp_layer_.input_norm, eps_, normed);
  if (keys_only) {
    mtp_layer_.attention->write_rows(pass, normed);
    return absl::OkStatus();
  }
  const int index = static_cast<int>(shape_.layers);
  if (absl::Status s = mix(pass, index, mtp_layer_, normed, selected, residual); !s.ok()) return s;
  ops.rms_norm(residual, 1, *mtp_layer_.post_norm, eps_, normed);
  if (absl::Status s = think(pass, index, mtp_layer_, normed, residual); !s.ok()) return s;
  ops.rms_norm(residual, 1, *mtp_norm_, eps_, *out);
  return absl::OkStatus();
}

}  // namespace

const FamilyEntry kGlm5NextEntry = {Family::kGlm5Next, "glm5_next", glm5_next_shape, Glm5Next::load};

}  // namespace tensorfold
