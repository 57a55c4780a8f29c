#include "worker/model/blocks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/status/statusor.h"
#include "worker/model/indexer.h"

namespace tensorfold {

absl::StatusOr<std::unique_ptr<Vector>> packed_norm(LoadContext& load, const std::string& name, int64_t size) {
  absl::StatusOr<std::vector<float>> values = load.reader.norm(name, size);
  if (!values.ok()) return values.status();
  return load.ops.pack_vector(*values);
}

absl::StatusOr<std::unique_ptr<Weight>> packed_rows(LoadContext& load, const std::string& module, int64_t rows,
                                                    int64_t cols, int64_t first, int64_t count) {
  absl::StatusOr<MatrixSource> matrix = load.reader.matrix(module, rows, cols);
  if (!matrix.ok()) return matrix.status();
  const MatrixSource part = matrix->slice_rows(first, count);
  return load.ops.pack({&part, 1});
}

absl::StatusOr<std::unique_ptr<Vector>> packed_part(LoadContext& load, const std::string& name, int64_t size,
                                                    int64_t first, int64_t count) {
  absl::StatusOr<std::vector<float>> values = load.reader.vector(name, size);
  if (!values.ok()) return values.status();
  return load.ops.pack_vector(std::span(*values).subspan(static_cast<size_t>(first), static_cast<size_t>(count)));
}

WeightCost& WeightCost::operator+=(const WeightCost& other) {
  bytes += other.bytes;
  values += other.values;
  return *this;
}

WeightCost cost_of(const Weight& weight) { return {weight.bytes(), weight.out_features() * weight.in_features()}; }

Slices cut_dimension(int64_t units, int64_t unit_columns, int64_t column_unit) {
  Slices slices = make_slices(units);
  while (slices.count > 1 && (slices.units_per_slice() * unit_columns) % column_unit != 0) slices.count /= 2;
  return slices;
}

Cut make_cut(const Slices& slices, ShardSpec shard) {
  return {slices, owned_slices(slices.count, shard.world, shard.rank)};
}

// --- SlicedProjection ---------------------------------------------------------------------------------------------

absl::StatusOr<SlicedProjection> SlicedProjection::load(LoadContext& load, const std::string& module, int64_t rows,
                                                        const Cut& cut, int64_t unit_columns) {
  const Module one[] = {{module, rows}};
  return SlicedProjection::load(load, one, cut, unit_columns);
}

absl::StatusOr<SlicedProjection> SlicedProjection::load(LoadContext& load, std::span<const Module> modules,
                                                        const Cut& cut, int64_t unit_columns) {
  std::vector<MatrixSource> matrices;
  for (const Module& module : modules) {
    absl::StatusOr<MatrixSource> matrix = load.reader.matrix(module.name, module.rows, cut.slices.units * unit_columns);
    if (!matrix.ok()) return matrix.status();
    matrices.push_back(*matrix);
  }
  SlicedProjection projection;
  projection.cut_ = cut;
  projection.slice_columns_ = cut.slices.units_per_slice() * unit_columns;
  if (const int64_t unit = load.ops.input_unit(); projection.slice_columns_ % unit != 0) {
    return absl::UnimplementedError(
        fmt::format("{}: {} slices of {} columns; backend {} computes products of multiples of {} columns: run it with "
                    "backend cpu",
                    modules[0].name, cut.slices.count, projection.slice_columns_, load.ops.fingerprint_name(), unit));
  }
  for (int64_t slice = cut.owned.first; slice < cut.owned.end(); ++slice) {
    std::vector<MatrixSource> parts;
    for (const MatrixSource& matrix : matrices) {
      parts.push_back(matrix.slice_cols(slice * projection.slice_columns_, projection.slice_columns_));
    }
    projection.slices_.push_back(load.ops.pack(parts));
  }
  return projection;
}

absl::Status SlicedProjection::add_to(PassContext& pass, int layer, const char* op, Tensor x, Tensor residual) const {
  std::vector<Tensor> partials;
  std::vector<MatmulJob> jobs;
  const int64_t count = static_cast<int64_t>(slices_.size());
  for (int64_t i = 0; i < count; ++i) {
    partials.push_back(pass.ops->scratch(x.rows, residual.cols));
    jobs.push_back(
        {slices_[static_cast<size_t>(i)].get(), x.columns(i * slice_columns_, slice_columns_), partials.back()});
  }
  pass.ops->matmul_many(jobs);
  for (int64_t i = 0; i < count; ++i) {
    pass.record(layer, op, partials[static_cast<size_t>(i)], cut_.owned.first + i);
  }
  return pass.sum->add(cut_.slices.count, cut_.owned.first, partials, residual);
}

WeightCost SlicedProjection::cost() const {
  WeightCost cost;
  for (const std::unique_ptr<Weight>& slice : slices_) cost += cost_of(*slice);
  return cost;
}

// --- AttentionBlock -----------------------------------------------------------------------------------------------

AttentionBlock::AttentionBlock() = default;
AttentionBlock::~AttentionBlock() = default;

WeightCost AttentionBlock::cost() const {
  WeightCost cost = cost_of(*qkv_) += out_.cost();
  if (indexer_ != nullptr) cost += indexer_->cost();
  return cost;
}

KvShare kv_share(const AttentionSpec& spec, const Cut& cut) {
  const int64_t group = spec.heads / spec.kv_heads;
  const int64_t first = cut.first_unit() / group;
  const int64_t last = (cut.first_unit() + cut.unit_count() - 1) / group;
  return {first, last - first + 1};
}

absl::StatusOr<std::unique_ptr<AttentionBlock>> AttentionBlock::load(LoadContext& load, const std::string& prefix,
                                                                     const AttentionSpec& spec, int64_t kv_layer) {
  auto block = std::make_unique<AttentionBlock>();
  const Cut cut = make_cut(spec.slices, load.shard);
  const KvShare kv = kv_share(spec, cut);
  const int64_t hidden = load.config.hidden_size;
  const int64_t dim = spec.head_dim;
  block->spec_ = spec;
  block->kv_layer_ = kv_layer;
  block->first_head_ = cut.first_unit();
  block->local_heads_ = cut.unit_count();
  block->local_kv_heads_ = kv.count;
  block->eps_ = static_cast<float>(load.config.rms_norm_eps);
  for (int64_t head = 0; head < block->local_heads_; ++head) {
    const int64_t global = (cut.first_unit() + head) / (spec.heads / spec.kv_heads);
    block->kv_head_of_.push_back(static_cast<int32_t>(global - kv.first));
  }

  const int64_t q_rows = (spec.gated ? 2 : 1) * dim;  // a head's rows of q_proj
  absl::StatusOr<MatrixSource> q = load.reader.matrix(prefix + ".q_proj", spec.heads * q_rows, hidden);
  if (!q.ok()) return q.status();
  absl::StatusOr<MatrixSource> k = load.reader.matrix(prefix + ".k_proj", spec.kv_heads * dim, hidden);
  if (!k.ok()) return k.status();
  absl::StatusOr<MatrixSource> v = load.reader.matrix(prefix + ".v_proj", spec.kv_heads * dim, hidden);
  if (!v.ok()) return v.status();
  std::vector<MatrixSource> rows;
  // One block where the rows lie together: long runs of panels are the faster ones.
  if (!spec.gated) rows.push_back(q->slice_rows(cut.first_unit() * dim, block->local_heads_ * dim));
  for (int64_t part = 0; spec.gated && part < 2; ++part) {
    for (int64_t head = cut.first_unit(); head < cut.first_unit() + cut.unit_count(); ++head) {
      rows.push_back(q->slice_rows(head * q_rows + part * dim, dim));
    }
  }
  rows.push_back(k->slice_rows(kv.first * dim, kv.count * dim));
  rows.push_back(v->slice_rows(kv.first * dim, kv.count * dim));
  block->qkv_ = load.ops.pack(rows);

  if (spec.qk_norm) {
    absl::StatusOr<std::unique_ptr<Vector>> q_norm = packed_norm(load, prefix + ".q_norm", dim);
    if (!q_norm.ok()) return q_norm.status();
    absl::StatusOr<std::unique_ptr<Vector>> k_norm = packed_norm(load, prefix + ".k_norm", dim);
    if (!k_norm.ok()) return k_norm.status();
    block->q_norm_ = *std::move(q_norm);
    block->k_norm_ = *std::move(k_norm);
  }
  if (spec.index_rows >= 0) {
    absl::StatusOr<std::unique_ptr<IndexerBlock>> indexer =
        IndexerBlock::load(load, prefix + ".indexer", spec.index_rows);
    if (!indexer.ok()) return indexer.status();
    block->indexer_ = *std::move(indexer);
  }
  absl::StatusOr<SlicedProjection> out = SlicedProjection::load(load, prefix + ".o_proj", hidden, cut, dim);
  if (!out.ok()) return out.status();
  block->out_ = *std::move(out);
  return block;
}

AttentionBlock::Projected AttentionBlock::project(PassContext& pass, const RopeTable& rope, Tensor x) const {
  const int64_t dim = spec_.head_dim;
  const int64_t q_cols = local_heads_ * dim;
  const int64_t kv_cols = local_kv_heads_ * dim;
  const Tensor all = pass.ops->scratch(x.rows, qkv_->out_features());
  pass.ops->matmul(*qkv_, x, all);
  Projected out;
  out.q = all.columns(0, q_cols);
  int64_t at = q_cols;
  if (spec_.gated) {
    out.gate = all.columns(at, q_cols);
    at += q_cols;
  }
  out.k = all.columns(at, kv_cols);
  out.v = all.columns(at + kv_cols, kv_cols);
  QkvArgs args;
  args.q = out.q;
  args.k = out.k;
  args.v = out.v;
  args.heads = local_heads_;
  args.kv_heads = local_kv_heads_;
  args.head_dim = dim;
  args.q_norm = q_norm_.get();
  args.k_norm = k_norm_.get();
  args.eps = eps_;
  args.rope = rope;
  args.rows = pass.rows;
  pass.ops->qkv(*pass.kv, kv_layer_, args);
  return out;
}

void AttentionBlock::write_keys(PassContext& pass, const RopeTable& rope, Tensor x) const {
  project(pass, rope, x);
  if (indexer_ != nullptr) indexer_->write_keys(pass, x);
}

absl::Status AttentionBlock::add_to(PassContext& pass, int layer, const RopeTable& rope, Tensor x,
                                    Tensor residual) const {
  const Projected in = project(pass, rope, x);
  pass.record(layer, "attention.q", in.q, first_head_, local_heads_);
  const Tensor mixed = pass.ops->scratch_input(x.rows, local_heads_ * spec_.head_dim);
  AttentionArgs args;
  args.q = in.q;
  if (spec_.gated) args.gate = in.gate;
  args.out = mixed;
  args.heads = local_heads_;
  args.head_dim = spec_.head_dim;
  args.kv_head_of = kv_head_of_;
  args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec_.head_dim)));
  args.rows = pass.rows;
  if (indexer_ != nullptr) {
    const Tensor selected = indexer_->select(pass, layer, rope, x);
    pass.ops->sparse_attention(*pass.kv, kv_layer_, args, selected, indexer_->window_tokens());
  } else {
    pass.ops->attention(*pass.kv, kv_layer_, args);
  }
  pass.record(layer, "attention.heads", mixed, first_head_, local_heads_);
  return out_.add_to(pass, layer, "attention.o_proj", mixed, residual);
}

