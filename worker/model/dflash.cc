#include "worker/model/dflash.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/numerics/math64.h"
#include "kernels/ops/block_ops.h"
#include "worker/model/families.h"
#include "worker/model/rope.h"

namespace tensorfold {

/// The convolutions around one sublayer: before it (side 0) and after it (side 1).
struct DflashDrafter::Conv {
  std::unique_ptr<Vector> base[2];  // [taps * hidden]
  std::unique_ptr<Weight> dynamic;  // [2 * taps * hidden / group, hidden]
};

struct DflashDrafter::Layer {
  std::unique_ptr<Vector> input_norm;
  std::unique_ptr<Weight> q;   // [local heads * head_dim, hidden]
  std::unique_ptr<Weight> kv;  // k heads | v heads
  std::unique_ptr<Vector> q_norm;
  std::unique_ptr<Vector> k_norm;
  SlicedProjection out;
  std::unique_ptr<Vector> post_norm;
  std::unique_ptr<MlpBlock> mlp;
  std::unique_ptr<Conv> attention_conv;  // null in DFlash
  std::unique_ptr<Conv> mlp_conv;
};

namespace {

TapProjection::Size tap_size(const DflashConfig& config) {
  TapProjection::Size size = {.taps = static_cast<int64_t>(config.target_layers.size()),
                              .width = config.target_hidden,
                              .hidden = config.model.hidden_size};
  if (const auto format = config.model.quantization.of("fc"); format.has_value()) size.group = format->group;
  return size;
}

// Slices must end on whole quantisation groups.
absl::Status check_groups(const DflashConfig& config) {
  const int64_t columns = config.model.intermediate_size, group = column_unit(config.model, "mlp.down_proj");
  if (columns % group != 0) {
    return absl::InvalidArgumentError(
        fmt::format("the drafter's intermediate_size {} does not end on a quantisation group of {}", columns, group));
  }
  return absl::OkStatus();
}

AttentionSpec attention_spec(const DflashConfig& config) {
  return {.heads = config.model.heads,
          .kv_heads = config.model.kv_heads,
          .head_dim = config.model.head_dim,
          .slices = head_slices(config.model)};
}

absl::StatusOr<std::unique_ptr<Weight>> packed_bare(LoadContext& load, const std::string& tensor, int64_t rows,
                                                    int64_t cols) {
  absl::StatusOr<MatrixSource> matrix = load.reader.bare_matrix(tensor, rows, cols);
  if (!matrix.ok()) return matrix.status();
  return load.ops.pack({&*matrix, 1});
}

}  // namespace

absl::StatusOr<DrafterShape> drafter_shape(const DflashConfig& config, ShardSpec shard) {
  if (absl::Status s = check_groups(config); !s.ok()) return s;
  ModelShape plan;
  if (absl::Status s = add_dimension(plan, "drafter's attention heads", head_slices(config.model), shard); !s.ok()) {
    return s;
  }
  if (absl::Status s = add_dimension(plan, "drafter's mlp columns", mlp_slices(config.model), shard); !s.ok()) return s;
  absl::StatusOr<SlicePlan> taps = TapProjection::plan(tap_size(config), shard);
  if (!taps.ok()) return taps.status();
  DrafterShape shape;
  shape.slices = plan.slices;
  shape.slices.dimensions.insert(shape.slices.dimensions.end(), taps->dimensions.begin(), taps->dimensions.end());
  shape.kv_layers = config.model.layer_count();
  const AttentionSpec spec = attention_spec(config);
  shape.kv_heads = kv_share(spec, make_cut(spec.slices, shard)).count;
  shape.head_dim = config.model.head_dim;
  return shape;
}

DrafterFacts drafter_facts(const DflashConfig& config) {
  return {.kind = "dflash",
          .source = "the block drafter (draft.model)",
          .layers = config.model.layer_count(),
          .block_size = config.block_size,
          .first_draft = 1,
          .filler_token = config.mask_token_id,
          .target_layers = config.target_layers};
}

DflashDrafter::DflashDrafter(DflashConfig config, DrafterShape shape)
    : config_(std::move(config)),
      facts_(drafter_facts(config_)),
      shape_(std::move(shape)),
      eps_(static_cast<float>(config_.model.rms_norm_eps)) {}

DflashDrafter::~DflashDrafter() = default;

absl::StatusOr<std::unique_ptr<BlockDrafter>> DflashDrafter::load(const DflashConfig& config, WeightReader& reader,
                                                                  Ops& ops, ShardSpec shard) {
  if (absl::Status status = check_backend(ops); !status.ok()) return status;
  absl::StatusOr<DrafterShape> shape = drafter_shape(config, shard);
  if (!shape.ok()) return shape.status();
  std::unique_ptr<DflashDrafter> drafter(new DflashDrafter(config, *std::move(shape)));
  LoadContext load = {drafter->config_.model, reader, ops, shard};
  if (absl::Status status = drafter->load_parts(load); !status.ok()) return status;
  return absl::StatusOr<std::unique_ptr<BlockDrafter>>(std::move(drafter));
}

absl::Status DflashDrafter::load_parts(LoadContext& load) {
  const ModelConfig& model = config_.model;
  const AttentionSpec spec = attention_spec(config_);
  const Cut heads = make_cut(spec.slices, load.shard);
  const KvShare kv = kv_share(spec, heads);
  local_heads_ = heads.unit_count();
  for (int64_t head = heads.first_unit(); head < heads.first_unit() + local_heads_; ++head) {
    kv_head_of_.push_back(static_cast<int32_t>(head / (spec.heads / spec.kv_heads) - kv.first));
  }
  if (absl::Status s = take(TapProjection::load(load, "fc", "hidden_norm", tap_size(config_)), &taps_); !s.ok())
    return s;
  if (absl::Status s = take(packed_norm(load, "norm", model.hidden_size), &norm_); !s.ok()) return s;
  inv_freq_ = load.ops.pack_vector(inverse_frequencies(model));
  attention_factor_ = rope_attention_factor(model);
  for (int64_t i = 0; i < model.layer_count(); ++i) {
    std::unique_ptr<Layer>& layer = layers_.emplace_back();
    if (absl::Status s = take(load_layer(load, i), &layer); !s.ok()) return s;
  }
  if (!config_.second) return absl::OkStatus();
  const std::string selector = "candidate_selector.";
  const int64_t rank = config_.selector_rank;
  if (absl::Status s =
          take(packed_rows(load, selector + "hidden_projection", rank, model.hidden_size, 0, rank), &selector_hidden_);
      !s.ok()) {
    return s;
  }
  if (absl::Status s =
          take(packed_bare(load, selector + "predecessor_codebook", model.vocab_size, rank), &selector_predecessor_);
      !s.ok()) {
    return s;
  }
  return take(packed_bare(load, selector + "successor_codebook", model.vocab_size, rank), &selector_successor_);
}

absl::StatusOr<std::unique_ptr<DflashDrafter::Layer>> DflashDrafter::load_layer(LoadContext& load, int64_t index) {
  auto layer = std::make_unique<Layer>();
  const ModelConfig& model = config_.model;
  const int64_t hidden = model.hidden_size, dim = model.head_dim;
  const std::string prefix = fmt::format("layers.{}", index), attention = prefix + ".self_attn";
  const AttentionSpec spec = attention_spec(config_);
  const Cut heads = make_cut(spec.slices, load.shard);
  const KvShare kv = kv_share(spec, heads);
  struct Norm {
    std::string name;
    int64_t size;
    std::unique_ptr<Vector>* into;
  };
  for (const Norm& norm :
       {Norm{prefix + ".input_layernorm", hidden, &layer->input_norm},
        Norm{prefix + ".post_attention_layernorm", hidden, &layer->post_norm},
        Norm{attention + ".q_norm", dim, &layer->q_norm}, Norm{attention + ".k_norm", dim, &layer->k_norm}}) {
    if (absl::Status s = take(packed_norm(load, norm.name, norm.size), norm.into); !s.ok()) return s;
  }
  absl::StatusOr<MatrixSource> q = load.reader.matrix(attention + ".q_proj", spec.heads * dim, hidden);
  if (!q.ok()) return q.status();
  const MatrixSource q_rows = q->slice_rows(heads.first_unit() * dim, heads.unit_count() * dim);
  layer->q = load.ops.pack({&q_rows, 1});
  std::vector<MatrixSource> kv_rows;
  for (const char* name : {".k_proj", ".v_proj"}) {
    absl::StatusOr<MatrixSource> matrix = load.reader.matrix(attention + name, spec.kv_heads * dim, hidden);
    if (!matrix.ok()) return matrix.status();
    kv_rows.push_back(matrix->slice_rows(kv.first * dim, kv.count * dim));
  }
  layer->kv = load.ops.pack(kv_rows);
  if (absl::Status s = take(SlicedProjection::load(load, attention + ".o_proj", hidden, heads, dim), &layer->out);
      !s.ok()) {
    return s;
  }
  if (absl::Status s =
          take(MlpBlock::load(load, prefix + ".mlp", model.intermediate_size, mlp_slices(model)), &layer->mlp);
      !s.ok()) {
    return s;
  }
  if (!config_.second) return layer;
  if (absl::Status s = take(load_conv(load, prefix + ".attention_conv"), &layer->attention_conv); !s.ok()) return s;
  if (absl::Status s = take(load_conv(load, prefix + ".mlp_conv"), &layer->mlp_conv); !s.ok()) return s;
  return layer;
}

absl::StatusOr<std::unique_ptr<DflashDrafter::Conv>> DflashDrafter::load_conv(LoadContext& load,
                                                                              const std::string& prefix) {
  auto conv = std::make_unique<Conv>();
  const int64_t hidden = config_.model.hidden_size, taps = config_.conv_taps;
  const absl::StatusOr<std::vector<float>> base = load.reader.cube(prefix + ".base_kernel", 2, taps, hidden);
  if (!base.ok()) return base.status();
  for (int64_t side = 0; side < 2; ++side) {
    conv->base[side] = load.ops.pack_vector(
        std::span(*base).subspan(static_cast<size_t>(side * taps * hidden), static_cast<size_t>(taps * hidden)));
  }
  const int64_t rows = 2 * taps * hidden / config_.conv_group;
  if (absl::Status s = take(packed_rows(load, prefix + ".kernel_projection", rows, hidden, 0, rows), &conv->dynamic);
      !s.ok()) {
    return s;
  }
  return conv;
}

// k and v of a layer, k normed and roped, side by side in `kv`.
void DflashDrafter::project_keys(PassContext& pass, const Layer& layer, const RopeTable& rope, Tensor x,
                                 Tensor kv) const {
  pass.ops->matmul(*layer.kv, x, kv);
  const Tensor k = kv.columns(0, kv.cols / 2);
  pass.ops->rms_norm(k, shape_.kv_heads, *layer.k_norm, eps_, k);
  pass.ops->rope(k, shape_.kv_heads, shape_.head_dim, rope);
}

absl::Status DflashDrafter::add_context(PassContext& pass, Tensor taps) const {
  Ops& ops = *pass.ops;
  const ScratchScope scope(ops);
  const Tensor normed = ops.scratch_input(taps.rows, config_.model.hidden_size);
  if (absl::Status status = taps_.make_rows(pass, taps, eps_, normed); !status.ok()) return status;
  const RopeTable rope = ops.rope_table(pass.rows, *inv_freq_, attention_factor_);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const ScratchScope each(ops);
    const Tensor kv = ops.scratch(taps.rows, layers_[i]->kv->out_features());
    project_keys(pass, *layers_[i], rope, normed, kv);
    ops.kv_write(*pass.kv, static_cast<int64_t>(i), kv.columns(0, kv.cols / 2), kv.columns(kv.cols / 2, kv.cols / 2),
                 pass.rows);
  }
  return absl::OkStatus();
}

