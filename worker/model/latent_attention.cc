#include "worker/model/latent_attention.h"

#include <fmt/format.h>

#include <cmath>

#include "kernels/ops/dequantise.h"
#include "kernels/ops/latent_ops.h"

namespace tensorfold {
namespace {

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

}  // namespace

LatentRows add_latent_rows(const ModelConfig& config, bool indexer, std::vector<RowCacheLayer>& layers) {
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
  const Tensor mixed = ops.scratch(x.rows, heads_ * value_dim_);
  jobs.clear();
  for (int64_t h = 0; h < heads_; ++h) {
    jobs.push_back({values_[static_cast<size_t>(h)].get(), args.out.columns(h * rank, rank),
                    mixed.columns(h * value_dim_, value_dim_)});
  }
  ops.matmul_many(jobs);
  pass.record(layer, "attention.heads", mixed, first_head_, heads_);
  return out_.add_to(pass, layer, "attention.o_proj", mixed, residual);
}

}  // namespace tensorfold
