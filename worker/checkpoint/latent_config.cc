#include "worker/checkpoint/latent_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "worker/checkpoint/deepseek_v41_config.h"
#include "worker/checkpoint/dspark_config.h"
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
      names_by_layer(fields, "layer_types", count,
                     {"linear_attention", "deepseek_sparse_attention", "indexed_attention", "full_attention"});
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
  const int64_t topk = fields.integer("index_topk", 1, 1 << 20);
  latent.index_tokens = fields.integer("index_kpool", 1, 64, 16);
  if (!fields.ok()) return;
  if (64 % latent.index_tokens != 0) fields.refuse("index_kpool", "a divisor of a page's 64 tokens");
  if (topk % latent.index_tokens != 0) {
    fields.refuse("index_topk", fmt::format("a multiple of index_kpool, which is {}", latent.index_tokens));
  }
  latent.index_windows = topk / latent.index_tokens;
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

// --- deepseek_v4, deepseek_v41
// --------------------------------------------------------------------------------------------------

// One rotation, from its own object or the flat keys of `fields`.
RopeConfig parse_rotation(FieldReader& fields, FieldReader* nested, double theta, int64_t dims) {
  RopeConfig rope;
  rope.dims = dims;
  rope.theta = theta;
  if (nested == nullptr) return rope;
  rope.theta = nested->number("rope_theta", 1.0, 1e12, theta);
  const std::string type = nested->string(nested->has("rope_type") ? "rope_type" : "type", "default");
  if (type != "default" && type != "yarn") {
    nested->fail(absl::UnimplementedError(
        fmt::format("{} is {}; read are: default, yarn", nested->where("rope_type"), quoted_name(type))));
  }
  if (type == "yarn") {
    rope.type = RopeType::kYarn;
    rope.factor = nested->number("factor", 1.0, 1e6);
    rope.beta_fast = nested->number("beta_fast", 1e-3, 1e6, 32.0);
    rope.beta_slow = nested->number("beta_slow", 1e-3, 1e6, 1.0);
    rope.truncate = nested->boolean("truncate", true);
    rope.attention_factor = 1.0;
    rope.original_max_positions = nested->integer("original_max_position_embeddings", 1, int64_t{1} << 30);
    if (nested->number("attention_factor", 0.0, 1e6, 1.0) != 1.0) nested->refuse("attention_factor", "1");
  }
  fields.fail(nested->status());
  return rope;
}

void parse_v4_rope(FieldReader& fields, ModelConfig& config) {
  const auto share = [&] {
    return static_cast<double>(config.head_dim) * fields.number("partial_rotary_factor", 0.0, 1.0, 0.125);
  };
  const int64_t dims =
      fields.has("qk_rope_head_dim") ? fields.integer("qk_rope_head_dim", 2, 1024) : static_cast<int64_t>(share());
  const double theta = fields.number("rope_theta", 1.0, 1e12, 10000.0);
  const double pooled_theta = fields.number("compress_rope_theta", 1.0, 1e12, 160000.0);
  const char* key = fields.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  const boost::json::object* object = fields.object(key);
  if (!fields.ok()) return;
  if (dims < 2 || dims % 2 != 0 || dims > config.head_dim) {
    fields.refuse("qk_rope_head_dim", "an even number from 2 to head_dim");
    return;
  }
  std::optional<FieldReader> main, pooled;
  if (object != nullptr) {
    FieldReader nested(fields.where(key), *object);
    const boost::json::object* inner = nested.object("compress");
    if (inner != nullptr) {
      pooled.emplace(nested.where("compress"), *inner);
      if (const boost::json::object* other = nested.object("main")) main.emplace(nested.where("main"), *other);
    } else {
      pooled.emplace(fields.where(key), *object);
    }
    fields.fail(nested.status());
  }
  const bool flat = object != nullptr && !main;
  config.rope = parse_rotation(fields, main ? &*main : nullptr, theta, dims);
  config.latent.pooled_rope = parse_rotation(fields, pooled ? &*pooled : nullptr, pooled_theta, dims);
  if (flat) config.latent.pooled_rope.theta = pooled_theta;  // rope_theta beside yarn's keys is the window's
}