absl::Status DflashDrafter::attend(PassContext& pass, int64_t index, const RopeTable& rope, Tensor x,
                                   Tensor out) const {
  Ops& ops = *pass.ops;
  const Layer& layer = *layers_[static_cast<size_t>(index)];
  const Tensor q = ops.scratch(x.rows, layer.q->out_features());
  ops.matmul(*layer.q, x, q);
  ops.rms_norm(q, local_heads_, *layer.q_norm, eps_, q);
  ops.rope(q, local_heads_, shape_.head_dim, rope);
  const Tensor kv = ops.scratch(x.rows, layer.kv->out_features());
  project_keys(pass, layer, rope, x, kv);
  BlockAttentionArgs args;
  args.q = q;
  args.k = kv.columns(0, kv.cols / 2);
  args.v = kv.columns(kv.cols / 2, kv.cols / 2);
  args.out = ops.scratch_input(x.rows, q.cols);
  args.heads = local_heads_;
  args.kv_heads = shape_.kv_heads;
  args.head_dim = shape_.head_dim;
  args.kv_head_of = kv_head_of_;
  args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.head_dim)));
  args.window = config_.windows[static_cast<size_t>(index)];
  args.rows = pass.rows;
  ops.block_attention(*pass.kv, index, args);
  return layer.out.add_to(pass, static_cast<int>(index), "drafter.o_proj", args.out, out);
}

