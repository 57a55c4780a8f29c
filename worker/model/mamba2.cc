#include "worker/model/mamba2.h"

#include <array>

namespace tensorfold {

Mamba2Shape local_mamba2(const Mamba2Spec& spec, const Cut& cut) {
  const Mamba2Config& config = spec.config;
  return {.heads = cut.unit_count() * (config.heads / config.groups),
          .head_dim = config.head_dim,
          .groups = cut.unit_count(),
          .state = config.state,
          .conv_kernel = config.conv_kernel};
}

namespace {

struct Run {
  int64_t first, count;
};

std::vector<float> runs_of(const std::vector<float>& values, std::span<const Run> runs, int64_t width) {
  std::vector<float> out;
  for (const Run& run : runs) {
    const auto begin = values.begin() + run.first * width;
    out.insert(out.end(), begin, begin + run.count * width);
  }
  return out;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Mamba2Block>> Mamba2Block::load(LoadContext& load, const std::string& prefix,
                                                               const Mamba2Spec& spec, int64_t recurrent_layer) {
  auto block = std::make_unique<Mamba2Block>();
  const Mamba2Config& config = spec.config;
  const Cut cut = make_cut(spec.slices, load.shard);
  const Mamba2Shape shape = local_mamba2(spec, cut);
  const int64_t hidden = load.config.hidden_size;
  const int64_t together = config.heads / config.groups;
  const int64_t width = config.heads * config.head_dim, bc = config.groups * config.state;
  const Run heads = {cut.first_unit() * together, shape.heads};
  const Run own = {heads.first * config.head_dim, shape.width()};
  const Run own_bc = {cut.first_unit() * config.state, shape.groups * config.state};
  // The convolution's channels: x | B | C, each over all heads or groups.
  const std::array<Run, 3> channels = {own, Run{width + own_bc.first, own_bc.count},
                                       Run{width + bc + own_bc.first, own_bc.count}};

  absl::StatusOr<MatrixSource> in = load.reader.matrix(prefix + ".in_proj", 2 * width + 2 * bc + config.heads, hidden);
  if (!in.ok()) return in.status();
  std::vector<MatrixSource> rows = {in->slice_rows(own.first, own.count)};
  for (const Run& run : channels) rows.push_back(in->slice_rows(width + run.first, run.count));
  rows.push_back(in->slice_rows(2 * width + 2 * bc + heads.first, heads.count));
  block->in_ = load.ops.pack(rows);

  absl::StatusOr<std::vector<float>> conv =
      load.reader.convolution(prefix + ".conv1d", width + 2 * bc, config.conv_kernel);
  if (!conv.ok()) return conv.status();
  block->conv_ = load.ops.pack_vector(runs_of(*conv, channels, config.conv_kernel));
  struct Part {
    const char* name;
    int64_t size;
    std::span<const Run> runs;
    std::unique_ptr<Vector>* into;
  };
  std::vector<Part> parts = {{".A_log", config.heads, {&heads, 1}, &block->a_log_},
                             {".dt_bias", config.heads, {&heads, 1}, &block->dt_bias_},
                             {".D", config.heads, {&heads, 1}, &block->d_},
                             {".norm.weight", width, {&own, 1}, &block->norm_}};
  if (config.conv_bias) parts.push_back({".conv1d.bias", width + 2 * bc, channels, &block->conv_bias_});
  for (const Part& part : parts) {
    absl::StatusOr<std::vector<float>> values = load.reader.vector(prefix + part.name, part.size);
    if (!values.ok()) return values.status();
    *part.into = load.ops.pack_vector(runs_of(*values, part.runs, 1));
  }
  absl::StatusOr<SlicedProjection> out =
      SlicedProjection::load(load, prefix + ".out_proj", hidden, cut, together * config.head_dim);
  if (!out.ok()) return out.status();
  block->out_ = *std::move(out);
  block->shape_ = shape;
  block->first_group_ = cut.first_unit();
  block->recurrent_layer_ = recurrent_layer;
  block->eps_ = static_cast<float>(load.config.rms_norm_eps);
  block->least_step_ = static_cast<float>(config.least_step);
  block->most_step_ = static_cast<float>(config.most_step);
  return block;
}

absl::Status Mamba2Block::add_to(PassContext& pass, int layer, Tensor x, Tensor residual) const {
  const Tensor in = pass.ops->scratch(x.rows, in_->out_features());
  pass.ops->matmul(*in_, x, in);
  const int64_t width = shape_.width(), channels = shape_.channels();
  Mamba2Args args;
  args.shape = &shape_;
  args.z = in.columns(0, width);
  args.xbc = in.columns(width, channels);
  args.dt = in.columns(width + channels, shape_.heads);
  args.conv = conv_.get();
  args.conv_bias = conv_bias_.get();
  args.a_log = a_log_.get();
  args.dt_bias = dt_bias_.get();
  args.d = d_.get();
  args.norm = norm_.get();
  args.eps = eps_;
  args.least_step = least_step_;
  args.most_step = most_step_;
  args.out = pass.ops->scratch_input(x.rows, width);
  args.rows = pass.rows;
  args.layer = recurrent_layer_;
  pass.ops->mamba2(args);
  pass.record(layer, "mamba2.heads", args.out, first_group_, shape_.groups);
  return out_.add_to(pass, layer, "mamba2.out_proj", args.out, residual);
}

}  // namespace tensorfold
