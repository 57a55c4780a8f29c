// GLM-5.3-Flash (model_type "glm5_next"): Kimi delta attention with a sparse latent attention layer every few, MLPs or
// experts, all on a residual of several streams; one multi-token-prediction (MTP) layer on a plain residual, kept
// behind the other layers as layers.N.
#include <fmt/format.h>

#include <cmath>

#include "kernels/ops/dequantise.h"
#include "kernels/ops/latent_ops.h"
#include "worker/model/experts.h"
#include "worker/model/families.h"
#include "worker/model/streams.h"

namespace tensorfold {
namespace {

absl::StatusOr<std::unique_ptr<Vector>> packed_norm(LoadContext& load, const std::string& name, int64_t size) {
  absl::StatusOr<std::vector<float>> values = load.reader.norm(name, size);
  if (!values.ok()) return values.status();
  return load.ops.pack_vector(*values);
}

// Values [first, first + count) of a vector of `size`.
absl::StatusOr<std::unique_ptr<Vector>> packed_part(LoadContext& load, const std::string& name, int64_t size,
                                                    int64_t first, int64_t count) {
  absl::StatusOr<std::vector<float>> values = load.reader.vector(name, size);
  if (!values.ok()) return values.status();
  return load.ops.pack_vector(std::span(*values).subspan(static_cast<size_t>(first), static_cast<size_t>(count)));
}

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

// --- Sparse latent attention ----------------------------------------------------------------------------------------

// The layers of the row cache that an attention layer has.
struct LatentRows {
  int64_t latent = 0;
  int64_t index = -1;   // the indexer's keys | gates, a row a token
  int64_t pooled = -1;  // its pooled keys
};

LatentRows add_rows(const ModelConfig& config, bool indexer, std::vector<RowCacheLayer>& layers) {
  const LatentConfig& latent = config.latent;
  LatentRows rows;
  rows.latent = static_cast<int64_t>(layers.size());
  layers.push_back({latent.kv_rank, 1});
  if (!indexer) return rows;
  rows.index = rows.latent + 1;
  rows.pooled = rows.latent + 2;
  layers.push_back({2 * latent.index_dim, 1});
  layers.push_back({latent.index_dim, latent.index_tokens});
  return rows;
}

class LatentAttentionBlock {
 public:
  static absl::StatusOr<std::unique_ptr<LatentAttentionBlock>> load(LoadContext& load, const std::string& prefix,
                                                                    const LatentRows& rows);
  /// `selected` [rows, windows of top-k]: this layer's choice, or where it has no indexer that of the one before.
  absl::Status add_to(PassContext& pass, int layer, Tensor x, Tensor selected, Tensor residual) const;
  /// Only leaves what later rows read.
  void write_rows(PassContext& pass, Tensor x) const { project(pass, x); }
  WeightCost cost() const;

 private:
  // One product's outputs, and the queries' latent after its norm.
  struct Projected {
    Tensor query;
    Tensor index_weights;
  };
  static absl::Status load_heads(LoadContext& load, const std::string& prefix, LatentAttentionBlock& block);
  static absl::Status load_indexer(LoadContext& load, const std::string& prefix, LatentAttentionBlock& block,
                                   std::vector<MatrixSource>& in);
  Projected project(PassContext& pass, Tensor x) const;
  bool indexer() const { return rows_.index >= 0; }