void parse_v4_layers(FieldReader& fields, ModelConfig& config) {
  const int64_t count = fields.integer("num_hidden_layers", 1, 1024);
  if (!fields.ok()) return;
  LatentConfig& latent = config.latent;
  latent.index_tokens = fields.integer("compress_rate_csa", 1, 1 << 16, 4);
  latent.pooled_tokens = fields.integer("compress_rate_hca", 1, 1 << 16, 128);
  if (const boost::json::object* rates = fields.object("compress_rates")) {
    FieldReader nested(fields.where("compress_rates"), *rates);
    latent.index_tokens = nested.integer("compressed_sparse_attention", 1, 1 << 16, latent.index_tokens);
    latent.pooled_tokens = nested.integer("heavily_compressed_attention", 1, 1 << 16, latent.pooled_tokens);
    fields.fail(nested.status());
  }
  const auto types =
      names_by_layer(fields, "layer_types", count,
                     {"sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"});
  const auto mlps = names_by_layer(fields, "mlp_layer_types", count, {"hash_moe", "moe"});
  const int64_t hashed = fields.integer("num_hash_layers", 0, 1024, 3);
  // The original files give each layer's tokens a pooled row, and the drafter's behind them.
  const std::vector<int64_t> ratios = fields.integers("compress_ratios", 0, 1 << 16);
  if (!fields.ok()) return;
  if (!ratios.empty() && static_cast<int64_t>(ratios.size()) < count) {
    fields.refuse("compress_ratios", fmt::format("{} numbers or more, as many as num_hidden_layers", count));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    LayerKind kind = i < 2 || i % 2 == 0 ? LayerKind::kWindowAndPooled : LayerKind::kWindowAndChosen;
    if (!types.empty()) {
      kind = types[at] == "sliding_attention"             ? LayerKind::kWindow
             : types[at] == "compressed_sparse_attention" ? LayerKind::kWindowAndChosen
                                                          : LayerKind::kWindowAndPooled;
    } else if (!ratios.empty()) {
      const bool known = ratios[at] == 0 || ratios[at] == latent.index_tokens || ratios[at] == latent.pooled_tokens;
      if (!known)
        fields.refuse("compress_ratios",
                      fmt::format("0, {} or {} for each layer", latent.index_tokens, latent.pooled_tokens));
      kind = ratios[at] == 0                     ? LayerKind::kWindow
             : ratios[at] == latent.index_tokens ? LayerKind::kWindowAndChosen
                                                 : LayerKind::kWindowAndPooled;
    }
    config.layers.push_back(kind);
    config.mlps.push_back(MlpKind::kExperts);
    latent.experts_by_token.push_back(mlps.empty() ? i < hashed : mlps[at] == "hash_moe");
  }
  for (const int64_t tokens : {latent.index_tokens, latent.pooled_tokens}) {
    if (64 % tokens != 0 && tokens % 64 != 0)
      fields.refuse("compress_rates", "divisors or multiples of a page's 64 tokens");
  }
}

void parse_deepseek(FieldReader& fields, ModelConfig& config) {
  LatentConfig& latent = config.latent;
  if (fields.integer("num_key_value_heads", 1, 1024, 1) != 1) fields.refuse("num_key_value_heads", "1");
  config.head_dim = latent.kv_rank = latent.key_dim = fields.integer("head_dim", 8, 4096);
  latent.q_rank = fields.integer("q_lora_rank", 1, 65536);
  latent.window = fields.integer("sliding_window", 1, 1 << 20);
  latent.out_groups = fields.integer("o_groups", 1, 1024);
  latent.out_rank = fields.integer("o_lora_rank", 1, 65536);
  latent.index_heads = fields.integer("index_n_heads", 1, 1024);
  latent.index_dim = fields.integer("index_head_dim", 1, 4096);
  latent.index_windows = fields.integer("index_topk", 1, 1 << 20);
  if (!fields.ok()) return;
  if (config.head_dim % 8 != 0) fields.refuse("head_dim", "a multiple of 8");
  if (config.heads % latent.out_groups != 0) fields.refuse("o_groups", "a divisor of num_attention_heads");
  parse_v4_rope(fields, config);
  if (fields.ok() && config.rope.dims > latent.index_dim) fields.refuse("index_head_dim", "at least qk_rope_head_dim");
  if (config.family == Family::kDeepseekV4) parse_v4_layers(fields, config);
  if (config.family == Family::kDeepseekV41) parse_deepseek_v41(fields, config);
  parse_router(fields, config);
  const std::string score = fields.string("scoring_func", "sqrtsoftplus");
  config.experts.sqrt_softplus = score == "sqrtsoftplus";
  config.experts.sigmoid = score == "sigmoid";
  if (score != "sqrtsoftplus" && score != "sigmoid" && score != "softmax") {
    fields.refuse("scoring_func", "sqrtsoftplus, sigmoid, softmax");
  }
  // The layers it counts are no MTP layers but a block drafter's; without its keys they are skipped.
  config.mtp_layers = 0;
  parse_dspark(fields, config);
}

std::string rope_text(const RopeConfig& r) {
  return fmt::format("{},{:a},{},{:a},{:a},{:a},{}", static_cast<int>(r.type), r.theta, r.dims, r.factor, r.beta_fast,
                     r.beta_slow, r.original_max_positions) +
         (r.truncate ? "" : ",exact");
}

}  // namespace

void parse_latent(FieldReader& fields, ModelConfig& config) {
  parse_sizes(fields, config);
  parse_streams(fields, config);
  if (!fields.ok()) return;
  if (config.family == Family::kGlm5Next) parse_glm5_next(fields, config);
  if (is_deepseek(config.family)) parse_deepseek(fields, config);
}

std::string latent_text(const ModelConfig& c) {
  const LatentConfig& l = c.latent;
  if (l.q_rank == 0) return {};
  std::string shared;
  for (const bool s : l.shared_choice) shared += s ? 'S' : 'F';
  std::string by_token;
  for (const bool b : l.experts_by_token) by_token += b ? 'T' : 'R';
  const std::string window =
      l.window == 0 ? ""
                    : fmt::format("window={},{} out={},{} rope={} {} experts={}\n", l.window, l.pooled_tokens,
                                  l.out_groups, l.out_rank, rope_text(c.rope), rope_text(l.pooled_rope), by_token);
  return window + fmt::format("latent={},{},{} index={},{},{},{} {} streams={},{:a},{} limit={:a} floor={:a}\n",
                              l.q_rank, l.kv_rank, l.key_dim, l.index_heads, l.index_dim, l.index_tokens,
                              l.index_windows, shared, c.streams.count, c.streams.eps, c.streams.iterations,
                              c.swiglu_limit, c.linear.decay_floor);
}

}  // namespace tensorfold