// --- MlpBlock -----------------------------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<MlpBlock>> MlpBlock::load(LoadContext& load, const std::string& prefix,
                                                         int64_t intermediate, const Slices& slices) {
  auto block = std::make_unique<MlpBlock>();
  const Cut cut = make_cut(slices, load.shard);
  const int64_t unit_columns = intermediate / slices.units;
  const int64_t hidden = load.config.hidden_size;
  const int64_t first = cut.first_unit() * unit_columns;
  block->columns_ = cut.unit_count() * unit_columns;
  absl::StatusOr<MatrixSource> gate = load.reader.matrix(prefix + ".gate_proj", intermediate, hidden);
  if (!gate.ok()) return gate.status();
  absl::StatusOr<MatrixSource> up = load.reader.matrix(prefix + ".up_proj", intermediate, hidden);
  if (!up.ok()) return up.status();
  block->limit_ = static_cast<float>(load.config.swiglu_limit);
  const MatrixSource parts[] = {gate->slice_rows(first, block->columns_), up->slice_rows(first, block->columns_)};
  block->gate_up_ = block->limit_ > 0.0f ? load.ops.pack(parts) : load.ops.pack_gate_up(parts[0], parts[1]);
  absl::StatusOr<SlicedProjection> down =
      SlicedProjection::load(load, prefix + ".down_proj", hidden, cut, unit_columns);
  if (!down.ok()) return down.status();
  block->down_ = *std::move(down);
  return block;
}

