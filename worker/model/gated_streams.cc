#include "worker/model/gated_streams.h"

#include "kernels/ops/stream_ops.h"

namespace tensorfold {

absl::StatusOr<StreamNorm> StreamNorm::load(LoadContext& load, const std::string& module) {
  const int64_t count = load.config.gated_streams.count, width = load.config.hidden_size;
  absl::StatusOr<std::vector<float>> values = load.reader.norm(module, count * width);
  if (!values.ok()) return values.status();
  StreamNorm norm;
  for (int64_t s = 0; s < count; ++s) {
    norm.weights_.push_back(
        load.ops.pack_vector(std::span(*values).subspan(static_cast<size_t>(s * width), static_cast<size_t>(width))));
  }
  return norm;
}

void StreamNorm::apply(Ops& ops, float eps, Tensor x, Tensor out) const {
  for (size_t s = 0; s < weights_.size(); ++s) {
    const int64_t width = weights_[s]->size(), at = static_cast<int64_t>(s) * width;
    ops.rms_norm(x.columns(at, width), 1, *weights_[s], eps, out.columns(at, width));
  }
}

absl::StatusOr<std::unique_ptr<GatedStreams>> GatedStreams::load(LoadContext& load, const std::string& prefix,
                                                                 bool injects) {
  auto block = std::make_unique<GatedStreams>();
  const GatedStreamsConfig& config = load.config.gated_streams;
  const int64_t all = config.count * load.config.hidden_size;
  block->count_ = config.count;
  block->rank_ = config.rank;
  block->eps_ = static_cast<float>(load.config.rms_norm_eps);
  absl::StatusOr<StreamNorm> norm = StreamNorm::load(load, prefix + ".hc_norm");
  if (!norm.ok()) return norm.status();
  block->norm_ = *std::move(norm);
  absl::StatusOr<MatrixSource> down = load.reader.matrix(prefix + ".input_mix_weight_down", config.rank, all);
  if (!down.ok()) return down.status();
  std::vector<MatrixSource> rows = {*down};
  if (injects) {
    absl::StatusOr<MatrixSource> inject = load.reader.matrix(prefix + ".block_inject_weight", config.count, all);
    if (!inject.ok()) return inject.status();
    rows.push_back(*inject);
  }
  block->down_ = load.ops.pack(rows);
  absl::StatusOr<MatrixSource> up = load.reader.matrix(prefix + ".input_mix_weight_up", all, config.rank);
  if (!up.ok()) return up.status();
  block->up_ = load.ops.pack({&*up, 1});
  return block;
}

Tensor GatedStreams::mix(PassContext& pass, int layer, Tensor streams, Tensor input) const {
  Ops& ops = *pass.ops;
  const Tensor normed = ops.scratch_input(streams.rows, streams.cols);
  norm_.apply(ops, eps_, streams, normed);
  const Tensor low = ops.scratch(streams.rows, down_->out_features());
  ops.matmul(*down_, normed, low);
  pass.record(layer, "streams.low", low);
  ops.scaled_silu(low.columns(0, rank_), 1.0f / static_cast<float>(count_));
  const Tensor gate = ops.scratch(streams.rows, streams.cols);
  ops.matmul(*up_, low.columns(0, rank_), gate);
  MixStreamsArgs args;
  args.x = normed;
  args.gate = gate;
  args.count = count_;
  args.out = input;
  ops.mix_streams(args);
  pass.record(layer, "streams.input", input);
  return low.cols > rank_ ? low.columns(rank_, count_) : Tensor{};
}

void GatedStreams::inject(PassContext& pass, Tensor inject, Tensor y, Tensor streams) const {
  pass.ops->inject_streams({.x = streams, .inject = inject, .count = count_, .y = y});
}

}  // namespace tensorfold
