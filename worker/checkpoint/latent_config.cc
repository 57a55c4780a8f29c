#include "worker/checkpoint/latent_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "worker/checkpoint/safetensors.h"

namespace tensorfold {
namespace {

void parse_sizes(FieldReader& fields, ModelConfig& config) {
  config.hidden_size = fields.integer("hidden_size", 1, 65536);
  config.intermediate_size = fields.integer("intermediate_size", 1, 1 << 20, 0);
  config.vocab_size = fields.integer("vocab_size", 1, 1 << 24);
  config.heads = fields.integer("num_attention_heads", 1, 1024);
  config.kv_heads = 1;  // one latent for all heads
  config.rms_norm_eps = fields.number("rms_norm_eps", 0.0, 0.1);
  // Numbers of cached rows are kept as fp32 numbers, which are exact to here.
  config.max_positions = fields.integer("max_position_embeddings", 1, 1 << 24);
}

void parse_streams(FieldReader& fields, ModelConfig& config) {
  config.streams.count = fields.integer("hc_mult", 1, 8);
  config.streams.eps = fields.number("hc_eps", 0.0, 0.1);
  config.streams.iterations = fields.integer("hc_sinkhorn_iters", 1, 1000);
  config.swiglu_limit = fields.number("swiglu_limit", 1e-3, 1e6);
}

// Names of `key` for each layer, or empty if the key is absent; each one of `allowed`.
std::vector<std::string> names_by_layer(FieldReader& fields, const char* key, int64_t count,
                                        std::initializer_list<std::string_view> allowed) {
  std::vector<std::string> names = fields.strings(key);
  if (!fields.ok() || !fields.has(key)) return {};
  // An MTP layer may be listed behind the others.
  if (static_cast<int64_t>(names.size()) != count && static_cast<int64_t>(names.size()) != count + 1) {
    fields.refuse(key, fmt::format("{} names, as many as num_hidden_layers", count));
    return {};
  }
  names.resize(static_cast<size_t>(count));
  for (size_t i = 0; i < names.size(); ++i) {
    if (std::find(allowed.begin(), allowed.end(), names[i]) != allowed.end()) continue;
    fields.fail(absl::UnimplementedError(fmt::format("{}[{}] is {}; allowed: {}", fields.where(key), i,
                                                     quoted_name(names[i]), fmt::join(allowed, ", "))));
    return {};
  }
  return names;
}

void parse_router(FieldReader& fields, ModelConfig& config) {
  ExpertsConfig& experts = config.experts;
  experts.count = fields.integer("n_routed_experts", 1, 4096);
  experts.per_token = fields.integer("num_experts_per_tok", 1, 32);
  experts.intermediate_size = fields.integer("moe_intermediate_size", 1, 1 << 20);
  experts.shared_intermediate_size = experts.intermediate_size * fields.integer("n_shared_experts", 0, 64);
  experts.shared_gate = false;
  experts.renormalise = fields.boolean("norm_topk_prob", true);
  experts.scale = fields.number("routed_scaling_factor", 0.0, 1e6, 1.0);
  experts.choice_bias = true;
  if (fields.ok() && experts.per_token > experts.count) {
    fields.refuse("num_experts_per_tok", fmt::format("at most n_routed_experts, which is {}", experts.count));
  }
  for (const char* key : {"n_group", "topk_group"}) {
    if (fields.integer(key, 0, 1 << 20, 1) > 1) fields.refuse(key, "1 (experts are not chosen by groups here)");
  }
}

// --- glm5_next ----------------------------------------------------------------------------------------------------

void parse_glm_layers(FieldReader& fields, ModelConfig& config) {
  const int64_t count = fields.integer("num_hidden_layers", 1, 1024);
  if (!fields.ok()) return;
  const auto types =
      names_by_layer(fields, "layer_types", count, {"linear_attention", "deepseek_sparse_attention", "full_attention"});
  const auto mlps = names_by_layer(fields, "mlp_layer_types", count, {"dense", "sparse"});
  const int64_t dense = fields.integer("first_k_dense_replace", 0, count, std::min<int64_t>(3, count));
  const auto indexers = names_by_layer(fields, "indexer_types", count, {"full", "shared"});
  if (!fields.has("indexer_types")) {
    if (fields.has("index_topk_pattern")) fields.refuse("index_topk_pattern", "indexer_types in its place");
    if (fields.integer("index_topk_freq", 1, 1024, 1) > 1) fields.refuse("index_topk_freq", "1, or indexer_types");
  }
  if (!fields.ok()) return;
  bool chosen = false;  // an attention layer before this one has an indexer
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    const bool linear = types.empty() ? i % 4 != 3 : types[at] == "linear_attention";
    config.layers.push_back(linear ? LayerKind::kLinearAttention : LayerKind::kFullAttention);
    config.mlps.push_back((mlps.empty() ? i < dense : mlps[at] == "dense") ? MlpKind::kDense : MlpKind::kExperts);
    const bool shared = !linear && !indexers.empty() && indexers[at] == "shared";
    if (shared && !chosen) fields.refuse("indexer_types", "\"full\" for the first attention layer");
    chosen = chosen || !linear;
    config.latent.shared_choice.push_back(shared);
  }
  if (config.count(MlpKind::kDense) > 0 && config.intermediate_size == 0) {
    fields.refuse("intermediate_size", "1 to 1048576: there are dense layers");
  }
}

// The layers' dimensions, flat or in the linear_attn_config of the original files.
void parse_glm_linear(FieldReader& fields, ModelConfig& config) {
  if (config.count(LayerKind::kLinearAttention) == 0) return;
  const boost::json::object* object = fields.object("linear_attn_config");
  std::optional<FieldReader> nested;
  if (object != nullptr) nested.emplace(fields.where("linear_attn_config"), *object);
  const auto integer = [&](const char* flat, const char* inner, int64_t low, int64_t high) {
    return nested && nested->has(inner) ? nested->integer(inner, low, high) : fields.integer(flat, low, high);
  };
  LinearAttentionConfig& linear = config.linear;
  linear.key_heads = linear.value_heads = integer("linear_num_heads", "num_heads", 1, 1024);
  linear.key_dim = linear.value_dim = integer("linear_head_dim", "head_dim", 1, 1024);
  linear.conv_kernel = integer("linear_conv_kernel_dim", "short_conv_kernel_size", 2, 16);
  linear.decay_floor = nested && nested->has("gate_lower_bound") ? nested->number("gate_lower_bound", -1e3, 0.0)
                                                                 : fields.number("linear_lower_bound", -1e3, 0.0, -5.0);
  if (nested) fields.fail(nested->status());
  if (!fields.ok()) return;
  if (linear.decay_floor >= 0.0) fields.refuse("linear_lower_bound", "a number below 0");
  if (linear.key_dim % 8 != 0) fields.refuse("linear_head_dim", "a multiple of 8");
}

void parse_glm_attention(FieldReader& fields, ModelConfig& config) {
  LatentConfig& latent = config.latent;
  latent.q_rank = fields.integer("q_lora_rank", 1, 65536);
  latent.kv_rank = fields.integer("kv_lora_rank", 1, 65536);
  latent.key_dim = fields.integer("qk_nope_head_dim", 1, 1024);
  config.head_dim = fields.integer("v_head_dim", 1, 1024);
  if (fields.integer("qk_rope_head_dim", 0, 1024, 0) != 0) {
    fields.refuse("qk_rope_head_dim", "0 (its attention has no rotary positions)");
  }
  latent.index_heads = fields.integer("index_n_heads", 1, 1024);
  latent.index_dim = fields.integer("index_head_dim", 1, 1024);
  latent.index_topk = fields.integer("index_topk", 1, 1 << 20);
  latent.index_tokens = fields.integer("index_kpool", 1, 64, 16);
  if (!fields.ok()) return;
  if (64 % latent.index_tokens != 0) fields.refuse("index_kpool", "a divisor of a page's 64 tokens");
  if (latent.index_topk % latent.index_tokens != 0) {
    fields.refuse("index_topk", fmt::format("a multiple of index_kpool, which is {}", latent.index_tokens));
  }
  if (config.head_dim % 8 != 0) fields.refuse("v_head_dim", "a multiple of 8");
  if (!fields.boolean("index_kpool_always_select_tail", true)) {
    fields.refuse("index_kpool_always_select_tail", "true");
  }
}

void parse_glm5_next(FieldReader& fields, ModelConfig& config) {
  if (fields.integer("num_key_value_heads", 1, 1024, config.heads) != config.heads) {
    fields.refuse("num_key_value_heads", fmt::format("num_attention_heads, which is {}", config.heads));
  }
  parse_glm_layers(fields, config);
  parse_glm_attention(fields, config);
  parse_glm_linear(fields, config);
  parse_router(fields, config);
  config.experts.sigmoid = true;
  config.mtp_layers = fields.integer("num_nextn_predict_layers", 0, 1, 0);
}

}  // namespace

void parse_latent(FieldReader& fields, ModelConfig& config) {
  parse_sizes(fields, config);
  parse_streams(fields, config);
  if (!fields.ok()) return;
  parse_glm5_next(fields, config);
}

std::string latent_text(const ModelConfig& c) {
  const LatentConfig& l = c.latent;
  if (l.q_rank == 0) return {};
  std::string shared;
  for (const bool s : l.shared_choice) shared += s ? 'S' : 'F';
  return fmt::format("latent={},{},{} index={},{},{},{} {} streams={},{:a},{} limit={:a} floor={:a}\n", l.q_rank,
                     l.kv_rank, l.key_dim, l.index_heads, l.index_dim, l.index_tokens, l.index_topk, shared,
                     c.streams.count, c.streams.eps, c.streams.iterations, c.swiglu_limit, c.linear.decay_floor);
}

}  // namespace tensorfold