absl::Status MlpBlock::add_to(PassContext& pass, int layer, Tensor x, Tensor residual) const {
  const Tensor mixed = pass.ops->scratch_input(x.rows, columns_);
  if (limit_ > 0.0f) {
    const Tensor gate_up = pass.ops->scratch(x.rows, gate_up_->out_features());
    pass.ops->matmul(*gate_up_, x, gate_up);
    pass.ops->silu_mul_limited(gate_up, limit_, mixed);
  } else {
    pass.ops->matmul_silu_mul(*gate_up_, x, mixed);
  }
  return down_.add_to(pass, layer, "mlp.down_proj", mixed, residual);
}

// --- DeltaNetBlock ------------------------------------------------------------------------------------------------

DeltaNetShape local_delta_net(const DeltaNetSpec& spec, const Cut& cut) {
  const int64_t group = spec.v_heads / spec.k_heads;
  const int64_t first_k = cut.first_unit() / group;
  const int64_t last_k = (cut.first_unit() + cut.unit_count() - 1) / group;
  DeltaNetShape shape;
  shape.k_heads = last_k - first_k + 1;
  shape.v_heads = cut.unit_count();
  shape.dk = spec.dk;
  shape.dv = spec.dv;
  shape.conv_kernel = spec.conv_kernel;
  for (int64_t head = 0; head < shape.v_heads; ++head) {
    shape.k_head_of.push_back(static_cast<int32_t>((cut.first_unit() + head) / group - first_k));
  }
  return shape;
}

