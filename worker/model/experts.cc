#include "worker/model/experts.h"

#include <fmt/format.h>

#include <algorithm>

#include "worker/model/families.h"

namespace tensorfold {
namespace {

// One expert's whole matrices; no gate where the family's experts have none.
struct WholeExpert {
  MatrixSource gate, up, down;
};

absl::StatusOr<WholeExpert> one_expert(LoadContext& load, const std::string& module, int64_t columns) {
  const int64_t hidden = load.config.hidden_size;
  absl::StatusOr<MatrixSource> gate = MatrixSource{};
  if (load.config.experts.gated) gate = load.reader.matrix(module + ".gate_proj", columns, hidden);
  if (!gate.ok()) return gate.status();
  absl::StatusOr<MatrixSource> up = load.reader.matrix(module + ".up_proj", columns, hidden);
  if (!up.ok()) return up.status();
  absl::StatusOr<MatrixSource> down = load.reader.matrix(module + ".down_proj", hidden, columns);
  if (!down.ok()) return down.status();
  return WholeExpert{*gate, *up, *down};
}

bool holds(const LoadContext& load, const std::string& tensor) {
  return load.reader.source().find(load.reader.layout().full_name(tensor)) != nullptr;
}

// experts.gate_up_proj [experts, 2 * columns, hidden] (gate over up) and experts.down_proj [experts, hidden, columns].
absl::StatusOr<std::vector<WholeExpert>> fused_experts(LoadContext& load, const std::string& prefix) {
  const ExpertsConfig& config = load.config.experts;
  const int64_t columns = config.intermediate_size, hidden = load.config.hidden_size;
  absl::StatusOr<MatrixSource> gate_up =
      load.reader.stacked(prefix + ".experts.gate_up_proj", config.count, 2 * columns, hidden);
  if (!gate_up.ok()) return gate_up.status();
  absl::StatusOr<MatrixSource> down = load.reader.stacked(prefix + ".experts.down_proj", config.count, hidden, columns);
  if (!down.ok()) return down.status();
  std::vector<WholeExpert> experts;
  for (int64_t e = 0; e < config.count; ++e) {
    experts.push_back({gate_up->slice_rows(2 * e * columns, columns),
                       gate_up->slice_rows((2 * e + 1) * columns, columns), down->slice_rows(e * hidden, hidden)});
  }
  return experts;
}

// switch_mlp.{gate,up}_proj [experts, columns, hidden], switch_mlp.down_proj [experts, hidden, columns].
absl::StatusOr<std::vector<WholeExpert>> switch_experts(LoadContext& load, const std::string& prefix) {
  const ExpertsConfig& config = load.config.experts;
  const int64_t columns = config.intermediate_size, hidden = load.config.hidden_size;
  const std::string at = prefix + ".switch_mlp";
  absl::StatusOr<MatrixSource> gate = load.reader.stacked(at + ".gate_proj", config.count, columns, hidden);
  if (!gate.ok()) return gate.status();
  absl::StatusOr<MatrixSource> up = load.reader.stacked(at + ".up_proj", config.count, columns, hidden);
  if (!up.ok()) return up.status();
  absl::StatusOr<MatrixSource> down = load.reader.stacked(at + ".down_proj", config.count, hidden, columns);
  if (!down.ok()) return down.status();
  std::vector<WholeExpert> experts;
  for (int64_t e = 0; e < config.count; ++e) {
    experts.push_back({gate->slice_rows(e * columns, columns), up->slice_rows(e * columns, columns),
                       down->slice_rows(e * hidden, hidden)});
  }
  return experts;
}

// up [experts, columns, hidden] and down [experts, hidden, columns] of experts without gates.
absl::StatusOr<std::vector<WholeExpert>> ungated_experts(LoadContext& load, const std::string& up_module,
                                                         const std::string& down_module) {
  const ExpertsConfig& config = load.config.experts;
  const int64_t columns = config.intermediate_size, hidden = load.config.hidden_size;
  absl::StatusOr<MatrixSource> up = load.reader.stacked(up_module, config.count, columns, hidden);
  if (!up.ok()) return up.status();
  absl::StatusOr<MatrixSource> down = load.reader.stacked(down_module, config.count, hidden, columns);
  if (!down.ok()) return down.status();
  std::vector<WholeExpert> experts;
  for (int64_t e = 0; e < config.count; ++e) {
    experts.push_back({{}, up->slice_rows(e * columns, columns), down->slice_rows(e * hidden, hidden)});
  }
  return experts;
}

absl::StatusOr<std::vector<WholeExpert>> routed_experts(LoadContext& load, const std::string& prefix) {
  if (!load.config.experts.gated && holds(load, prefix + ".experts.up_proj")) {
    return ungated_experts(load, prefix + ".experts.up_proj", prefix + ".experts.down_proj");
  }
  if (!load.config.experts.gated && holds(load, prefix + ".switch_mlp.fc1.weight")) {
    return ungated_experts(load, prefix + ".switch_mlp.fc1", prefix + ".switch_mlp.fc2");
  }
  if (holds(load, prefix + ".experts.gate_up_proj")) return fused_experts(load, prefix);
  if (holds(load, prefix + ".switch_mlp.gate_proj.weight")) return switch_experts(load, prefix);
  std::vector<WholeExpert> experts;
  for (int64_t e = 0; e < load.config.experts.count; ++e) {
    absl::StatusOr<WholeExpert> expert =
        one_expert(load, fmt::format("{}.experts.{}", prefix, e), load.config.experts.intermediate_size);
    if (!expert.ok()) return expert.status();
    experts.push_back(*std::move(expert));
  }
  return experts;
}

// This rank's columns of an expert, which has as many slices as `cut`.
ExpertSource owned_part(const WholeExpert& whole, const Cut& cut) {
  const int64_t slice_columns = whole.up.rows / cut.slices.count;
  const int64_t first = cut.owned.first * slice_columns, count = cut.owned.count * slice_columns;
  ExpertSource part{whole.gate, whole.up.slice_rows(first, count), {}};
  if (whole.gate.rows > 0) part.gate = whole.gate.slice_rows(first, count);
  for (int64_t s = cut.owned.first; s < cut.owned.end(); ++s) {
    part.down.push_back(whole.down.slice_cols(s * slice_columns, slice_columns));
  }
  return part;
}

absl::StatusOr<std::unique_ptr<Weight>> load_table(LoadContext& load, const std::string& tensor) {
  const ExpertsConfig& config = load.config.experts;
  if (config.count - 1 > load.ops.largest_exact_number()) {
    return absl::UnimplementedError(fmt::format(
        "{}: a table of numbers up to {}, of which backend {} keeps those up to {}: run it with backend cpu", tensor,
        config.count - 1, load.ops.fingerprint_name(), load.ops.largest_exact_number()));
  }
  absl::StatusOr<std::vector<int64_t>> numbers =
      load.reader.integers(tensor, load.config.vocab_size, config.per_token, config.count);
  if (!numbers.ok()) return numbers.status();
  // Rows as wide as the backend wants them; what is added is never read.
  const int64_t unit = load.ops.input_unit(), columns = (config.per_token + unit - 1) / unit * unit;
  std::vector<float> values(static_cast<size_t>(load.config.vocab_size * columns), 0.0f);
  for (int64_t token = 0; token < load.config.vocab_size; ++token) {
    std::copy_n(numbers->begin() + token * config.per_token, config.per_token, values.begin() + token * columns);
  }
  MatrixSource source;
  source.rows = load.config.vocab_size;
  source.cols = columns;
  source.data = reinterpret_cast<const std::byte*>(values.data());
  source.row_bytes = columns * static_cast<int64_t>(sizeof(float));
  return load.ops.pack({&source, 1});
}

}  // namespace

absl::StatusOr<std::unique_ptr<ExpertsBlock>> ExpertsBlock::load(LoadContext& load, const std::string& prefix,
                                                                 bool by_token) {
  const ExpertsConfig& config = load.config.experts;
  const int64_t hidden = load.config.hidden_size;
  auto block = std::make_unique<ExpertsBlock>();
  block->cut_ = make_cut(expert_slices(load.config), load.shard);
  block->count_ = config.count;
  block->chosen_ = config.per_token;
  block->shared_ = config.shared_intermediate_size > 0;
  block->shared_gate_ = block->shared_ && config.shared_gate;
  block->renormalise_ = config.renormalise;
  block->score_ = config.sigmoid         ? RouterScore::kSigmoid
                  : config.sqrt_softplus ? RouterScore::kSqrtSoftplus
                                         : RouterScore::kSoftmax;
  block->scale_ = static_cast<float>(config.scale);
  block->limit_ = static_cast<float>(load.config.swiglu_limit);

  absl::StatusOr<MatrixSource> gate = load.reader.matrix(prefix + ".gate", config.count, hidden);
  if (!gate.ok()) return gate.status();
  std::vector<MatrixSource> router = {*gate};
  absl::StatusOr<std::vector<WholeExpert>> experts = routed_experts(load, prefix);
  if (!experts.ok()) return experts.status();
  if (by_token) {
    absl::StatusOr<std::unique_ptr<Weight>> table = load_table(load, prefix + ".gate.tid2eid");
    if (!table.ok()) return table.status();
    block->table_ = *std::move(table);
  }
  if (config.choice_bias && !by_token) {
    absl::StatusOr<std::vector<float>> bias =
        load.reader.vector(prefix + ".gate.e_score_correction_bias", config.count);
    if (!bias.ok()) return bias.status();
    block->bias_ = load.ops.pack_vector(*bias);
  }
  if (block->shared_gate_) {
    absl::StatusOr<MatrixSource> shared_gate = load.reader.matrix(prefix + ".shared_expert_gate", 1, hidden);
    if (!shared_gate.ok()) return shared_gate.status();
    router.push_back(*shared_gate);
  }
  if (block->shared_) {
    const std::string module = prefix + module_names(load.config).shared_expert;
    absl::StatusOr<WholeExpert> shared = one_expert(load, module, config.shared_intermediate_size);
    if (!shared.ok()) return shared.status();
    experts->push_back(*shared);
  }
  block->router_ = load.ops.pack(router);
  std::vector<ExpertSource> parts;
  for (const WholeExpert& whole : *experts) {
    const int64_t columns = whole.up.rows / block->cut_.slices.count, unit = load.ops.input_unit();
    if (columns % unit != 0) {
      return absl::UnimplementedError(fmt::format(
          "{}: {} slices of {} columns of an expert; backend {} computes products of multiples of {} columns: "
          "run it with backend cpu",
          prefix, block->cut_.slices.count, columns, load.ops.fingerprint_name(), unit));
    }
    parts.push_back(owned_part(whole, block->cut_));
  }
  block->experts_ = load.ops.pack_experts(parts);
  return block;
}

absl::Status ExpertsBlock::add_to(PassContext& pass, int layer, Tensor x, Tensor residual) const {
  Ops& ops = *pass.ops;
  const int64_t slots = chosen_ + (shared_ ? 1 : 0);
  const Tensor logits = ops.scratch(x.rows, router_->out_features());
  ops.matmul(*router_, x, logits);
  pass.record(layer, "experts.router", logits);
  RouteArgs route;
  route.logits = logits.columns(0, count_);
  if (shared_gate_) route.shared_gate = logits.columns(count_, 1);
  route.shared_always = shared_ && !shared_gate_;
  route.score = score_;
  route.bias = bias_.get();
  route.renormalise = renormalise_;
  route.scale = scale_;
  // A table's rows may reach over the shared expert's slot, which the route fills afterwards.
  const Tensor ids = ops.scratch(x.rows, std::max(slots, table_ != nullptr ? table_->in_features() : 0));
  route.ids = ids.columns(0, slots);
  route.weights = ops.scratch(x.rows, slots);
  route.rows = pass.rows;
  route.given = table_ != nullptr;
  if (table_ != nullptr) ops.embed(*table_, pass.rows, ids.columns(0, table_->in_features()));
  ops.route(route);
  pass.record(layer, "experts.ids", route.ids);
  pass.record(layer, "experts.weights", route.weights);

  std::vector<Tensor> partials;
  for (int64_t s = 0; s < cut_.owned.count; ++s) partials.push_back(ops.scratch(x.rows, residual.cols));
  ops.experts({experts_.get(), x, route.ids, route.weights, partials, limit_});
  for (int64_t s = 0; s < cut_.owned.count; ++s) {
    pass.record(layer, "experts.down_proj", partials[static_cast<size_t>(s)], cut_.owned.first + s);
  }
  return pass.sum->add(cut_.slices.count, cut_.owned.first, partials, residual);
}

WeightCost ExpertsBlock::cost() const {
  WeightCost cost = cost_of(*router_);
  // Routed experts are alike in size, unless their formats differ: the mean then.
  WeightCost routed;
  for (int64_t e = 0; e < count_; ++e) routed += {experts_->bytes(e), experts_->values(e)};
  cost += {routed.bytes * chosen_ / count_, routed.values * chosen_ / count_};
  if (shared_) cost += {experts_->bytes(count_), experts_->values(count_)};
  return cost;
}

}  // namespace tensorfold
