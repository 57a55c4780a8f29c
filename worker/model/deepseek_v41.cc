// DeepSeek V4.1 (model_type "deepseek_v41"): V4's attention over a window and pooled rows, but few layers make pooled
// rows and few choose among them; the others take those of the last layer that did. Rows of the cache are rounded to
// small formats as part of the model; streams are summed by the weights of the block before; engram layers add what the
// n-grams of token classes look up.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/ops/fake_quantise.h"
#include "kernels/ops/latent_ops.h"
#include "worker/model/engram.h"
#include "worker/model/experts.h"
#include "worker/model/families.h"
#include "worker/model/grouped_output.h"
#include "worker/model/rope.h"
#include "worker/model/streamed_layer.h"

namespace tensorfold {
namespace {

// --- Cached rows ----------------------------------------------------------------------------------------------------

// The layers of the row cache that one model layer has, -1: none.
struct LayerRows {
  int64_t latent = -1;  // of every layer: the window's
  int64_t raw = -1;     // [keys | gates], a row a token, where windows of several tokens are pooled
  int64_t pooled = -1;
  int64_t index = -1;
};

struct ModelRows {
  std::vector<LayerRows> layers;
  int64_t classes = -1;  // of tokens, for n-grams
};

ModelRows add_rows(const ModelConfig& config, std::vector<RowCacheLayer>& out) {
  ModelRows rows;
  const auto add = [&](int64_t width, int64_t tokens) {
    out.push_back({width, tokens});
    return static_cast<int64_t>(out.size()) - 1;
  };
  for (int64_t i = 0; i < config.layer_count(); ++i) {
    LayerRows layer;
    layer.latent = add(config.head_dim, 1);
    const int64_t tokens = config.shared_latents.tokens[static_cast<size_t>(i)];
    if (config.shared_latents.makes_rows(i)) {
      if (tokens > 1) layer.raw = add(2 * config.head_dim, 1);
      layer.pooled = add(config.head_dim, tokens);
      layer.index = add(config.latent.index_dim, tokens);
    }
    rows.layers.push_back(layer);
  }
  if (!config.engram.layers.empty()) rows.classes = add(1, 1);
  return rows;
}

// --- What layers of one pass share ----------------------------------------------------------------------------------

struct Shared {
  RopeTable window;         // of layers without pooled rows
  RopeTable pooled;         // of the others
  Tensor selected;          // [rows, top-k]: the last choice
  Tensor candidates;        // [rows, blocks], or no data before the layer that chooses them
  const Vector* frequency;  // of pooled rows
};

// --- Attention ------------------------------------------------------------------------------------------------------

class V41Attention {
 public:
  static absl::StatusOr<std::unique_ptr<V41Attention>> load(LoadContext& load, int64_t layer, const ModelRows& rows);
  absl::Status add_to(PassContext& pass, int layer, Shared& shared, Tensor x, Tensor residual) const;
  WeightCost cost() const;

 private:
  absl::Status load_products(LoadContext& load, const std::string& prefix);
  absl::Status load_vectors(LoadContext& load, const std::string& prefix);
  void round(Ops& ops, Tensor x, FakeFormat format) const;
  void make_rows(PassContext& pass, const Shared& shared, Tensor keys, Tensor gates, int layer) const;
  void choose(PassContext& pass, int layer, Shared& shared, Tensor q, Tensor weights) const;

