#include "worker/checkpoint/nemotron_config.h"

#include <fmt/format.h>

#include <limits>

namespace tensorfold {
namespace {

struct Block {
  LayerKind mixer;
  MlpKind mlp;
};

constexpr const char* kBlocks =
    "M or linear_attention (mamba), E or moe, * or full_attention (attention), - or mlp: one for each block";

std::optional<Block> block_of(std::string_view name) {
  if (name == "M" || name == "linear_attention" || name == "mamba") return Block{LayerKind::kMamba2, MlpKind::kNone};
  if (name == "E" || name == "moe") return Block{LayerKind::kNone, MlpKind::kExperts};
  if (name == "*" || name == "full_attention" || name == "attention") {
    return Block{LayerKind::kFullAttention, MlpKind::kNone};
  }
  if (name == "-" || name == "mlp") return Block{LayerKind::kNone, MlpKind::kDense};
  return std::nullopt;
}

// A list of names, or a pattern of one letter a block; lists win, as in the reference.
std::vector<std::string> block_names(FieldReader& fields, const char* list, const char* pattern) {
  if (fields.has(list)) return fields.strings(list);
  std::vector<std::string> names;
  for (const char letter : fields.string(pattern, "")) names.emplace_back(1, letter);
  return names;
}

void parse_blocks(FieldReader& fields, ModelConfig& config) {
  constexpr size_t kMostBlocks = 1024;
  const char* list = fields.has("layers_block_type") ? "layers_block_type" : "layer_types";
  const char* key = fields.has(list) ? list : "hybrid_override_pattern";
  const std::vector<std::string> names = block_names(fields, list, "hybrid_override_pattern");
  if (!fields.ok()) return;
  if (names.empty() || names.size() > kMostBlocks) return fields.refuse(key, kBlocks);
  for (const std::string& name : names) {
    const std::optional<Block> block = block_of(name);
    if (!block) return fields.refuse(key, kBlocks);
    config.layers.push_back(block->mixer);
    config.mlps.push_back(block->mlp);
  }
  // Files say it beside the pattern; the reference goes by the pattern.
  const int64_t count = fields.integer("num_hidden_layers", 1, 1024, config.layer_count());
  if (fields.ok() && count != config.layer_count()) {
    fields.refuse("num_hidden_layers", fmt::format("{}, as many as {} has blocks", config.layer_count(), key));
  }
  if (fields.ok() && config.count(MlpKind::kDense) > 0 && config.intermediate_size == 0) {
    fields.refuse("intermediate_size", "1 to 1048576: there are mlp blocks");
  }
}

void parse_experts(FieldReader& fields, ModelConfig& config) {
  ExpertsConfig& experts = config.experts;
  experts.gated = experts.shared_gate = false;
  experts.sigmoid = experts.choice_bias = true;
  if (config.count(MlpKind::kExperts) == 0) return;
  experts.count = fields.integer("n_routed_experts", 1, 4096);
  experts.per_token = fields.integer("num_experts_per_tok", 1, 32);
  experts.intermediate_size = fields.integer("moe_intermediate_size", 1, 1 << 20);
  experts.renormalise = fields.boolean("norm_topk_prob", true);
  experts.scale = fields.number("routed_scaling_factor", 0.0, 1e6, 1.0);
  // One MLP of that width, whatever the number of shared experts.
  experts.shared_intermediate_size = fields.integer("moe_shared_expert_intermediate_size", 1, 1 << 20);
  for (const char* key : {"n_shared_experts", "n_group", "topk_group"}) {
    if (fields.integer(key, 1, 1 << 20, 1) != 1) fields.refuse(key, "1");
  }
  if (fields.has("moe_latent_size"))
    fields.refuse("moe_latent_size", "null (experts in a latent are not computed here)");
  if (fields.ok() && experts.per_token > experts.count) {
    fields.refuse("num_experts_per_tok", fmt::format("at most n_routed_experts, which is {}", experts.count));
  }
}

double step_bound(const boost::json::value& value) {
  if (value.is_double()) return value.get_double();
  if (value.is_int64()) return static_cast<double>(value.get_int64());
  const boost::json::object* spelt = value.if_object();
  const boost::json::value* word = spelt != nullptr ? spelt->if_contains("__float__") : nullptr;
  const bool infinite = word != nullptr && word->is_string() && word->get_string() == "Infinity";
  return infinite ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
}

void parse_mamba2(FieldReader& fields, ModelConfig& config) {
  if (config.count(LayerKind::kMamba2) == 0) return;
  Mamba2Config& mamba = config.mamba2;
  mamba.heads = fields.integer("mamba_num_heads", 1, 4096);
  mamba.head_dim = fields.integer("mamba_head_dim", 1, 1024);
  mamba.groups = fields.integer(fields.has("n_groups") ? "n_groups" : "mamba_n_groups", 1, 1024);
  mamba.state = fields.integer("ssm_state_size", 1, 1024);
  // From 2: with one tap the two conversions' convolution layouts could not be told apart.
  mamba.conv_kernel = fields.integer(fields.has("conv_kernel") ? "conv_kernel" : "mamba_d_conv", 2, 16);
  mamba.conv_bias = fields.boolean("use_conv_bias", true);
  mamba.most_step = std::numeric_limits<double>::infinity();
  if (const boost::json::value* limit = fields.find("time_step_limit"); limit != nullptr) {
    const boost::json::array* pair = limit->if_array();
    const bool two = pair != nullptr && pair->size() == 2;
    mamba.least_step = two ? step_bound((*pair)[0]) : -1.0;
    mamba.most_step = two ? step_bound((*pair)[1]) : -1.0;
    if (!(mamba.least_step >= 0.0 && mamba.least_step <= mamba.most_step)) {
      fields.refuse("time_step_limit", "two numbers from 0 to infinity, ascending");
    }
  }
  if (fields.ok() && mamba.heads % mamba.groups != 0) {
    fields.refuse("mamba_num_heads", fmt::format("a multiple of n_groups, which is {}", mamba.groups));
  }
}

}  // namespace

void parse_nemotron_h(FieldReader& fields, ModelConfig& config) {
  for (const char* key : {"use_bias", "mamba_proj_bias"}) {
    if (fields.boolean(key, false)) fields.refuse(key, "false (this is not computed here)");
  }
  if (fields.string("mlp_hidden_act", "relu2") != "relu2") fields.refuse("mlp_hidden_act", "relu2");
  const std::string act = fields.string("mamba_hidden_act", "silu");
  if (act != "silu" && act != "swish") fields.refuse("mamba_hidden_act", "silu");
  if (fields.has("sliding_window")) fields.refuse("sliding_window", "null (windows are not computed here)");
  parse_blocks(fields, config);
  parse_experts(fields, config);
  parse_mamba2(fields, config);
  if (!fields.ok()) return;
  config.mtp_layers = fields.integer("num_nextn_predict_layers", 0, 1, 0);
  if (config.mtp_layers == 0) return;
  const std::vector<std::string> names = block_names(fields, "mtp_layers_block_type", "mtp_hybrid_override_pattern");
  if (!names.empty() && fields.ok()) {
    const std::optional<Block> first = names.size() == 2 ? block_of(names[0]) : std::nullopt;
    const std::optional<Block> second = names.size() == 2 ? block_of(names[1]) : std::nullopt;
    if (!first || !second || first->mixer != LayerKind::kFullAttention || second->mlp != MlpKind::kExperts) {
      fields.refuse(fields.has("mtp_layers_block_type") ? "mtp_layers_block_type" : "mtp_hybrid_override_pattern",
                    "full_attention and moe");
    }
  }
  if (config.experts.count == 0) fields.refuse("num_nextn_predict_layers", "0 in a model without experts");
}

}  // namespace tensorfold