template <typename Sublayer>
absl::Status DflashDrafter::run_sublayer(PassContext& pass, const Conv* conv, Tensor normed, Tensor residual,
                                         const Sublayer& sublayer) const {
  if (conv == nullptr) return sublayer(normed, residual);
  Ops& ops = *pass.ops;
  const int64_t width = normed.cols, side = config_.conv_taps * width / config_.conv_group;
  const Tensor dynamic = ops.scratch(normed.rows, 2 * side);
  ops.matmul(*conv->dynamic, normed, dynamic);
  BlockConvArgs args;
  args.taps = config_.conv_taps;
  args.group = config_.conv_group;
  args.rows = pass.rows;
  args.x = normed;
  args.base = conv->base[0].get();
  args.dynamic = dynamic.columns(0, side);
  args.out = ops.scratch_input(normed.rows, width);
  ops.block_conv(args);
  const Tensor mixed = ops.scratch(normed.rows, width);
  ops.clear(mixed);
  if (absl::Status status = sublayer(args.out, mixed); !status.ok()) return status;
  args.x = mixed;
  args.base = conv->base[1].get();
  args.dynamic = dynamic.columns(side, side);
  args.out = ops.scratch(normed.rows, width);
  ops.block_conv(args);
  ops.add(residual, args.out, residual);
  return absl::OkStatus();
}