  LatentConfig config_;
  SharedLatentsConfig shared_;
  bool rounds_ = false;
  bool makes_rows_ = false;
  bool chooses_ = false;
  bool within_ = false;  // chooses among candidates
  bool lists_ = false;   // lists candidates
  int64_t tokens_ = 0;   // of a pooled row; 0: none
  LayerRows own_;
  LayerRows source_;  // of the layer whose pooled rows are read
  int64_t dim_ = 0;
  float eps_ = 0;
  std::unique_ptr<Weight> in_;     // wq_a | wkv | compressor: wkv | wgate | indexer: weights_proj; whole everywhere
  std::unique_ptr<Weight> query_;  // wq_b of this rank's heads | indexer: wq_b, whole everywhere
  std::unique_ptr<Weight> index_key_;
  std::unique_ptr<Vector> q_norm_, kv_norm_, pooled_norm_, index_norm_;
  std::unique_ptr<Vector> sinks_;
  GroupedOutput out_;
};

absl::Status V41Attention::load_products(LoadContext& load, const std::string& prefix) {
  const int64_t hidden = load.config.hidden_size;
  std::vector<MatrixSource> in, query;
  const auto read = [&](const std::string& module, int64_t rows, int64_t cols, std::vector<MatrixSource>& into) {
    absl::StatusOr<MatrixSource> matrix = load.reader.matrix(prefix + module, rows, cols);
    if (matrix.ok()) into.push_back(*matrix);
    return matrix.status();
  };
  if (absl::Status s = read(".wq_a", config_.q_rank, hidden, in); !s.ok()) return s;
  if (absl::Status s = read(".wkv", dim_, hidden, in); !s.ok()) return s;
  if (absl::Status s = read(".wq_b", load.config.heads * dim_, config_.q_rank, query); !s.ok()) return s;
  query[0] = query[0].slice_rows(out_.first_head() * dim_, out_.heads() * dim_);
  if (makes_rows_) {
    if (absl::Status s = read(".compressor.wkv", dim_, hidden, in); !s.ok()) return s;
    if (tokens_ > 1) {
      if (absl::Status s = read(".compressor.wgate", dim_, hidden, in); !s.ok()) return s;
    }
    std::vector<MatrixSource> key;
    if (absl::Status s = read(".indexer.wk", config_.index_dim, dim_, key); !s.ok()) return s;
    index_key_ = load.ops.pack(key);
  }
  if (chooses_) {
    if (absl::Status s = read(".indexer.weights_proj", config_.index_heads, hidden, in); !s.ok()) return s;
    const int64_t rows = config_.index_heads * config_.index_dim;
    if (absl::Status s = read(".indexer.wq_b", rows, config_.q_rank, query); !s.ok()) return s;
  }
  in_ = load.ops.pack(in);
  query_ = load.ops.pack(query);
  return absl::OkStatus();
}

absl::Status V41Attention::load_vectors(LoadContext& load, const std::string& prefix) {
  struct Norm {
    const char* name;
    int64_t size;
    bool wanted;
    std::unique_ptr<Vector>& into;
  };
  for (const Norm& norm : {Norm{".q_norm", config_.q_rank, true, q_norm_}, Norm{".kv_norm", dim_, true, kv_norm_},
                           Norm{".compressor.norm", dim_, makes_rows_, pooled_norm_},
                           Norm{".indexer.k_norm", config_.index_dim, makes_rows_, index_norm_}}) {
    if (!norm.wanted) continue;
    absl::StatusOr<std::unique_ptr<Vector>> read = packed_norm(load, prefix + norm.name, norm.size);
    if (!read.ok()) return read.status();
    norm.into = *std::move(read);
  }
  absl::StatusOr<std::unique_ptr<Vector>> sinks =
      packed_part(load, prefix + ".attn_sink", load.config.heads, out_.first_head(), out_.heads());
  if (!sinks.ok()) return sinks.status();
  sinks_ = *std::move(sinks);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<V41Attention>> V41Attention::load(LoadContext& load, int64_t layer,
                                                                 const ModelRows& rows) {
  const auto at = static_cast<size_t>(layer);
  const std::string prefix = fmt::format("layers.{}.attn", layer);
  auto block = std::make_unique<V41Attention>();
  absl::StatusOr<GroupedOutput> out = GroupedOutput::load(load, prefix);
  if (!out.ok()) return out.status();
  block->out_ = *std::move(out);
  const SharedLatentsConfig& shared = block->shared_ = load.config.shared_latents;
  block->config_ = load.config.latent;
  block->rounds_ = load.config.precision == Precision::kCheckpoint;
  block->makes_rows_ = shared.makes_rows(layer);
  block->chooses_ = shared.chooses(layer);
  block->lists_ = layer == shared.candidate_layer;
  block->within_ = shared.candidate_layer >= 0 && layer > shared.candidate_layer;
  block->tokens_ = shared.tokens[at];
  block->own_ = rows.layers[at];
  if (block->tokens_ > 0) block->source_ = rows.layers[static_cast<size_t>(shared.kv_source[at])];
  block->dim_ = load.config.head_dim;
  block->eps_ = static_cast<float>(load.config.rms_norm_eps);
  if (absl::Status s = block->load_products(load, prefix); !s.ok()) return s;
  if (absl::Status s = block->load_vectors(load, prefix); !s.ok()) return s;
  return block;
}

WeightCost V41Attention::cost() const {
  WeightCost cost = (cost_of(*in_) += cost_of(*query_)) += out_.cost();
  if (index_key_ != nullptr) cost += cost_of(*index_key_);
  return cost;
}

void V41Attention::round(Ops& ops, Tensor x, FakeFormat format) const {
  if (rounds_) ops.fake_quantise(x, format);
}

// Every row computes the pooled row that ends with it; rows that end none compute something that nobody sees.
void V41Attention::make_rows(PassContext& pass, const Shared& shared, Tensor keys, Tensor gates, int layer) const {
  Ops& ops = *pass.ops;
  Tensor pooled = keys;
  if (tokens_ > 1) {
    // Keys and gates are neighbouring columns of one product.
    ops.row_write(*pass.row_cache, own_.raw, {keys.data, keys.rows, keys.cols + gates.cols, keys.stride, keys.rounded},
                  pass.rows);
    pooled = ops.scratch(keys.rows, dim_);
    PoolLatentsArgs pool;
    pool.from = own_.raw;
    pool.tokens = tokens_;
    pool.out = pooled;
    pool.rows = pass.rows;
    ops.pool_latents(*pass.row_cache, pool);
  }
  const RopeTable rope = ops.window_rope_table(pass.rows, *shared.frequency, tokens_);
  const Tensor normed = ops.scratch_input(pooled.rows, dim_), index = ops.scratch(pooled.rows, config_.index_dim);
  ops.rms_norm(pooled, 1, *pooled_norm_, eps_, normed);
  ops.matmul(*index_key_, normed, index);
  ops.rms_norm(index, 1, *index_norm_, eps_, index);
  ops.rope_pairs(index, 1, config_.index_dim, rope, false);
  round(ops, index, FakeFormat::kE2m1By32);
  ops.write_windows(*pass.row_cache, own_.index, index, pass.rows);
  ops.rms_norm(pooled, 1, *pooled_norm_, eps_, pooled);
  ops.rope_pairs(pooled, 1, dim_, rope, false);
  round(ops, pooled, FakeFormat::kE2m1By16);
  ops.write_windows(*pass.row_cache, own_.pooled, pooled, pass.rows);
  if (tokens_ == 1) pass.record(layer, "attention.pooled", pooled);
}

void V41Attention::choose(PassContext& pass, int layer, Shared& shared, Tensor q, Tensor weights) const {
  Ops& ops = *pass.ops;
  ops.rope_pairs(q, config_.index_heads, config_.index_dim, shared.pooled, false);
  round(ops, q, FakeFormat::kE2m1By32);
  SelectArgs select;
  select.layer = source_.index;
  select.tokens = tokens_;
  select.heads = config_.index_heads;
  select.q = q;
  select.weights = weights;
  select.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config_.index_dim)));
  select.weight_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config_.index_heads)));
  select.out = shared.selected;
  select.block = shared_.candidate_block;
  if (within_) select.candidates = shared.candidates;
  if (lists_) select.blocks_out = shared.candidates;
  select.rows = pass.rows;
  ops.select_rows(*pass.row_cache, select);
  pass.record(layer, "attention.selected", shared.selected);
  if (lists_) pass.record(layer, "attention.candidates", shared.candidates);
}

