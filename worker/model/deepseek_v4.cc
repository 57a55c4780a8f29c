// DeepSeek V4 (model_type "deepseek_v4"): heads that share one latent as keys and values, over a window of the last
// tokens and rows that pool older ones (all of them, or those that an indexer chooses), with sinks, rotations that are
// taken back from the result, and an output projection by groups of heads; experts in every layer, in some given by the
// token; all on a residual of several streams. Tensors by their original names.
#include <fmt/format.h>

#include <cmath>

#include "kernels/ops/latent_ops.h"
#include "worker/model/experts.h"
#include "worker/model/families.h"
#include "worker/model/grouped_output.h"
#include "worker/model/rope.h"
#include "worker/model/streamed_layer.h"

namespace tensorfold {
namespace {

// --- Pooled rows ----------------------------------------------------------------------------------------------------

// The layers of the row cache that one compressor has.
struct PooledRows {
  int64_t tokens = 0;   // of a window
  int64_t raw = -1;     // [keys | gates], a row a token
  int64_t pooled = -1;  // a row a window
};

// The layers of the row cache that one attention layer has.
struct LayerRows {
  int64_t latent = 0;
  PooledRows values;  // raw -1: none
  PooledRows index;
};

PooledRows add_pooled(int64_t width, int64_t tokens, bool overlap, std::vector<RowCacheLayer>& layers) {
  const PooledRows rows = {tokens, static_cast<int64_t>(layers.size()), static_cast<int64_t>(layers.size()) + 1};
  layers.push_back({2 * width * (overlap ? 2 : 1), 1});
  // A window longer than a page has its row in the page where it ends.
  layers.push_back({width, std::min(tokens, kPageTokens)});
  return rows;
}

LayerRows add_rows(const ModelConfig& config, LayerKind kind, std::vector<RowCacheLayer>& layers) {
  LayerRows rows;
  rows.latent = static_cast<int64_t>(layers.size());
  layers.push_back({config.head_dim, 1});
  if (kind == LayerKind::kWindow) return rows;
  const bool chosen = kind == LayerKind::kWindowAndChosen;
  const LatentConfig& latent = config.latent;
  rows.values = add_pooled(config.head_dim, chosen ? latent.index_tokens : latent.pooled_tokens, chosen, layers);
  if (chosen) rows.index = add_pooled(latent.index_dim, latent.index_tokens, true, layers);
  return rows;
}

// Pools tokens into rows: products for keys and gates, a bias by place in the window, a norm, a rotation.
class Compressor {
 public:
  // Reads `prefix`.{wkv,wgate,norm,ape}; appends the products' rows to `in`.
  static absl::StatusOr<Compressor> load(LoadContext& load, const std::string& prefix, int64_t width, bool overlap,
                                         const PooledRows& rows, std::vector<MatrixSource>& in);
  int64_t columns() const { return 2 * half_; }
  // `raw`: [rows, columns] of the product.
  void write(PassContext& pass, Tensor raw, const Vector& inv_freq, float eps) const;