absl::Status DflashDrafter::block(PassContext& pass, Model& target, Tensor* hidden) const {
  Ops& ops = *pass.ops;
  const int64_t rows = pass.rows.rows(), width = config_.model.hidden_size;
  *hidden = ops.scratch(rows, width);
  const ScratchScope scope(ops);
  const Tensor residual = ops.scratch(rows, width);
  // Convolutions read it, too, not only products.
  const Tensor normed = config_.second ? ops.scratch(rows, width) : ops.scratch_input(rows, width);
  const RopeTable rope = ops.rope_table(pass.rows, *inv_freq_, attention_factor_);
  target.embed(pass, residual);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const ScratchScope each(ops);
    const Layer& layer = *layers_[i];
    const int64_t index = static_cast<int64_t>(i);
    ops.rms_norm(residual, 1, *layer.input_norm, eps_, normed);
    absl::Status status = run_sublayer(pass, layer.attention_conv.get(), normed, residual,
                                       [&](Tensor x, Tensor into) { return attend(pass, index, rope, x, into); });
    if (!status.ok()) return status;
    ops.rms_norm(residual, 1, *layer.post_norm, eps_, normed);
    status = run_sublayer(pass, layer.mlp_conv.get(), normed, residual, [&](Tensor x, Tensor into) {
      return layer.mlp->add_to(pass, static_cast<int>(index), x, into);
    });
    if (!status.ok()) return status;
  }
  ops.rms_norm(residual, 1, *norm_, eps_, *hidden);
  return absl::OkStatus();
}

namespace {

// Rows `ids` of a packed table, in host memory.
std::vector<float> rows_of(Ops& ops, const Weight& table, const std::vector<int32_t>& ids) {
  RowBatch batch;
  batch.tokens = ids;
  const Tensor rows = ops.scratch(static_cast<int64_t>(ids.size()), table.in_features());
  ops.run(RunKind::kBlock, batch, {}, false, [&](const RowBatch& placed, Tensor) {
    ops.embed(table, placed, rows);
    return rows;
  });
  std::vector<float> host(ids.size() * static_cast<size_t>(rows.cols));
  ops.download(rows, host);
  return host;
}

double capped(double logit, double multiplier, double cap) {
  logit *= multiplier;
  if (cap <= 0.0) return logit;
  return cap * (1.0 - 2.0 / (exp64(2.0 * logit / cap) + 1.0));  // tanh
}

}  // namespace