absl::Status V41Attention::add_to(PassContext& pass, int layer, Shared& shared, Tensor x, Tensor residual) const {
  Ops& ops = *pass.ops;
  const RopeTable& rope = tokens_ > 0 ? shared.pooled : shared.window;
  const int64_t heads = out_.heads(), first_head = out_.first_head();
  const Tensor in = ops.scratch(x.rows, in_->out_features());
  ops.matmul(*in_, x, in);
  const Tensor query = ops.scratch_input(x.rows, config_.q_rank);
  ops.rms_norm(in.columns(0, config_.q_rank), 1, *q_norm_, eps_, query);
  const Tensor queries = ops.scratch(x.rows, query_->out_features());
  ops.matmul(*query_, query, queries);
  int64_t at = config_.q_rank;
  const auto next = [&](int64_t columns) { return in.columns((at += columns) - columns, columns); };

  const Tensor latent = next(dim_);
  ops.rms_norm(latent, 1, *kv_norm_, eps_, latent);
  ops.rope_pairs(latent, 1, dim_, rope, false);
  round(ops, latent, FakeFormat::kE4m3By32);
  pass.record(layer, "attention.latent", latent);
  ops.row_write(*pass.row_cache, own_.latent, latent, pass.rows);
  if (makes_rows_) {
    const Tensor keys = next(dim_);
    make_rows(pass, shared, keys, tokens_ > 1 ? next(dim_) : Tensor(), layer);
  }
  if (chooses_) {
    choose(pass, layer, shared, queries.columns(heads * dim_, config_.index_heads * config_.index_dim),
           next(config_.index_heads));
  }

  LatentAttentionArgs args;
  args.q = queries.columns(0, heads * dim_);
  ops.rope_pairs(args.q, heads, dim_, rope, false);
  pass.record(layer, "attention.q", args.q, first_head, heads);
  if (tokens_ > 0) {
    args.pooled = source_.pooled;
    args.tokens = tokens_;
    args.selected = shared.selected;
  }
  args.out = ops.scratch_input(x.rows, heads * dim_);
  args.heads = heads;
  args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim_)));
  args.sinks = sinks_.get();
  args.layer = own_.latent;
  args.window = config_.window;
  args.rows = pass.rows;
  ops.latent_attention(*pass.row_cache, args);
  // Values were rotated as the keys that they are: what is left is their place relative to the query.
  ops.rope_pairs(args.out, heads, dim_, rope, true);
  pass.record(layer, "attention.heads", args.out, first_head, heads);
  return out_.add_to(pass, layer, args.out, residual);
}

