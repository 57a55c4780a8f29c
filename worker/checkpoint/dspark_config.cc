#include "worker/checkpoint/dspark_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "kernels/ops/block_ops.h"

namespace tensorfold {
namespace {

constexpr int64_t kMostTaps = 64;
constexpr int64_t kMostStages = 8;

// Layers whose outputs are read. deepseek_v41 counts by inputs: those of a layer are the outputs of the one before.
std::vector<int64_t> target_layers(FieldReader& fields, const ModelConfig& config) {
  std::vector<int64_t> layers = fields.integers("dspark_target_layer_ids", 0, config.layer_count() - 1);
  if (!fields.ok()) return {};
  const std::set<int64_t> different(layers.begin(), layers.end());
  if (layers.empty() || different.size() != layers.size() || layers.size() > kMostTaps) {
    fields.refuse("dspark_target_layer_ids", fmt::format("1 to {} different layer numbers", kMostTaps));
    return {};
  }
  if (config.family != Family::kDeepseekV41) return layers;
  const std::vector<int64_t>& engrams = config.engram.layers;
  for (int64_t& layer : layers) {
    if (layer == 0 || std::find(engrams.begin(), engrams.end(), layer) != engrams.end()) {
      fields.refuse("dspark_target_layer_ids", "layers behind the first one that have no engram");
    }
    --layer;
  }
  return layers;
}

}  // namespace

void parse_dspark(FieldReader& fields, ModelConfig& config) {
  if (!fields.ok() || !fields.has("dspark_block_size")) return;
  const bool v41 = config.family == Family::kDeepseekV41;
  DsparkConfig& dspark = config.dspark;
  dspark.block_size = fields.integer("dspark_block_size", 1, kMostBlockRows);
  dspark.noise_token_id = static_cast<int32_t>(fields.integer("dspark_noise_token_id", 0, config.vocab_size - 1));
  dspark.markov_rank = fields.integer("dspark_markov_rank", 1, 65536);
  dspark.target_layers = target_layers(fields, config);
  dspark.stages = fields.integer(v41 ? "num_nextn_predict_layers" : "n_mtp_layers", 1, kMostStages, 3);
  dspark.experts = fields.integer("dspark_n_routed_experts", 1, 65536, config.experts.count);
  dspark.experts_per_token =
      fields.integer("dspark_num_experts_per_tok", 1, 1024, std::min(config.experts.per_token, dspark.experts));
  if (fields.ok() && dspark.experts_per_token > dspark.experts) {
    fields.refuse("dspark_num_experts_per_tok", fmt::format("1 to {}, the drafter's experts", dspark.experts));
  }
  const std::string head = fields.string("dspark_markov_head_type", "vanilla");
  if (head != "vanilla") fields.refuse("dspark_markov_head_type", "vanilla");
  if (fields.integer("draft_vocab_size", 1, 1 << 24, config.vocab_size) != config.vocab_size) {
    fields.refuse("draft_vocab_size", fmt::format("{}, the vocabulary", config.vocab_size));
  }
}

std::string dspark_text(const DsparkConfig& c) {
  return fmt::format("dspark={},{},{} taps {} markov {} experts {},{}\n", c.stages, c.block_size, c.noise_token_id,
                     fmt::join(c.target_layers, ","), c.markov_rank, c.experts, c.experts_per_token);
}

}  // namespace tensorfold