 private:
  PooledRows rows_;
  bool overlap_ = false;
  int64_t half_ = 0;  // columns of the keys, and of the gates
  std::unique_ptr<Vector> bias_;
  std::unique_ptr<Vector> norm_;
};

absl::StatusOr<Compressor> Compressor::load(LoadContext& load, const std::string& prefix, int64_t width, bool overlap,
                                            const PooledRows& rows, std::vector<MatrixSource>& in) {
  Compressor compressor;
  compressor.rows_ = rows;
  compressor.overlap_ = overlap;
  compressor.half_ = width * (overlap ? 2 : 1);
  for (const char* part : {".wkv", ".wgate"}) {
    absl::StatusOr<MatrixSource> matrix = load.reader.matrix(prefix + part, compressor.half_, load.config.hidden_size);
    if (!matrix.ok()) return matrix.status();
    in.push_back(*matrix);
  }
  absl::StatusOr<std::vector<float>> bias = load.reader.table(prefix + ".ape", rows.tokens, compressor.half_);
  if (!bias.ok()) return bias.status();
  absl::StatusOr<std::unique_ptr<Vector>> norm = packed_norm(load, prefix + ".norm", width);
  if (!norm.ok()) return norm.status();
  compressor.bias_ = load.ops.pack_vector(*bias);
  compressor.norm_ = *std::move(norm);
  return compressor;
}

void Compressor::write(PassContext& pass, Tensor raw, const Vector& inv_freq, float eps) const {
  pass.ops->row_write(*pass.row_cache, rows_.raw, raw, pass.rows);
  PoolArgs args;
  args.from = rows_.raw;
  args.into = rows_.pooled;
  args.tokens = rows_.tokens;
  args.overlap = overlap_;
  args.bias = bias_.get();
  args.norm = norm_.get();
  args.eps = eps;
  args.inv_freq = &inv_freq;
  args.rows = pass.rows;
  pass.ops->pool_rows(*pass.row_cache, args);
}

// --- Attention ------------------------------------------------------------------------------------------------------

// Both rotations' angles of a pass, and the frequencies that pooled rows are rotated with.
struct Rotations {
  RopeTable window;
  RopeTable pooled;
  const Vector* pooled_freq = nullptr;
};

class V4Attention {
 public:
  static absl::StatusOr<std::unique_ptr<V4Attention>> load(LoadContext& load, const std::string& prefix, LayerKind kind,
                                                           const LayerRows& rows);
  absl::Status add_to(PassContext& pass, int layer, const Rotations& rotations, Tensor x, Tensor residual) const;
  WeightCost cost() const;

 private:
  absl::Status load_inputs(LoadContext& load, const std::string& prefix);
  Tensor choose(PassContext& pass, int layer, const RopeTable& rope, Tensor q, Tensor weights) const;