// --- The model ------------------------------------------------------------------------------------------------------

absl::StatusOr<ModelShape> deepseek_v41_shape(const ModelConfig& config, ShardSpec shard) {
  absl::StatusOr<ModelShape> shape = decoder_shape(config, shard);
  if (!shape.ok()) return shape;
  if (!config.engram.layers.empty()) {
    if (absl::Status s = add_dimension(*shape, "n-gram heads", engram_slices(config), shard); !s.ok()) return s;
  }
  add_rows(config, shape->row_layers);
  return shape;
}

struct V41Layer {
  std::unique_ptr<EngramBlock> engram;  // null: none
  StreamedLayer blocks;
  std::unique_ptr<V41Attention> attention;
};

class DeepseekV41 : public Model {
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
    return absl::UnimplementedError("deepseek_v41 has no MTP layer: its own drafter drafts blocks");
  }

 private:
  DeepseekV41(const ModelConfig& config, const ModelShape& shape)
      : config_(config), shape_(shape), eps_(static_cast<float>(config.rms_norm_eps)) {}
  static absl::StatusOr<V41Layer> load_layer(LoadContext& load, int64_t index, const ModelRows& rows);
  WeightCost cost() const;

  ModelConfig config_;
  ModelShape shape_;
  float eps_ = 0;
  int64_t class_rows_ = -1;
  std::unique_ptr<Vector> window_freq_, pooled_freq_;
  std::unique_ptr<VocabularyBlock> vocabulary_;
  std::vector<V41Layer> layers_;
  std::unique_ptr<Vector> final_norm_;
};

absl::StatusOr<V41Layer> DeepseekV41::load_layer(LoadContext& load, int64_t index, const ModelRows& rows) {
  const std::string prefix = fmt::format("layers.{}", index);
  V41Layer layer;
  const std::vector<int64_t>& engrams = load.config.engram.layers;
  const auto engram = std::find(engrams.begin(), engrams.end(), index);
  if (engram != engrams.end()) {
    auto block = EngramBlock::load(load, prefix + ".engram", engram - engrams.begin());
    if (!block.ok()) return block.status();
    layer.engram = *std::move(block);
  }
  auto attention = V41Attention::load(load, index, rows);
  if (!attention.ok()) return attention.status();
  layer.attention = *std::move(attention);
  auto blocks = StreamedLayer::load(load, prefix, /*by_token=*/false);
  if (!blocks.ok()) return blocks.status();
  layer.blocks = *std::move(blocks);
  load.reader.leave(prefix + ".ffn.gate.bias_vl");  // of tokens of pictures
  return layer;
}

