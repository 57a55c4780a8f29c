#include "worker/model/streams.h"

#include "kernels/ops/latent_ops.h"

namespace tensorfold {

Streams Streams::make(Ops& ops, int64_t rows, int64_t count, int64_t hidden) {
  return {count,
          ops.scratch(rows, count * hidden),
          ops.scratch(rows, hidden),
          ops.scratch(rows, hidden),
          ops.scratch(rows, count * (1 + count)),
          {}};
}

void Streams::carry(Ops& ops) {
  carried = ops.scratch(all.rows, count);
  std::vector<float> first(static_cast<size_t>(all.rows * count), 0.0f);
  for (int64_t r = 0; r < all.rows; ++r) first[static_cast<size_t>(r * count)] = 1.0f;
  ops.upload(first, carried);
}

void Streams::collapse_carried(Ops& ops) const {
  HyperArgs args;
  args.streams = all;
  args.count = count;
  args.carried = carried;
  args.out = input;
  ops.hyper_collapse(args);
}

absl::StatusOr<std::unique_ptr<HyperConnection>> HyperConnection::load(LoadContext& load, const std::string& name) {
  const StreamsConfig& config = load.config.streams;
  const int64_t n = config.count, width = n * load.config.hidden_size, columns = n * (2 + n);
  auto connection = std::make_unique<HyperConnection>();
  absl::StatusOr<MatrixSource> mix = load.reader.bare_matrix(name + "_fn", columns, width);
  if (!mix.ok()) return mix.status();
  absl::StatusOr<std::vector<float>> base = load.reader.vector(name + "_base", columns);
  if (!base.ok()) return base.status();
  absl::StatusOr<std::vector<float>> scale = load.reader.vector(name + "_scale", 3);
  if (!scale.ok()) return scale.status();
  connection->count_ = n;
  connection->norm_eps_ = static_cast<float>(load.config.rms_norm_eps);
  connection->eps_ = static_cast<float>(config.eps);
  connection->iterations_ = config.iterations;
  connection->ones_ = load.ops.pack_vector(std::vector<float>(static_cast<size_t>(width), 1.0f));
  connection->mix_ = load.ops.pack({&*mix, 1});
  connection->base_ = load.ops.pack_vector(*base);
  connection->scale_ = load.ops.pack_vector(*scale);
  return connection;
}

void HyperConnection::collapse(PassContext& pass, int layer, const char* op, const Streams& streams) const {
  const ScratchScope scope(*pass.ops);
  const Tensor normed = pass.ops->scratch_input(streams.all.rows, streams.all.cols);
  pass.ops->rms_norm(streams.all, 1, *ones_, norm_eps_, normed);
  HyperArgs args;
  args.mix = pass.ops->scratch(streams.all.rows, mix_->out_features());
  pass.ops->matmul(*mix_, normed, args.mix);
  args.streams = streams.all;
  args.count = count_;
  args.scale = scale_.get();
  args.base = base_.get();
  args.eps = eps_;
  args.iterations = iterations_;
  args.weights = streams.weights;
  args.out = streams.input;
  args.zero = streams.output;
  args.carried = streams.carried;
  pass.ops->hyper_collapse(args);
  pass.record(layer, op, streams.weights);
}

void HyperConnection::expand(PassContext& pass, int layer, const char* op, const Streams& streams) const {
  HyperArgs args;
  args.streams = streams.all;
  args.count = count_;
  args.weights = streams.weights;
  args.y = streams.output;
  pass.ops->hyper_expand(args);
  pass.record(layer, op, streams.all);
}

absl::StatusOr<std::unique_ptr<HyperHead>> HyperHead::load(LoadContext& load, const std::string& prefix) {
  const StreamsConfig& config = load.config.streams;
  const int64_t n = config.count, width = n * load.config.hidden_size;
  const std::string name = prefix + (load.reader.has(prefix + "hc_head.hc_fn") ? "hc_head.hc_" : "hc_head_");
  auto head = std::make_unique<HyperHead>();
  absl::StatusOr<MatrixSource> mix = load.reader.bare_matrix(name + "fn", n, width);
  if (!mix.ok()) return mix.status();
  absl::StatusOr<std::vector<float>> base = load.reader.vector(name + "base", n);
  if (!base.ok()) return base.status();
  absl::StatusOr<std::vector<float>> scale = load.reader.vector(name + "scale", 1);
  if (!scale.ok()) return scale.status();
  head->count_ = n;
  head->norm_eps_ = static_cast<float>(load.config.rms_norm_eps);
  head->eps_ = static_cast<float>(config.eps);
  head->ones_ = load.ops.pack_vector(std::vector<float>(static_cast<size_t>(width), 1.0f));
  head->mix_ = load.ops.pack({&*mix, 1});
  head->base_ = load.ops.pack_vector(*base);
  head->scale_ = load.ops.pack_vector(*scale);
  return head;
}

void HyperHead::collapse(PassContext& pass, const Streams& streams) const {
  const ScratchScope scope(*pass.ops);
  const Tensor normed = pass.ops->scratch_input(streams.all.rows, streams.all.cols);
  pass.ops->rms_norm(streams.all, 1, *ones_, norm_eps_, normed);
  HyperArgs args;
  args.mix = pass.ops->scratch(streams.all.rows, count_);
  pass.ops->matmul(*mix_, normed, args.mix);
  args.streams = streams.all;
  args.count = count_;
  args.scale = scale_.get();
  args.base = base_.get();
  args.eps = eps_;
  args.out = streams.input;
  pass.ops->hyper_collapse(args);
}

}  // namespace tensorfold