  LatentConfig config_;
  LayerKind kind_ = LayerKind::kWindow;
  LayerRows rows_;
  int64_t dim_ = 0;
  int64_t first_head_ = 0;
  int64_t heads_ = 0;  // this rank's
  float eps_ = 0;
  std::unique_ptr<Weight> in_;     // wq_a | wkv | compressor | indexer: compressor | weights; whole everywhere
  std::unique_ptr<Weight> query_;  // wq_b of this rank's heads | indexer: wq_b, whole everywhere
  std::unique_ptr<Vector> q_norm_, kv_norm_;
  std::unique_ptr<Vector> ones_;  // each head's query is normed without weights
  std::unique_ptr<Vector> sinks_;
  Compressor values_, index_;
  GroupedOutput out_;
};

absl::Status V4Attention::load_inputs(LoadContext& load, const std::string& prefix) {
  const int64_t hidden = load.config.hidden_size;
  absl::StatusOr<MatrixSource> wq_a = load.reader.matrix(prefix + ".wq_a", config_.q_rank, hidden);
  if (!wq_a.ok()) return wq_a.status();
  absl::StatusOr<MatrixSource> wkv = load.reader.matrix(prefix + ".wkv", dim_, hidden);
  if (!wkv.ok()) return wkv.status();
  absl::StatusOr<MatrixSource> wq_b = load.reader.matrix(prefix + ".wq_b", load.config.heads * dim_, config_.q_rank);
  if (!wq_b.ok()) return wq_b.status();
  std::vector<MatrixSource> in = {*wq_a, *wkv}, query = {wq_b->slice_rows(first_head_ * dim_, heads_ * dim_)};
  const bool chosen = kind_ == LayerKind::kWindowAndChosen;
  if (kind_ != LayerKind::kWindow) {
    absl::StatusOr<Compressor> values = Compressor::load(load, prefix + ".compressor", dim_, chosen, rows_.values, in);
    if (!values.ok()) return values.status();
    values_ = *std::move(values);
  }
  if (chosen) {
    const std::string indexer = prefix + ".indexer";
    absl::StatusOr<Compressor> index =
        Compressor::load(load, indexer + ".compressor", config_.index_dim, true, rows_.index, in);
    if (!index.ok()) return index.status();
    index_ = *std::move(index);
    absl::StatusOr<MatrixSource> weights = load.reader.matrix(indexer + ".weights_proj", config_.index_heads, hidden);
    if (!weights.ok()) return weights.status();
    in.push_back(*weights);
    absl::StatusOr<MatrixSource> index_query =
        load.reader.matrix(indexer + ".wq_b", config_.index_heads * config_.index_dim, config_.q_rank);
    if (!index_query.ok()) return index_query.status();
    query.push_back(*index_query);
  }
  in_ = load.ops.pack(in);
  query_ = load.ops.pack(query);
  absl::StatusOr<std::unique_ptr<Vector>> q_norm = packed_norm(load, prefix + ".q_norm", config_.q_rank);
  if (!q_norm.ok()) return q_norm.status();
  const bool original = load.reader.has(prefix + ".kv_norm.weight");
  absl::StatusOr<std::unique_ptr<Vector>> kv_norm = packed_norm(load, prefix + (original ? ".kv_norm" : ".norm"), dim_);
  if (!kv_norm.ok()) return kv_norm.status();
  q_norm_ = *std::move(q_norm);
  kv_norm_ = *std::move(kv_norm);
  ones_ = load.ops.pack_vector(std::vector<float>(static_cast<size_t>(dim_), 1.0f));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<V4Attention>> V4Attention::load(LoadContext& load, const std::string& prefix,
                                                               LayerKind kind, const LayerRows& rows) {
  auto block = std::make_unique<V4Attention>();
  absl::StatusOr<GroupedOutput> out = GroupedOutput::load(load, prefix);
  if (!out.ok()) return out.status();
  block->out_ = *std::move(out);
  block->config_ = load.config.latent;
  block->kind_ = kind;
  block->rows_ = rows;
  block->dim_ = load.config.head_dim;
  block->first_head_ = block->out_.first_head();
  block->heads_ = block->out_.heads();
  block->eps_ = static_cast<float>(load.config.rms_norm_eps);
  if (absl::Status s = block->load_inputs(load, prefix); !s.ok()) return s;
  absl::StatusOr<std::unique_ptr<Vector>> sinks =
      packed_part(load, prefix + ".attn_sink", load.config.heads, block->first_head_, block->heads_);
  if (!sinks.ok()) return sinks.status();
  block->sinks_ = *std::move(sinks);
  return block;
}

WeightCost V4Attention::cost() const { return (cost_of(*in_) += cost_of(*query_)) += out_.cost(); }

Tensor V4Attention::choose(PassContext& pass, int layer, const RopeTable& rope, Tensor q, Tensor weights) const {
  Ops& ops = *pass.ops;
  ops.rope_pairs(q, config_.index_heads, config_.index_dim, rope, false);
  SelectArgs select;
  select.layer = rows_.index.pooled;
  select.tokens = config_.index_tokens;
  select.heads = config_.index_heads;
  select.q = q;
  select.weights = weights;
  select.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config_.index_dim)));
  select.weight_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config_.index_heads)));
  select.out = ops.scratch(q.rows, config_.index_windows);
  select.rows = pass.rows;
  ops.select_rows(*pass.row_cache, select);
  pass.record(layer, "attention.selected", select.out);
  return select.out;
}