absl::StatusOr<std::unique_ptr<Model>> DeepseekV41::load(LoadContext& load, const ModelShape& shape) {
  if (!load.config.engram.layers.empty() && load.config.engram.class_of == nullptr) {
    return absl::InvalidArgumentError("deepseek_v41 with engram layers needs the token classes of tokenizer.json");
  }
  std::unique_ptr<DeepseekV41> model(new DeepseekV41(load.config, shape));
  model->window_freq_ = load.ops.pack_vector(inverse_frequencies(load.config.rope));
  model->pooled_freq_ = load.ops.pack_vector(inverse_frequencies(load.config.latent.pooled_rope));
  auto vocabulary = VocabularyBlock::load(load, vocab_slices(load.config));
  if (!vocabulary.ok()) return vocabulary.status();
  model->vocabulary_ = *std::move(vocabulary);
  std::vector<RowCacheLayer> row_layers;
  const ModelRows rows = add_rows(load.config, row_layers);
  model->class_rows_ = rows.classes;
  for (int64_t i = 0; i < load.config.layer_count(); ++i) {
    absl::StatusOr<V41Layer> layer = load_layer(load, i, rows);
    if (!layer.ok()) return layer.status();
    model->layers_.push_back(*std::move(layer));
  }
  auto norm = packed_norm(load, "norm", load.config.hidden_size);
  if (!norm.ok()) return norm.status();
  model->final_norm_ = *std::move(norm);
  return model;
}

WeightCost DeepseekV41::cost() const {
  WeightCost cost = vocabulary_->cost();
  for (const V41Layer& layer : layers_) {
    if (layer.engram != nullptr) cost += layer.engram->cost();
    cost += layer.blocks.cost();
    cost += layer.attention->cost();
  }
  return cost;
}

absl::Status DeepseekV41::forward(PassContext& pass, Tensor* hidden) {
  Ops& ops = *pass.ops;
  const int64_t rows = pass.rows.rows(), width = shape_.hidden;
  Streams streams = Streams::make(ops, rows, config_.streams.count, width);
  streams.carry(ops);
  const Tensor normed = ops.scratch_input(rows, width);
  *hidden = pass.make_rows(width);
  Shared shared;
  shared.window = ops.rope_table(pass.rows, *window_freq_, 1.0);
  shared.pooled = ops.rope_table(pass.rows, *pooled_freq_, 1.0);
  shared.frequency = pooled_freq_.get();
  shared.selected = ops.scratch(rows, config_.latent.index_windows);
  if (config_.shared_latents.candidate_layer >= 0) {
    shared.candidates = ops.scratch(rows, config_.shared_latents.candidate_blocks);
  }
  TokenClasses classes;
  if (class_rows_ >= 0) classes = TokenClasses::read(pass, config_.engram, class_rows_);
  for (int64_t s = 0; s < streams.count; ++s) vocabulary_->embed(pass, streams.all.columns(s * width, width));
  pass.record(-1, "embed", streams.all);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const int index = static_cast<int>(i);
    if (layers_[i].engram != nullptr) {
      const absl::Status status = layers_[i].engram->add_to(pass, index, classes, streams.all);
      if (!status.ok()) return status;
    }
    const V41Attention& attention = *layers_[i].attention;
    const absl::Status status = layers_[i].blocks.run(pass, index, streams, normed, [&](Tensor x, Tensor output) {
      return attention.add_to(pass, index, shared, x, output);
    });
    if (!status.ok()) return status;
    pass.tap(index, streams.all);
  }
  streams.collapse_carried(ops);
  ops.rms_norm(streams.input, 1, *final_norm_, eps_, *hidden);
  pass.record(static_cast<int>(layers_.size()), "final_norm", *hidden);
  return absl::OkStatus();
}

}  // namespace

const FamilyEntry kDeepseekV41Entry = {Family::kDeepseekV41, "deepseek_v41", deepseek_v41_shape, DeepseekV41::load};

}  // namespace tensorfold
