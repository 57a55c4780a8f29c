#include "worker/model/indexer.h"

#include <cmath>

#include "kernels/ops/stream_ops.h"
#include "worker/model/rope.h"

namespace tensorfold {

std::vector<RowCacheLayer> indexer_layers(const IndexerConfig& config) {
  return {{.width = config.head_dim, .tokens = 1}, {.width = config.head_dim, .tokens = config.tokens}};
}

absl::StatusOr<std::unique_ptr<IndexerBlock>> IndexerBlock::load(LoadContext& load, const std::string& prefix,
                                                                 int64_t rows) {
  auto block = std::make_unique<IndexerBlock>();
  const IndexerConfig& config = load.config.indexer;
  block->config_ = config;
  block->rows_ = rows;
  block->eps_ = static_cast<float>(load.config.rms_norm_eps);
  absl::StatusOr<MatrixSource> qk =
      load.reader.matrix(prefix + ".index_qk_proj", (config.heads + 1) * config.head_dim, load.config.hidden_size);
  if (!qk.ok()) return qk.status();
  block->qk_ = load.ops.pack({&*qk, 1});
  absl::StatusOr<std::vector<float>> q_norm = load.reader.norm(prefix + ".q_layernorm", config.head_dim);
  if (!q_norm.ok()) return q_norm.status();
  absl::StatusOr<std::vector<float>> k_norm = load.reader.norm(prefix + ".k_layernorm", config.head_dim);
  if (!k_norm.ok()) return k_norm.status();
  block->q_norm_ = load.ops.pack_vector(*q_norm);
  block->k_norm_ = load.ops.pack_vector(*k_norm);
  block->inv_freq_ = load.ops.pack_vector(inverse_frequencies(load.config));
  return block;
}

Tensor IndexerBlock::project(PassContext& pass, Tensor x) const {
  const Tensor qk = pass.ops->scratch(x.rows, qk_->out_features());
  pass.ops->matmul(*qk_, x, qk);
  pass.ops->row_write(*pass.row_cache, rows_, qk.columns(config_.heads * config_.head_dim, config_.head_dim),
                      pass.rows);
  PoolMeansArgs means;
  means.from = rows_;
  means.into = rows_ + 1;
  means.tokens = config_.tokens;
  means.norm = k_norm_.get();
  means.eps = eps_;
  means.inv_freq = inv_freq_.get();
  means.rows = pass.rows;
  pass.ops->pool_means(*pass.row_cache, means);
  return qk;
}

void IndexerBlock::write_keys(PassContext& pass, Tensor x) const { project(pass, x); }

Tensor IndexerBlock::select(PassContext& pass, int layer, const RopeTable& rope, Tensor x) const {
  const Tensor q = project(pass, x).columns(0, config_.heads * config_.head_dim);
  pass.ops->rms_norm(q, config_.heads, *q_norm_, eps_, q);
  pass.ops->rope(q, config_.heads, config_.head_dim, rope);
  pass.record(layer, "indexer.q", q);
  SelectWindowsArgs args;
  args.layer = rows_ + 1;
  args.tokens = config_.tokens;
  args.heads = config_.heads;
  args.q = q;
  args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config_.head_dim)));
  args.out = pass.ops->scratch(x.rows, config_.budget / config_.tokens);
  args.rows = pass.rows;
  pass.ops->select_windows(*pass.row_cache, args);
  pass.record(layer, "indexer.windows", args.out);
  return args.out;
}

}  // namespace tensorfold