absl::Status V4Attention::add_to(PassContext& pass, int layer, const Rotations& rotations, Tensor x,
                                 Tensor residual) const {
  Ops& ops = *pass.ops;
  const RopeTable& rope = kind_ == LayerKind::kWindow ? rotations.window : rotations.pooled;
  const Tensor in = ops.scratch(x.rows, in_->out_features());
  ops.matmul(*in_, x, in);
  const Tensor query = ops.scratch_input(x.rows, config_.q_rank);
  ops.rms_norm(in.columns(0, config_.q_rank), 1, *q_norm_, eps_, query);
  const Tensor queries = ops.scratch(x.rows, query_->out_features());
  ops.matmul(*query_, query, queries);
  int64_t at = config_.q_rank;
  const Tensor latent = in.columns(at, dim_);
  at += dim_;
  ops.rms_norm(latent, 1, *kv_norm_, eps_, latent);
  ops.rope_pairs(latent, 1, dim_, rope, false);
  ops.row_write(*pass.row_cache, rows_.latent, latent, pass.rows);

  LatentAttentionArgs args;
  args.q = queries.columns(0, heads_ * dim_);
  ops.rms_norm(args.q, heads_, *ones_, eps_, args.q);
  ops.rope_pairs(args.q, heads_, dim_, rope, false);
  pass.record(layer, "attention.q", args.q, first_head_, heads_);
  if (kind_ != LayerKind::kWindow) {
    values_.write(pass, in.columns(at, values_.columns()), *rotations.pooled_freq, eps_);
    at += values_.columns();
    args.pooled = rows_.values.pooled;
    args.tokens = rows_.values.tokens;
  }
  if (kind_ == LayerKind::kWindowAndChosen) {
    index_.write(pass, in.columns(at, index_.columns()), *rotations.pooled_freq, eps_);
    at += index_.columns();
    args.selected = choose(pass, layer, rope, queries.columns(heads_ * dim_, config_.index_heads * config_.index_dim),
                           in.columns(at, config_.index_heads));
  }
  args.out = ops.scratch(x.rows, heads_ * dim_);
  args.heads = heads_;
  args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim_)));
  args.sinks = sinks_.get();
  args.layer = rows_.latent;
  args.window = config_.window;
  args.rows = pass.rows;
  ops.latent_attention(*pass.row_cache, args);
  // Values were rotated as the keys that they are: what is left is their place relative to the query.
  ops.rope_pairs(args.out, heads_, dim_, rope, true);
  pass.record(layer, "attention.heads", args.out, first_head_, heads_);
  return out_.add_to(pass, layer, args.out, residual);
}

// --- The model ------------------------------------------------------------------------------------------------------

absl::StatusOr<ModelShape> deepseek_v4_shape(const ModelConfig& config, ShardSpec shard) {
  absl::StatusOr<ModelShape> shape = decoder_shape(config, shard);
  if (!shape.ok()) return shape;
  for (const LayerKind kind : config.layers) add_rows(config, kind, shape->row_layers);
  return shape;
}

struct V4Layer {
  StreamedLayer blocks;
  std::unique_ptr<V4Attention> attention;
};

class DeepseekV4 : public Model {
 public:
  static absl::StatusOr<std::unique_ptr<Model>> load(LoadContext& load, const ModelShape& shape);

  const ModelShape& shape() const override { return shape_; }
  int64_t weight_bytes() const override { return cost().bytes; }
  int64_t weight_values() const override { return cost().values; }
  absl::Status forward(PassContext& pass, Tensor* hidden) override;
  void logits(PassContext& pass, Tensor hidden, Tensor logits) override { vocabulary_->logits(pass, hidden, logits); }
  bool serves_drafters() const override { return true; }
  void embed(PassContext& pass, Tensor out) override { vocabulary_->embed(pass, out); }
  absl::Status mtp(PassContext&, Tensor, bool, Tensor*) override {
    return absl::UnimplementedError("deepseek_v4 has no MTP layer: its own drafter drafts blocks");
  }

 private:
  DeepseekV4(const ModelConfig& config, const ModelShape& shape)
      : shape_(shape), streams_(config.streams.count), eps_(static_cast<float>(config.rms_norm_eps)) {}
  static absl::StatusOr<V4Layer> load_layer(LoadContext& load, int64_t index, const LayerRows& rows);
  WeightCost cost() const;

  ModelShape shape_;
  int64_t streams_ = 0;
  float eps_ = 0;
  std::unique_ptr<Vector> window_freq_, pooled_freq_;
  std::unique_ptr<VocabularyBlock> vocabulary_;
  std::vector<V4Layer> layers_;
  std::unique_ptr<HyperHead> head_;
  std::unique_ptr<Vector> final_norm_;
};