absl::StatusOr<std::vector<std::vector<int32_t>>> DflashDrafter::choose(const BlockRows& rows) const {
  const Tensor logits = rows.ops->scratch(rows.hidden.rows, rows.local_vocab);
  rows.head(rows.hidden, logits);
  const absl::StatusOr<std::vector<std::vector<Candidate>>> best =
      rows.best(logits, config_.second ? config_.selector_candidates : 1);
  if (!best.ok()) return best.status();
  std::vector<std::vector<int32_t>> drafts;
  int64_t first = 0;
  for (size_t block = 0; block < rows.drafts.size(); ++block) {
    const int64_t count = rows.drafts[block];
    const auto candidates = std::span(*best).subspan(static_cast<size_t>(first), static_cast<size_t>(count));
    std::vector<int32_t>& chosen = drafts.emplace_back();
    if (config_.second) {
      chosen = select(*rows.ops, rows.hidden.row_range(first, count), candidates, rows.anchors[block]);
    } else {
      for (const std::vector<Candidate>& row : candidates) chosen.push_back(row[0].id);
    }
    first += count;
  }
  return drafts;
}

std::vector<int32_t> DflashDrafter::select(Ops& ops, Tensor hidden, std::span<const std::vector<Candidate>> candidates,
                                           int32_t anchor) const {
  const ScratchScope scope(ops);
  const size_t rank = static_cast<size_t>(config_.selector_rank);
  const Tensor projected = ops.scratch(hidden.rows, config_.selector_rank);
  ops.matmul(*selector_hidden_, hidden, projected);
  std::vector<float> wanted(candidates.size() * rank);
  ops.download(projected, wanted);
  // Whatever is chosen in one slot is a candidate, so all predecessors are known beforehand.
  std::vector<int32_t> ids = {anchor};
  for (const std::vector<Candidate>& row : candidates) {
    for (const Candidate& candidate : row) ids.push_back(candidate.id);
  }
  const std::vector<float> predecessors = rows_of(ops, *selector_predecessor_, ids);
  const std::vector<float> successors = rows_of(ops, *selector_successor_, ids);
  std::vector<int32_t> drafts;
  size_t previous = 0;
  size_t first = 1;
  for (size_t slot = 0; slot < candidates.size(); ++slot) {
    double best = 0.0;
    size_t chosen = first;
    for (size_t i = 0; i < candidates[slot].size(); ++i) {
      double score = capped(static_cast<double>(candidates[slot][i].logit), config_.output_multiplier,
                            config_.final_logit_softcapping);
      for (size_t k = 0; k < rank; ++k) {
        score += static_cast<double>(predecessors[previous * rank + k]) * static_cast<double>(wanted[slot * rank + k]) *
                 static_cast<double>(successors[(first + i) * rank + k]);
      }
      // Candidates are in order of their logits: the first among equals stays. NaN never wins.
      if (i > 0 && !(score > best)) continue;
      best = score;
      chosen = first + i;
    }
    drafts.push_back(ids[chosen]);
    previous = chosen;
    first += candidates[slot].size();
  }
  return drafts;
}

WeightCost DflashDrafter::cost() const {
  WeightCost cost = taps_.cost();
  for (const std::unique_ptr<Layer>& layer : layers_) {
    cost += cost_of(*layer->q);
    cost += cost_of(*layer->kv);
    cost += layer->out.cost();
    cost += layer->mlp->cost();
    for (const Conv* conv : {layer->attention_conv.get(), layer->mlp_conv.get()}) {
      if (conv != nullptr) cost += cost_of(*conv->dynamic);
    }
  }
  for (const Weight* weight : {selector_hidden_.get(), selector_predecessor_.get(), selector_successor_.get()}) {
    if (weight != nullptr) cost += cost_of(*weight);
  }
  return cost;
}

int64_t DflashDrafter::context_bytes() const {
  WeightCost cost = taps_.cost();
  for (const std::unique_ptr<Layer>& layer : layers_) cost += cost_of(*layer->kv);
  return cost.bytes;
}

}  // namespace tensorfold