namespace {

struct RowRun {
  int64_t first, count;
};

// Where this rank's channels lie in the checkpoint's q | k | v order, which is the convolution's in every layout.
std::array<RowRun, 3> channel_runs(const DeltaNetSpec& spec, int64_t first_v, const DeltaNetShape& shape) {
  const int64_t first_k = first_v / (spec.v_heads / spec.k_heads);
  const int64_t k_rows = spec.k_heads * spec.dk;
  return {RowRun{first_k * spec.dk, shape.k_heads * spec.dk},
          RowRun{k_rows + first_k * spec.dk, shape.k_heads * spec.dk},
          RowRun{2 * k_rows + first_v * spec.dv, shape.v_heads * spec.dv}};
}

// Row blocks q | k | v | z | b | a of this rank from four matrices.
absl::StatusOr<std::vector<MatrixSource>> plain_inputs(LoadContext& load, const std::string& prefix,
                                                       const DeltaNetSpec& spec, int64_t first_v,
                                                       const DeltaNetShape& shape) {
  const int64_t hidden = load.config.hidden_size;
  const int64_t channels = 2 * spec.k_heads * spec.dk + spec.v_heads * spec.dv;
  absl::StatusOr<MatrixSource> qkv = load.reader.matrix(prefix + ".in_proj_qkv", channels, hidden);
  if (!qkv.ok()) return qkv.status();
  std::vector<MatrixSource> rows;
  for (const RowRun& run : channel_runs(spec, first_v, shape)) rows.push_back(qkv->slice_rows(run.first, run.count));
  struct PerHead {
    const char* name;
    int64_t width;
  };
  for (const PerHead& part : {PerHead{".in_proj_z", spec.dv}, PerHead{".in_proj_b", 1}, PerHead{".in_proj_a", 1}}) {
    absl::StatusOr<MatrixSource> matrix = load.reader.matrix(prefix + part.name, spec.v_heads * part.width, hidden);
    if (!matrix.ok()) return matrix.status();
    rows.push_back(matrix->slice_rows(first_v * part.width, shape.v_heads * part.width));
  }
  return rows;
}

// The same from two matrices whose rows go by key head: q | k | its value heads' v | their z, and their b | their a.
// They are taken apart here, head by head, so that a pass sees one layout.
absl::StatusOr<std::vector<MatrixSource>> fused_inputs(LoadContext& load, const std::string& prefix,
                                                       const DeltaNetSpec& spec, int64_t first_v,
                                                       const DeltaNetShape& shape) {
  const int64_t hidden = load.config.hidden_size;
  const int64_t group = spec.v_heads / spec.k_heads;
  const int64_t first_k = first_v / group;
  const int64_t head_rows = 2 * spec.dk + 2 * group * spec.dv;
  absl::StatusOr<MatrixSource> qkvz = load.reader.matrix(prefix + ".in_proj_qkvz", spec.k_heads * head_rows, hidden);
  if (!qkvz.ok()) return qkvz.status();
  absl::StatusOr<MatrixSource> ba = load.reader.matrix(prefix + ".in_proj_ba", 2 * spec.v_heads, hidden);
  if (!ba.ok()) return ba.status();
  std::vector<MatrixSource> rows;
  for (const int64_t part : {int64_t{0}, spec.dk}) {  // q, then k
    for (int64_t head = first_k; head < first_k + shape.k_heads; ++head) {
      rows.push_back(qkvz->slice_rows(head * head_rows + part, spec.dk));
    }
  }
  // Value heads of one key head that this rank has lie together.
  const auto by_value_head = [&](const MatrixSource& matrix, int64_t stride, int64_t offset, int64_t width) {
    for (int64_t head = first_v; head < first_v + shape.v_heads;) {
      const int64_t next = std::min((head / group + 1) * group, first_v + shape.v_heads);
      const int64_t first = head / group * stride + offset + head % group * width;
      rows.push_back(matrix.slice_rows(first, (next - head) * width));
      head = next;
    }
  };
  by_value_head(*qkvz, head_rows, 2 * spec.dk, spec.dv);                    // v
  by_value_head(*qkvz, head_rows, 2 * spec.dk + group * spec.dv, spec.dv);  // z
  by_value_head(*ba, 2 * group, 0, 1);                                      // b
  by_value_head(*ba, 2 * group, group, 1);                                  // a
  return rows;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeltaNetBlock>> DeltaNetBlock::load(LoadContext& load, const std::string& prefix,
                                                                   const DeltaNetSpec& spec, int64_t recurrent_layer) {
  auto block = std::make_unique<DeltaNetBlock>();
  const Cut cut = make_cut(spec.slices, load.shard);
  const int64_t first_v = cut.first_unit();
  const DeltaNetShape shape = local_delta_net(spec, cut);
  const int64_t hidden = load.config.hidden_size;
  const std::array<RowRun, 3> runs = channel_runs(spec, first_v, shape);
  absl::StatusOr<std::vector<MatrixSource>> rows =
      spec.fused ? fused_inputs(load, prefix, spec, first_v, shape) : plain_inputs(load, prefix, spec, first_v, shape);
  if (!rows.ok()) return rows.status();
  block->in_ = load.ops.pack(*rows);

  const int64_t channels = 2 * spec.k_heads * spec.dk + spec.v_heads * spec.dv;
  absl::StatusOr<std::vector<float>> conv = load.reader.convolution(prefix + ".conv1d", channels, spec.conv_kernel);
  if (!conv.ok()) return conv.status();
  std::vector<float> local_conv;
  for (const RowRun& run : runs) {
    const auto begin = conv->begin() + run.first * spec.conv_kernel;
    local_conv.insert(local_conv.end(), begin, begin + run.count * spec.conv_kernel);
  }
  block->conv_ = load.ops.pack_vector(local_conv);
  absl::StatusOr<std::unique_ptr<Vector>> a_log =
      packed_part(load, prefix + ".A_log", spec.v_heads, first_v, shape.v_heads);
  if (!a_log.ok()) return a_log.status();
  absl::StatusOr<std::unique_ptr<Vector>> dt_bias =
      packed_part(load, prefix + ".dt_bias", spec.v_heads, first_v, shape.v_heads);
  if (!dt_bias.ok()) return dt_bias.status();
  absl::StatusOr<std::unique_ptr<Vector>> norm = packed_norm(load, prefix + ".norm", spec.dv);
  if (!norm.ok()) return norm.status();
  absl::StatusOr<SlicedProjection> out = SlicedProjection::load(load, prefix + ".out_proj", hidden, cut, spec.dv);
  if (!out.ok()) return out.status();
  block->shape_ = shape;
  block->first_v_head_ = first_v;
  block->recurrent_layer_ = recurrent_layer;
  block->sigmoid_gate_ = spec.sigmoid_gate;
  block->eps_ = static_cast<float>(load.config.rms_norm_eps);
  block->a_log_ = *std::move(a_log);
  block->dt_bias_ = *std::move(dt_bias);
  block->norm_ = *std::move(norm);
  block->out_ = *std::move(out);
  return block;
}

absl::Status DeltaNetBlock::add_to(PassContext& pass, int layer, Tensor x, Tensor residual) const {
  const Tensor in = pass.ops->scratch(x.rows, in_->out_features());
  pass.ops->matmul(*in_, x, in);
  const int64_t channels = shape_.channels();
  const int64_t v_cols = shape_.v_heads * shape_.dv;
  DeltaNetArgs args;
  args.shape = &shape_;
  args.qkv = in.columns(0, channels);
  args.z = in.columns(channels, v_cols);
  args.b = in.columns(channels + v_cols, shape_.v_heads);
  args.a = in.columns(channels + v_cols + shape_.v_heads, shape_.v_heads);
  args.conv = conv_.get();
  args.a_log = a_log_.get();
  args.dt_bias = dt_bias_.get();
  args.norm = norm_.get();
  args.eps = eps_;
  args.sigmoid_gate = sigmoid_gate_;
  args.out = pass.ops->scratch_input(x.rows, v_cols);
  args.rows = pass.rows;
  args.layer = recurrent_layer_;
  pass.ops->delta_net(args);
  pass.record(layer, "delta_net.heads", args.out, first_v_head_, shape_.v_heads);
  return out_.add_to(pass, layer, "delta_net.out_proj", args.out, residual);
}

// --- VocabularyBlock ----------------------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<VocabularyBlock>> VocabularyBlock::load(LoadContext& load, const Slices& slices) {
  auto block = std::make_unique<VocabularyBlock>();
  const Cut cut = make_cut(slices, load.shard);
  const int64_t hidden = load.config.hidden_size;
  const int64_t vocab = load.config.vocab_size;
  absl::StatusOr<MatrixSource> table = load.reader.matrix("embed_tokens", vocab, hidden);
  if (!table.ok()) return table.status();
  block->table_ = load.ops.pack({&*table, 1});
  absl::StatusOr<MatrixSource> head = table;
  if (load.config.tie_word_embeddings) {
    block->head_ = load.ops.view_rows(*block->table_, cut.first_unit(), cut.unit_count());
    if (block->head_ != nullptr) return block;
  }
  if (!load.config.tie_word_embeddings) head = load.reader.matrix("lm_head", vocab, hidden);
  if (!head.ok()) return head.status();
  const MatrixSource owned = head->slice_rows(cut.first_unit(), cut.unit_count());
  block->head_ = load.ops.pack({&owned, 1});
  return block;
}

void VocabularyBlock::embed(PassContext& pass, Tensor out) const { pass.ops->embed(*table_, pass.rows, out); }

void VocabularyBlock::logits(PassContext& pass, Tensor hidden, Tensor out) const {
  pass.ops->matmul(*head_, hidden, out);
}

}  // namespace tensorfold