absl::StatusOr<V4Layer> DeepseekV4::load_layer(LoadContext& load, int64_t index, const LayerRows& rows) {
  const std::string prefix = fmt::format("layers.{}", index);
  const auto at = static_cast<size_t>(index);
  auto attention = V4Attention::load(load, prefix + ".attn", load.config.layers[at], rows);
  if (!attention.ok()) return attention.status();
  auto blocks = StreamedLayer::load(load, prefix, load.config.latent.experts_by_token[at]);
  if (!blocks.ok()) return blocks.status();
  return V4Layer{*std::move(blocks), *std::move(attention)};
}

absl::StatusOr<std::unique_ptr<Model>> DeepseekV4::load(LoadContext& load, const ModelShape& shape) {
  std::unique_ptr<DeepseekV4> model(new DeepseekV4(load.config, shape));
  model->window_freq_ = load.ops.pack_vector(inverse_frequencies(load.config.rope));
  model->pooled_freq_ = load.ops.pack_vector(inverse_frequencies(load.config.latent.pooled_rope));
  auto vocabulary = VocabularyBlock::load(load, vocab_slices(load.config));
  if (!vocabulary.ok()) return vocabulary.status();
  model->vocabulary_ = *std::move(vocabulary);
  std::vector<RowCacheLayer> row_layers;
  for (int64_t i = 0; i < load.config.layer_count(); ++i) {
    const LayerRows rows = add_rows(load.config, load.config.layers[static_cast<size_t>(i)], row_layers);
    absl::StatusOr<V4Layer> layer = load_layer(load, i, rows);
    if (!layer.ok()) return layer.status();
    model->layers_.push_back(*std::move(layer));
  }
  auto head = HyperHead::load(load);
  if (!head.ok()) return head.status();
  model->head_ = *std::move(head);
  auto norm = packed_norm(load, "norm", load.config.hidden_size);
  if (!norm.ok()) return norm.status();
  model->final_norm_ = *std::move(norm);
  return model;
}

WeightCost DeepseekV4::cost() const {
  WeightCost cost = vocabulary_->cost() += head_->cost();
  for (const V4Layer& layer : layers_) {
    cost += layer.blocks.cost();
    cost += layer.attention->cost();
  }
  return cost;
}

absl::Status DeepseekV4::forward(PassContext& pass, Tensor* hidden) {
  Ops& ops = *pass.ops;
  const int64_t rows = pass.rows.rows(), width = shape_.hidden;
  const Streams streams = Streams::make(ops, rows, streams_, width);
  const Tensor normed = ops.scratch_input(rows, width);
  *hidden = pass.make_rows(width);
  const Rotations rotations = {ops.rope_table(pass.rows, *window_freq_, 1.0),
                               ops.rope_table(pass.rows, *pooled_freq_, 1.0), pooled_freq_.get()};
  for (int64_t s = 0; s < streams_; ++s) vocabulary_->embed(pass, streams.all.columns(s * width, width));
  pass.record(-1, "embed", streams.all);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const int index = static_cast<int>(i);
    const V4Attention& attention = *layers_[i].attention;
    const absl::Status status = layers_[i].blocks.run(pass, index, streams, normed, [&](Tensor x, Tensor output) {
      return attention.add_to(pass, index, rotations, x, output);
    });
    if (!status.ok()) return status;
    pass.tap(static_cast<int64_t>(i), streams.all);
  }
  head_->collapse(pass, streams);
  ops.rms_norm(streams.input, 1, *final_norm_, eps_, *hidden);
  pass.record(static_cast<int>(layers_.size()), "final_norm", *hidden);
  return absl::OkStatus();
}

}  // namespace

const FamilyEntry kDeepseekV4Entry = {Family::kDeepseekV4, "deepseek_v4", deepseek_v4_shape, DeepseekV4::load};

}  // namespace tensorfold
