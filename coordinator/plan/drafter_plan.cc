#include "coordinator/plan/drafter_plan.h"

#include <algorithm>
#include <filesystem>

#include "coordinator/plan/memory_plan.h"
#include "worker/model/dflash.h"
#include "worker/model/dspark.h"

namespace tensorfold {
namespace {

constexpr int kMostFiles = 10'000;

int64_t weight_file_bytes(const std::string& dir) {
  int64_t bytes = 0;
  int files = 0;
  std::error_code none;
  for (std::filesystem::directory_iterator at(dir, none), end; !none && at != end && ++files < kMostFiles;
       at.increment(none)) {
    std::error_code unreadable;
    if (at->path().extension() == ".safetensors") bytes += static_cast<int64_t>(at->file_size(unreadable));
  }
  return bytes;
}

// Taps of a pass's rows, and what is made of them.
int64_t tap_scratch(const Profile& profile, const DrafterFacts& facts, int64_t hidden) {
  const int64_t rows =
      std::max<int64_t>(profile.schedule.max_batch_rows, int64_t{profile.schedule.max_sequences} * facts.block_size);
  const int64_t row = static_cast<int64_t>(facts.target_layers.size() + 4) * hidden;
  return rows * row * static_cast<int64_t>(sizeof(float));
}

absl::StatusOr<DrafterPlan> plan_own_drafter(const Profile& profile, const ModelConfig& model, ShardSpec shard,
                                             const ModelFacts* facts) {
  const absl::StatusOr<DrafterShape> shape = dspark_shape(model, shard);
  if (!shape.ok()) return shape.status();
  DrafterPlan plan;
  plan.in_use = true;
  plan.page_bytes = shape->row_page_bytes();
  plan.scratch_bytes = tap_scratch(profile, dspark_facts(model), model.hidden_size);
  if (facts == nullptr) return plan;
  const bool device = profile.compute.backend == "cuda";
  const auto& kinds = device ? facts->device_memory_by_kind : facts->memory_by_kind;
  const auto found = kinds.find("drafter");
  const int64_t all = found == kinds.end() ? 0 : found->second;
  // One of the Markov head's two matrices, what is made of a row before there are heads, and the mixing of streams are
  // whole on every rank.
  const int64_t streams = model.streams.count, hidden = model.hidden_size;
  const int64_t stage = (model.latent.q_rank + model.head_dim + 2 * streams * (2 + streams) * streams) * hidden;
  const int64_t value = device ? 2 : 4;
  const int64_t whole =
      std::min(all, value * (model.vocab_size * model.dspark.markov_rank + model.dspark.stages * stage));
  plan.weight_bytes = whole + (all - whole + shard.world - 1) / shard.world;
  return plan;
}

}  // namespace

absl::StatusOr<DrafterPlan> plan_drafter(const Profile& profile, const ModelConfig& target, ShardSpec shard,
                                         const ModelFacts* facts) {
  if (profile.draft.uses_own() && target.dspark.stages > 0) return plan_own_drafter(profile, target, shard, facts);
  const std::string dir = profile.draft.model_in_use();
  if (dir.empty()) return DrafterPlan();
  const absl::StatusOr<DflashConfig> config = read_dflash_config(dir);
  if (!config.ok()) return config.status();
  if (absl::Status status = check_dflash_fits(*config, target); !status.ok()) return status;
  const absl::StatusOr<DrafterShape> shape = drafter_shape(*config, shard);
  if (!shape.ok()) return shape.status();
  DrafterPlan plan;
  plan.in_use = true;
  const int64_t all = weight_file_bytes(dir);
  // Codebooks, the selector's projection and what the convolutions' taps are made of are whole on every rank, in two
  // bytes a value as they are usually stored; the rest is cut.
  const int64_t hidden = config->model.hidden_size;
  int64_t own = 2 * config->model.vocab_size * config->selector_rank;
  if (config->second) {
    const int64_t taps = 2 * config->conv_taps * (hidden / std::max<int64_t>(config->conv_group, 1));
    own += config->selector_rank * hidden + config->model.layer_count() * 2 * taps * hidden;
  }
  const int64_t whole = std::min(all, 2 * own);
  plan.weight_bytes = whole + (all - whole + shard.world - 1) / shard.world;
  plan.page_bytes = key_value_page_bytes(profile, shape->kv_layers, shape->kv_heads, shape->head_dim);
  plan.scratch_bytes = tap_scratch(profile, drafter_facts(*config), config->target_hidden);
  return plan;
}

}  // namespace tensorfold