  LatentConfig config_;
  LatentRows rows_;
  int64_t value_dim_ = 0;
  int64_t first_head_ = 0;
  int64_t heads_ = 0;  // this rank's
  float eps_ = 0;
  std::unique_ptr<Weight> in_;     // q_a | kv_a | indexer: wk | gate | weights; whole everywhere
  std::unique_ptr<Weight> query_;  // q_b of this rank's heads | indexer: wq_b, whole everywhere
  std::unique_ptr<Vector> q_norm_;
  std::unique_ptr<Vector> kv_norm_;
  std::unique_ptr<Vector> index_norm_, index_bias_;
  std::unique_ptr<Vector> pool_bias_;
  std::vector<std::unique_ptr<Weight>> keys_;    // a head's queries to the latent's space [kv_rank, key_dim]
  std::vector<std::unique_ptr<Weight>> values_;  // and its mixed latents to values [value_dim, kv_rank]
  SlicedProjection out_;
};

// A matrix' rows as columns, in fp32: its values by definition.
std::vector<float> transposed(const MatrixSource& matrix) {
  std::vector<float> out(static_cast<size_t>(matrix.rows * matrix.cols)), row(static_cast<size_t>(matrix.cols));
  WeightView view;
  for (int64_t r = 0; r < matrix.rows; ++r) {
    view.dequantise(matrix, r, 0, matrix.cols, row.data());
    for (int64_t c = 0; c < matrix.cols; ++c)
      out[static_cast<size_t>(c * matrix.rows + r)] = row[static_cast<size_t>(c)];
  }
  return out;
}

// kv_b_proj holds, head by head, key_dim rows that make keys of a latent and value_dim rows that make values. A query
// times the first is a query in the latent's space, so that keys are never made.
absl::Status LatentAttentionBlock::load_heads(LoadContext& load, const std::string& prefix,
                                              LatentAttentionBlock& block) {
  const LatentConfig& latent = load.config.latent;
  const int64_t head_rows = latent.key_dim + block.value_dim_;
  absl::StatusOr<MatrixSource> kv =
      load.reader.matrix(prefix + ".kv_b_proj", load.config.heads * head_rows, latent.kv_rank);
  if (!kv.ok()) return kv.status();
  for (int64_t head = block.first_head_; head < block.first_head_ + block.heads_; ++head) {
    const std::vector<float> values = transposed(kv->slice_rows(head * head_rows, latent.key_dim));
    MatrixSource keys;
    keys.rows = latent.kv_rank;
    keys.cols = latent.key_dim;
    keys.data = reinterpret_cast<const std::byte*>(values.data());
    keys.row_bytes = latent.key_dim * static_cast<int64_t>(sizeof(float));
    block.keys_.push_back(load.ops.pack({&keys, 1}));
    const MatrixSource part = kv->slice_rows(head * head_rows + latent.key_dim, block.value_dim_);
    block.values_.push_back(load.ops.pack({&part, 1}));
  }
  return absl::OkStatus();
}

absl::Status LatentAttentionBlock::load_indexer(LoadContext& load, const std::string& prefix,
                                                LatentAttentionBlock& block, std::vector<MatrixSource>& in) {
  const LatentConfig& latent = load.config.latent;
  const int64_t hidden = load.config.hidden_size, dim = latent.index_dim;
  absl::StatusOr<MatrixSource> key = load.reader.matrix(prefix + ".wk", dim, hidden);
  if (!key.ok()) return key.status();
  absl::StatusOr<MatrixSource> gate = load.reader.bare_matrix(prefix + ".index_kpool_compress_gate", dim, hidden);
  if (!gate.ok()) return gate.status();
  absl::StatusOr<MatrixSource> weights = load.reader.matrix(prefix + ".weights_proj", latent.index_heads, hidden);
  if (!weights.ok()) return weights.status();
  in.insert(in.end(), {*key, *gate, *weights});
  absl::StatusOr<std::unique_ptr<Vector>> norm = packed_norm(load, prefix + ".k_norm", dim);
  if (!norm.ok()) return norm.status();
  absl::StatusOr<std::unique_ptr<Vector>> bias = packed_part(load, prefix + ".k_norm.bias", dim, 0, dim);
  if (!bias.ok()) return bias.status();
  absl::StatusOr<std::vector<float>> ape =
      load.reader.table(prefix + ".index_kpool_compress_ape", latent.index_tokens, dim);
  if (!ape.ok()) return ape.status();
  block.index_norm_ = *std::move(norm);
  block.index_bias_ = *std::move(bias);
  block.pool_bias_ = load.ops.pack_vector(*ape);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<LatentAttentionBlock>> LatentAttentionBlock::load(LoadContext& load,
                                                                                 const std::string& prefix,
                                                                                 const LatentRows& rows) {
  auto block = std::make_unique<LatentAttentionBlock>();
  const ModelConfig& config = load.config;
  const LatentConfig& latent = config.latent;
  const Cut cut = make_cut(head_slices(config), load.shard);
  const int64_t hidden = config.hidden_size;
  block->config_ = latent;
  block->rows_ = rows;
  block->value_dim_ = config.head_dim;
  block->first_head_ = cut.first_unit();
  block->heads_ = cut.unit_count();
  block->eps_ = static_cast<float>(config.rms_norm_eps);
  absl::StatusOr<MatrixSource> q_a = load.reader.matrix(prefix + ".q_a_proj", latent.q_rank, hidden);
  if (!q_a.ok()) return q_a.status();
  absl::StatusOr<MatrixSource> kv_a = load.reader.matrix(prefix + ".kv_a_proj_with_mqa", latent.kv_rank, hidden);
  if (!kv_a.ok()) return kv_a.status();
  absl::StatusOr<MatrixSource> q_b =
      load.reader.matrix(prefix + ".q_b_proj", config.heads * latent.key_dim, latent.q_rank);
  if (!q_b.ok()) return q_b.status();
  std::vector<MatrixSource> in = {*q_a, *kv_a};
  std::vector<MatrixSource> query = {
      q_b->slice_rows(block->first_head_ * latent.key_dim, block->heads_ * latent.key_dim)};
  if (block->indexer()) {
    if (absl::Status s = load_indexer(load, prefix + ".indexer", *block, in); !s.ok()) return s;
    absl::StatusOr<MatrixSource> index_query =
        load.reader.matrix(prefix + ".indexer.wq_b", latent.index_heads * latent.index_dim, latent.q_rank);
    if (!index_query.ok()) return index_query.status();
    query.push_back(*index_query);
  }
  block->in_ = load.ops.pack(in);
  block->query_ = load.ops.pack(query);
  absl::StatusOr<std::unique_ptr<Vector>> q_norm = packed_norm(load, prefix + ".q_a_layernorm", latent.q_rank);
  if (!q_norm.ok()) return q_norm.status();
  absl::StatusOr<std::unique_ptr<Vector>> kv_norm = packed_norm(load, prefix + ".kv_a_layernorm", latent.kv_rank);
  if (!kv_norm.ok()) return kv_norm.status();
  block->q_norm_ = *std::move(q_norm);
  block->kv_norm_ = *std::move(kv_norm);
  if (absl::Status s = load_heads(load, prefix, *block); !s.ok()) return s;
  absl::StatusOr<SlicedProjection> out = SlicedProjection::load(load, prefix + ".o_proj", hidden, cut, config.head_dim);
  if (!out.ok()) return out.status();
  block->out_ = *std::move(out);
  return block;
}

WeightCost LatentAttentionBlock::cost() const {
  WeightCost cost = (cost_of(*in_) += cost_of(*query_)) += out_.cost();
  for (const auto& weight : keys_) cost += cost_of(*weight);
  for (const auto& weight : values_) cost += cost_of(*weight);
  return cost;
}

LatentAttentionBlock::Projected LatentAttentionBlock::project(PassContext& pass, Tensor x) const {
  Ops& ops = *pass.ops;
  const Tensor in = ops.scratch(x.rows, in_->out_features());
  ops.matmul(*in_, x, in);
  const Tensor latent = in.columns(config_.q_rank, config_.kv_rank);
  ops.rms_norm(latent, 1, *kv_norm_, eps_, latent);
  ops.row_write(*pass.row_cache, rows_.latent, latent, pass.rows);
  Projected out;
  out.query = ops.scratch_input(x.rows, config_.q_rank);
  ops.rms_norm(in.columns(0, config_.q_rank), 1, *q_norm_, eps_, out.query);
  if (!indexer()) return out;
  const int64_t at = config_.q_rank + config_.kv_rank, dim = config_.index_dim;
  ops.layer_norm(in.columns(at, dim), *index_norm_, *index_bias_, 1e-6f, in.columns(at, dim));
  ops.row_write(*pass.row_cache, rows_.index, in.columns(at, 2 * dim), pass.rows);
  PoolArgs pool;
  pool.from = rows_.index;
  pool.into = rows_.pooled;
  pool.tokens = config_.index_tokens;
  pool.bias = pool_bias_.get();
  pool.rows = pass.rows;
  ops.pool_rows(*pass.row_cache, pool);
  out.index_weights = in.columns(at + 2 * dim, config_.index_heads);
  return out;
}

absl::Status LatentAttentionBlock::add_to(PassContext& pass, int layer, Tensor x, Tensor selected,
                                          Tensor residual) const {
  Ops& ops = *pass.ops;
  const int64_t rank = config_.kv_rank, key_dim = config_.key_dim;
  const Projected in = project(pass, x);
  const Tensor queries = ops.scratch(x.rows, query_->out_features());
  ops.matmul(*query_, in.query, queries);
  if (indexer()) {
    SelectArgs select;
    select.layer = rows_.pooled;
    select.tokens = config_.index_tokens;
    select.heads = config_.index_heads;
    select.q = queries.columns(heads_ * key_dim, config_.index_heads * config_.index_dim);
    select.weights = in.index_weights;
    select.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config_.index_dim)));
    select.weight_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config_.index_heads)));
    select.out = selected;
    select.rows = pass.rows;
    ops.select_rows(*pass.row_cache, select);
    pass.record(layer, "attention.selected", selected);
  }
  LatentAttentionArgs args;
  args.q = ops.scratch(x.rows, heads_ * rank);
  args.out = ops.scratch_input(x.rows, heads_ * rank);
  std::vector<MatmulJob> jobs;
  for (int64_t h = 0; h < heads_; ++h) {
    jobs.push_back(
        {keys_[static_cast<size_t>(h)].get(), queries.columns(h * key_dim, key_dim), args.q.columns(h * rank, rank)});
  }
  ops.matmul_many(jobs);
  args.heads = heads_;
  args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(key_dim)));
  args.layer = rows_.latent;
  args.tokens = config_.index_tokens;
  args.selected = selected;
  args.rows = pass.rows;
  ops.latent_attention(*pass.row_cache, args);
  pass.record(layer, "attention.latents", args.out, first_head_, heads_);
  const Tensor mixed = ops.scratch_input(x.rows, heads_ * value_dim_);
  jobs.clear();
  for (int64_t h = 0; h < heads_; ++h) {
    jobs.push_back({values_[static_cast<size_t>(h)].get(), args.out.columns(h * rank, rank),
                    mixed.columns(h * value_dim_, value_dim_)});
  }
  ops.matmul_many(jobs);
  pass.record(layer, "attention.heads", mixed, first_head_, heads_);
  return out_.add_to(pass, layer, "attention.o_proj", mixed, residual);
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
    add_rows(config, !config.latent.shared_choice[i], shape->row_layers);
  }
  if (shape->has_mtp) add_rows(config, true, shape->row_layers);
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
    const LatentRows rows = linear ? LatentRows{} : add_rows(config, !config.latent.shared_choice[at], row_layers);
    absl::StatusOr<Glm5Layer> layer =
        load_layer(load, fmt::format("layers.{}", i), config.layers[at], config.mlps[at], true, rows, recurrent);
    if (!layer.ok()) return layer.status();
    layers_.push_back(*std::move(layer));
    recurrent += linear ? 1 : 0;
  }
  return shape_.has_mtp ? load_mtp(load, add_rows(config, true, row_layers)) : absl::OkStatus();
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
  *hidden = ops.scratch(rows, width);
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
