#include "worker/model/dspark.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/ops/fake_quantise.h"
#include "kernels/ops/latent_ops.h"
#include "worker/model/families.h"
#include "worker/model/rope.h"

namespace tensorfold {
namespace {

TapProjection::Size tap_size(const ModelConfig& config) {
  TapProjection::Size size = {.taps = static_cast<int64_t>(config.dspark.target_layers.size()),
                              .width = config.hidden_size,
                              .hidden = config.hidden_size};
  if (const auto format = config.quantization.of("mtp.0.main_proj"); format.has_value()) size.group = format->group;
  return size;
}

std::string stage_name(int64_t stage) { return fmt::format("mtp.{}", stage); }

ModelConfig with_own_experts(ModelConfig config) {
  config.experts.count = config.dspark.experts;
  config.experts.per_token = config.dspark.experts_per_token;
  return config;
}

}  // namespace

absl::StatusOr<DrafterShape> dspark_shape(const ModelConfig& config, ShardSpec shard) {
  // Heads and expert columns are cut as the model's.
  absl::StatusOr<SlicePlan> slices = TapProjection::plan(tap_size(config), shard);
  if (!slices.ok()) return slices.status();
  DrafterShape shape;
  shape.slices = *std::move(slices);
  shape.row_layers.assign(static_cast<size_t>(config.dspark.stages), {config.head_dim, 1});
  return shape;
}

DrafterFacts dspark_facts(const ModelConfig& config) {
  return {.kind = "dspark",
          .source = "the checkpoint's own block drafter (draft.kind: dspark)",
          .layers = config.dspark.stages,
          .block_size = config.dspark.block_size,
          .first_draft = 0,
          .filler_token = config.dspark.noise_token_id,
          .target_layers = config.dspark.target_layers};
}

DsparkDrafter::DsparkDrafter(const ModelConfig& config, DrafterShape shape)
    : config_(with_own_experts(config)),
      facts_(dspark_facts(config)),
      shape_(std::move(shape)),
      v41_(config.family == Family::kDeepseekV41),
      rounds_(v41_ && config.precision == Precision::kCheckpoint),
      eps_(static_cast<float>(config.rms_norm_eps)) {}

absl::StatusOr<std::unique_ptr<BlockDrafter>> DsparkDrafter::load(const ModelConfig& config, WeightReader& reader,
                                                                  Ops& ops, ShardSpec shard) {
  if (absl::Status status = check_backend(ops, dspark_facts(config).source); !status.ok()) return status;
  absl::StatusOr<DrafterShape> shape = dspark_shape(config, shard);
  if (!shape.ok()) return shape.status();
  std::unique_ptr<DsparkDrafter> drafter(new DsparkDrafter(config, *std::move(shape)));
  LoadContext load = {drafter->config_, reader, ops, shard};
  if (absl::Status status = drafter->load_parts(load); !status.ok()) return status;
  return absl::StatusOr<std::unique_ptr<BlockDrafter>>(std::move(drafter));
}

absl::Status DsparkDrafter::load_parts(LoadContext& load) {
  absl::Status status =
      take(TapProjection::load(load, "mtp.0.main_proj", "mtp.0.main_norm", tap_size(config_)), &taps_);
  if (!status.ok()) return status;
  inv_freq_ = load.ops.pack_vector(inverse_frequencies(config_.rope));
  ones_ = load.ops.pack_vector(std::vector<float>(static_cast<size_t>(config_.head_dim), 1.0f));
  for (int64_t i = 0; i < config_.dspark.stages; ++i) {
    absl::StatusOr<Stage> stage = load_stage(load, i);
    if (!stage.ok()) return stage.status();
    stages_.push_back(*std::move(stage));
  }
  return load_head(load);
}

absl::StatusOr<DsparkDrafter::Stage> DsparkDrafter::load_stage(LoadContext& load, int64_t index) const {
  const std::string prefix = stage_name(index), attention = prefix + ".attn";
  const int64_t hidden = config_.hidden_size, dim = config_.head_dim, rank = config_.latent.q_rank;
  Stage stage;
  if (absl::Status s = take(StreamedLayer::load(load, prefix, /*by_token=*/false), &stage.blocks); !s.ok()) return s;
  if (absl::Status s = take(GroupedOutput::load(load, attention), &stage.out); !s.ok()) return s;
  const int64_t first = stage.out.first_head(), heads = stage.out.heads();
  if (absl::Status s = take(packed_rows(load, attention + ".wq_a", rank, hidden, 0, rank), &stage.query_a); !s.ok()) {
    return s;
  }
  if (absl::Status s = take(packed_rows(load, attention + ".wq_b", config_.heads * dim, rank, first * dim, heads * dim),
                            &stage.query_b);
      !s.ok()) {
    return s;
  }
  if (absl::Status s = take(packed_rows(load, attention + ".wkv", dim, hidden, 0, dim), &stage.keys); !s.ok()) return s;
  if (absl::Status s = take(packed_norm(load, attention + ".q_norm", rank), &stage.query_norm); !s.ok()) return s;
  if (absl::Status s = take(packed_norm(load, attention + ".kv_norm", dim), &stage.keys_norm); !s.ok()) return s;
  if (absl::Status s = take(packed_part(load, attention + ".attn_sink", config_.heads, first, heads), &stage.sinks);
      !s.ok()) {
    return s;
  }
  load.reader.leave(prefix + ".ffn.gate.bias_vl");  // of tokens of pictures
  return stage;
}

absl::Status DsparkDrafter::load_head(LoadContext& load) {
  const std::string last = stage_name(config_.dspark.stages - 1), markov = last + ".markov_head";
  if (!v41_) {
    if (absl::Status s = take(HyperHead::load(load, last + "."), &head_); !s.ok()) return s;
  }
  if (absl::Status s = take(packed_norm(load, last + ".norm", config_.hidden_size), &norm_); !s.ok()) return s;
  const int64_t vocab = config_.vocab_size, rank = config_.dspark.markov_rank, unit = load.ops.input_unit();
  if (rank % unit != 0) {
    return absl::UnimplementedError(
        fmt::format("dspark_markov_rank is {}; backend {} computes products of multiples of {} columns: run it with "
                    "backend cpu, or with another draft.kind",
                    rank, load.ops.fingerprint_name(), unit));
  }
  const Cut cut = make_cut(vocab_slices(config_), load.shard);
  const std::string in = markov + (v41_ ? ".embed" : ".markov_w1"), out = markov + (v41_ ? ".head" : ".markov_w2");
  if (absl::Status s = take(packed_rows(load, in, vocab, rank, 0, vocab), &markov_in_); !s.ok()) return s;
  if (absl::Status s = take(packed_rows(load, out, vocab, rank, cut.first_unit(), cut.unit_count()), &markov_out_);
      !s.ok()) {
    return s;
  }
  load.reader.leave(last + ".confidence_head");
  return absl::OkStatus();
}

Tensor DsparkDrafter::make_keys(PassContext& pass, const Stage& stage, const RopeTable& rope, Tensor x) const {
  Ops& ops = *pass.ops;
  const Tensor keys = ops.scratch(x.rows, config_.head_dim);
  ops.matmul(*stage.keys, x, keys);
  ops.rms_norm(keys, 1, *stage.keys_norm, eps_, keys);
  ops.rope_pairs(keys, 1, config_.head_dim, rope, false);
  if (rounds_) ops.fake_quantise(keys, FakeFormat::kE4m3By32);
  return keys;
}

absl::Status DsparkDrafter::add_context(PassContext& pass, Tensor taps) const {
  Ops& ops = *pass.ops;
  const ScratchScope scope(ops);
  const Tensor normed = ops.scratch_input(taps.rows, config_.hidden_size);
  if (absl::Status status = taps_.make_rows(pass, taps, eps_, normed); !status.ok()) return status;
  const RopeTable rope = ops.rope_table(pass.rows, *inv_freq_, 1.0);
  for (size_t i = 0; i < stages_.size(); ++i) {
    const ScratchScope each(ops);
    ops.row_write(*pass.row_cache, static_cast<int64_t>(i), make_keys(pass, stages_[i], rope, normed), pass.rows);
  }
  return absl::OkStatus();
}

absl::Status DsparkDrafter::attend(PassContext& pass, int64_t index, const RopeTable& rope, Tensor x,
                                   Tensor out) const {
  Ops& ops = *pass.ops;
  const Stage& stage = stages_[static_cast<size_t>(index)];
  const int64_t heads = stage.out.heads(), dim = config_.head_dim;
  const Tensor latent = ops.scratch(x.rows, config_.latent.q_rank);
  ops.matmul(*stage.query_a, x, latent);
  const Tensor query = ops.scratch_input(x.rows, config_.latent.q_rank);
  ops.rms_norm(latent, 1, *stage.query_norm, eps_, query);
  LatentAttentionArgs args;
  args.q = ops.scratch(x.rows, heads * dim);
  ops.matmul(*stage.query_b, query, args.q);
  if (!v41_) ops.rms_norm(args.q, heads, *ones_, eps_, args.q);
  ops.rope_pairs(args.q, heads, dim, rope, false);
  args.block = make_keys(pass, stage, rope, x);
  args.out = ops.scratch(x.rows, heads * dim);
  args.heads = heads;
  args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
  args.sinks = stage.sinks.get();
  args.layer = index;
  args.window = config_.latent.window;
  args.rows = pass.rows;
  ops.latent_attention(*pass.row_cache, args);
  // Values were rotated as the keys that they are: what is left is their place relative to the query.
  ops.rope_pairs(args.out, heads, dim, rope, true);
  return stage.out.add_to(pass, static_cast<int>(index), args.out, out);
}

absl::Status DsparkDrafter::block(PassContext& pass, Model& target, Tensor* hidden) const {
  Ops& ops = *pass.ops;
  const int64_t rows = pass.rows.rows(), width = config_.hidden_size;
  *hidden = ops.scratch(rows, width);
  const ScratchScope scope(ops);
  Streams streams = Streams::make(ops, rows, config_.streams.count, width);
  if (v41_) streams.carry(ops);
  const Tensor normed = ops.scratch_input(rows, width);
  const RopeTable rope = ops.rope_table(pass.rows, *inv_freq_, 1.0);
  for (int64_t s = 0; s < streams.count; ++s) target.embed(pass, streams.all.columns(s * width, width));
  for (size_t i = 0; i < stages_.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const absl::Status status =
        stages_[i].blocks.run(pass, static_cast<int>(i), streams, normed,
                              [&](Tensor x, Tensor output) { return attend(pass, index, rope, x, output); });
    if (!status.ok()) return status;
  }
  if (v41_) {
    streams.collapse_carried(ops);
  } else {
    head_->collapse(pass, streams);
  }
  ops.rms_norm(streams.input, 1, *norm_, eps_, *hidden);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::vector<int32_t>>> DsparkDrafter::choose(const BlockRows& rows) const {
  Ops& ops = *rows.ops;
  const ScratchScope scope(ops);
  const Tensor logits = ops.scratch(rows.hidden.rows, rows.local_vocab);
  rows.head(rows.hidden, logits);
  std::vector<std::vector<int32_t>> drafts(rows.drafts.size());
  for (int64_t step = 0;; ++step) {
    // The next row of every block that has one, and the token before it.
    const ScratchScope each(ops);
    std::vector<size_t> blocks;
    std::vector<int32_t> index, before;
    int64_t first = 0;
    for (size_t i = 0; i < drafts.size(); first += rows.drafts[i++]) {
      if (step >= rows.drafts[i]) continue;
      blocks.push_back(i);
      index.push_back(static_cast<int32_t>(first + step));
      before.push_back(step == 0 ? rows.anchors[i] : drafts[i].back());
    }
    if (blocks.empty()) return drafts;
    const auto count = static_cast<int64_t>(blocks.size());
    const Tensor chosen = ops.scratch(count, rows.local_vocab), bias = ops.scratch(count, rows.local_vocab);
    const Tensor embedded = ops.scratch(count, config_.dspark.markov_rank);
    ops.gather_rows(logits, index, chosen);
    RowBatch batch;
    batch.tokens = before;
    ops.run(RunKind::kBlock, batch, {}, false, [&](const RowBatch& placed, Tensor) {
      ops.embed(*markov_in_, placed, embedded);
      return embedded;
    });
    ops.matmul(*markov_out_, embedded, bias);
    ops.add(chosen, bias, chosen);
    const absl::StatusOr<std::vector<std::vector<Candidate>>> best = rows.best(chosen, 1);
    if (!best.ok()) return best.status();
    for (size_t i = 0; i < blocks.size(); ++i) drafts[blocks[i]].push_back((*best)[i][0].id);
  }
}

WeightCost DsparkDrafter::cost() const {
  WeightCost cost = taps_.cost();
  for (const Stage& stage : stages_) {
    cost += stage.blocks.cost();
    for (const Weight* weight : {stage.query_a.get(), stage.query_b.get(), stage.keys.get()}) cost += cost_of(*weight);
    cost += stage.out.cost();
  }
  if (head_ != nullptr) cost += head_->cost();
  return cost += cost_of(*markov_out_);
}

int64_t DsparkDrafter::context_bytes() const {
  WeightCost cost = taps_.cost();
  for (const Stage& stage : stages_) cost += cost_of(*stage.keys);
  return cost.bytes;
}

}  // namespace tensorfold
