// config.json: what is read, and every refusal with its reason.
#include "worker/checkpoint/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "tests/worker/checkpoint/model_copy.h"
#include "worker/checkpoint/json_fields.h"

namespace tensorfold {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace json = boost::json;

json::object fixture(const std::string& name) {
  return *parse_json_object(*read_text_file(kFixtures + name + "/config.json", kMaxConfigBytes), name);
}
absl::StatusOr<ModelConfig> parse(const json::object& config) { return parse_config(json::serialize(config), ""); }

// The fixture's config with some keys replaced, as an error message or "no error".
std::string error_with(const std::string& name, const json::object& changes) {
  json::object config = fixture(name);
  json::object& at = config.contains("text_config") ? config["text_config"].as_object() : config;
  for (const auto& [key, value] : changes) at[key] = value;
  const auto parsed = parse(config);
  return parsed.ok() ? "no error" : std::string(parsed.status().message());
}

json::object object(std::string_view text) { return json::parse({text.data(), text.size()}).as_object(); }

// Protects: the llama fixture's facts, end to end.
TEST(ModelConfig, Llama) {
  const auto config = read_config(kFixtures + "llama");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, Family::kLlama);
  EXPECT_EQ(config->hidden_size, 64);
  EXPECT_EQ(config->heads, 8);
  EXPECT_EQ(config->kv_heads, 4);
  EXPECT_EQ(config->head_dim, 32);
  EXPECT_EQ(config->vocab_size, 512);
  EXPECT_EQ(config->layer_count(), 4);
  EXPECT_TRUE(config->tie_word_embeddings);
  EXPECT_FALSE(config->qk_norm);
  EXPECT_FALSE(config->zero_centred_norms);
  EXPECT_EQ(config->rope.theta, 100000.0);
  EXPECT_EQ(config->rope.dims, 32);
  EXPECT_THAT(config->eos_token_ids, ElementsAre(2));
  EXPECT_EQ(config->bos_token_id, 1);
}

// Protects: llama3 rope with all its factors, from rope_parameters and from the old flat keys alike.
TEST(ModelConfig, Llama3RopeBothForms) {
  const auto nested = parse(fixture("llama3_rope"));
  ASSERT_TRUE(nested.ok()) << nested.status();
  EXPECT_EQ(nested->rope.type, RopeType::kLlama3);
  EXPECT_EQ(nested->rope.factor, 8.0);
  EXPECT_EQ(nested->rope.low_freq_factor, 1.0);
  EXPECT_EQ(nested->rope.high_freq_factor, 4.0);
  EXPECT_EQ(nested->rope.original_max_positions, 128);
  EXPECT_EQ(nested->rope.theta, 500000.0);
  json::object flat = fixture("llama3_rope");
  json::object scaling = flat["rope_parameters"].as_object();
  scaling.erase("rope_theta");
  flat.erase("rope_parameters");
  flat["rope_theta"] = 500000.0;
  flat["rope_scaling"] = scaling;
  const auto old = parse(flat);
  ASSERT_TRUE(old.ok()) << old.status();
  EXPECT_EQ(canonical_text(*old), canonical_text(*nested));
}

// Protects: the hybrid family under text_config, and flat as sprout has it.
TEST(ModelConfig, Qwen35) {
  const auto config = read_config(kFixtures + "qwen3_5");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, Family::kQwen3_5);
  EXPECT_EQ(config->rope.dims, 8);
  EXPECT_EQ(config->linear.key_heads, 4);
  EXPECT_EQ(config->linear.value_heads, 8);
  EXPECT_EQ(config->linear.conv_kernel, 4);
  EXPECT_EQ(config->mtp_layers, 1);
  EXPECT_TRUE(config->attn_output_gate);
  EXPECT_TRUE(config->zero_centred_norms);
  EXPECT_EQ(config->count(LayerKind::kLinearAttention), 3);

  const auto sprout = read_config(TENSORFOLD_SOURCE_DIR "/deploy/models/sprout");
  ASSERT_TRUE(sprout.ok()) << sprout.status();
  EXPECT_EQ(sprout->model_type, "qwen3_5_text");
  EXPECT_THAT(sprout->eos_token_ids, ElementsAre(4087, 4089));  // config.json's and generation_config.json's
  EXPECT_FALSE(sprout->bos_token_id.has_value());
  EXPECT_TRUE(sprout->tie_word_embeddings);
}

// Protects: the families with experts: counts from either key, the shared expert, renormalising and its defaults.
TEST(ModelConfig, Experts) {
  const auto moe = read_config(kFixtures + "qwen3_moe");
  ASSERT_TRUE(moe.ok()) << moe.status();
  EXPECT_EQ(moe->family, Family::kQwen3Moe);
  EXPECT_EQ(moe->experts.count, 8);
  EXPECT_EQ(moe->experts.per_token, 4);
  EXPECT_EQ(moe->experts.intermediate_size, 64);
  EXPECT_EQ(moe->experts.shared_intermediate_size, 0);
  EXPECT_TRUE(moe->experts.renormalise);
  EXPECT_EQ(moe->count(MlpKind::kExperts), 4);
  EXPECT_FALSE(moe->zero_centred_norms);
  json::object plain = fixture("qwen3_moe");
  plain.erase("norm_topk_prob");
  EXPECT_FALSE(parse(plain)->experts.renormalise);

  const auto hybrid = read_config(kFixtures + "qwen3_5_moe");
  ASSERT_TRUE(hybrid.ok()) << hybrid.status();
  EXPECT_EQ(hybrid->family, Family::kQwen3_5Moe);
  EXPECT_EQ(hybrid->experts.shared_intermediate_size, 64);
  EXPECT_TRUE(hybrid->experts.renormalise);
  EXPECT_EQ(hybrid->mtp_layers, 1);
  EXPECT_FALSE(hybrid->linear.fused);

  const auto next = read_config(kFixtures + "qwen3_next");
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->family, Family::kQwen3Next);
  EXPECT_TRUE(next->linear.fused);
  EXPECT_TRUE(next->attn_output_gate);
  EXPECT_TRUE(next->zero_centred_norms);
  EXPECT_EQ(next->rope.dims, 8);
}

// Protects: which layers have experts: every decoder_sparse_step-th, without those of mlp_only_layers.
TEST(ModelConfig, LayersWithExperts) {
  json::object config = fixture("qwen3_moe");
  config["decoder_sparse_step"] = 2;
  config["mlp_only_layers"] = {3};
  EXPECT_THAT(parse(config)->mlps, ElementsAre(MlpKind::kDense, MlpKind::kExperts, MlpKind::kDense, MlpKind::kDense));
  EXPECT_NE(canonical_text(*parse(config)), canonical_text(*parse(fixture("qwen3_moe"))));
  config.erase("intermediate_size");
  EXPECT_THAT(std::string(parse(config).status().message()), HasSubstr("intermediate_size"));
}

// Protects: experts that cannot be are refused by key, value and limit.
TEST(ModelConfig, RefusesBadExperts) {
  EXPECT_THAT(error_with("qwen3_moe", object(R"({"num_experts_per_tok": 9})")),
              HasSubstr("num_experts_per_tok is 9; allowed: at most num_local_experts, which is 8"));
  EXPECT_THAT(error_with("qwen3_5_moe", object(R"({"num_experts_per_tok": 9})")),
              HasSubstr("text_config.num_experts_per_tok is 9; allowed: at most num_experts, which is 8"));
  EXPECT_THAT(error_with("qwen3_moe", object(R"({"num_local_experts": 0})")), HasSubstr("num_local_experts is 0"));
  EXPECT_THAT(error_with("qwen3_moe", object(R"({"moe_intermediate_size": null})")),
              HasSubstr("moe_intermediate_size"));
  EXPECT_THAT(error_with("qwen3_next", object(R"({"shared_expert_intermediate_size": 0})")),
              HasSubstr("shared_expert_intermediate_size is 0"));
  EXPECT_THAT(error_with("qwen3_moe", object(R"({"mlp_only_layers": [4]})")), HasSubstr("mlp_only_layers"));
  EXPECT_THAT(error_with("qwen3_moe", object(R"({"decoder_sparse_step": 0})")), HasSubstr("decoder_sparse_step is 0"));
  EXPECT_THAT(error_with("qwen3", object(R"({"num_experts": 8})")), HasSubstr("qwen3 has no experts"));
}

// Protects: nemotron_h's blocks from a list or a pattern, its Mamba2 numbers, router and MTP layer.
TEST(ModelConfig, NemotronH) {
  const auto config = read_config(kFixtures + "nemotron_h");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, Family::kNemotronH);
  EXPECT_THAT(config->layers, ElementsAre(LayerKind::kMamba2, LayerKind::kNone, LayerKind::kMamba2,
                                          LayerKind::kFullAttention, LayerKind::kMamba2, LayerKind::kNone));
  EXPECT_EQ(config->count(MlpKind::kExperts), 2);
  EXPECT_EQ(config->count(MlpKind::kNone), 4);
  EXPECT_EQ(config->mamba2.heads, 8);
  EXPECT_EQ(config->mamba2.groups, 4);
  EXPECT_EQ(config->mamba2.state, 32);
  EXPECT_TRUE(config->mamba2.conv_bias);
  EXPECT_EQ(config->mamba2.least_step, 0.0);
  EXPECT_TRUE(std::isinf(config->mamba2.most_step));
  EXPECT_TRUE(config->experts.sigmoid && config->experts.choice_bias && config->experts.renormalise);
  EXPECT_FALSE(config->experts.gated || config->experts.shared_gate);
  EXPECT_EQ(config->experts.scale, 2.5);
  EXPECT_EQ(config->experts.shared_intermediate_size, 128);
  EXPECT_EQ(config->rope.dims, 0);
  EXPECT_EQ(config->mtp_layers, 1);

  json::object pattern = fixture("nemotron_h");
  pattern.erase("layers_block_type");
  pattern["hybrid_override_pattern"] = "MEM*ME";
  EXPECT_EQ(canonical_text(*parse(pattern)), canonical_text(*config));
  pattern["hybrid_override_pattern"] = "MEM*M-";
  EXPECT_EQ(parse(pattern)->count(MlpKind::kDense), 1);
  // As Python writes it, which is not JSON.
  std::string text = json::serialize(fixture("nemotron_h"));
  const std::string spelt = R"({"__float__":"Infinity"})";
  ASSERT_NE(text.find(spelt), std::string::npos);
  text.replace(text.find(spelt), spelt.size(), "Infinity");
  const auto bare = parse_config(text, "");
  ASSERT_TRUE(bare.ok()) << bare.status();
  EXPECT_EQ(canonical_text(*bare), canonical_text(*config));
}

// Protects: what nemotron_h files may say and is not computed here is refused by key.
TEST(ModelConfig, RefusesWhatNemotronHMayAsk) {
  EXPECT_THAT(error_with("nemotron_h", {{"moe_latent_size", 32}}), HasSubstr("moe_latent_size is 32"));
  EXPECT_THAT(error_with("nemotron_h", {{"sliding_window", 512}}), HasSubstr("sliding_window is 512"));
  EXPECT_THAT(error_with("nemotron_h", {{"n_group", 2}}), HasSubstr("n_group is 2"));
  EXPECT_THAT(error_with("nemotron_h", {{"n_shared_experts", 2}}), HasSubstr("n_shared_experts is 2"));
  EXPECT_THAT(error_with("nemotron_h", {{"use_bias", true}}), HasSubstr("use_bias is true"));
  EXPECT_THAT(error_with("nemotron_h", {{"mlp_hidden_act", "silu"}}), HasSubstr("mlp_hidden_act is \"silu\""));
  EXPECT_THAT(error_with("nemotron_h", {{"n_groups", 3}}), HasSubstr("mamba_num_heads is 8; allowed: a multiple of"));
  EXPECT_THAT(error_with("nemotron_h", {{"num_hidden_layers", 5}}), HasSubstr("num_hidden_layers is 5; allowed: 6"));
  EXPECT_THAT(error_with("nemotron_h", {{"layers_block_type", {"moe", "conv"}}}), HasSubstr("layers_block_type"));
  EXPECT_THAT(error_with("nemotron_h", {{"mtp_layers_block_type", {"moe"}}}), HasSubstr("mtp_layers_block_type"));
  EXPECT_THAT(error_with("nemotron_h", {{"time_step_limit", {1.0, 0.5}}}), HasSubstr("time_step_limit"));
}

// Protects: qwen4_exp's streams, indexer, n-grams and gates.
TEST(ModelConfig, Qwen4Exp) {
  const auto config = read_config(kFixtures + "qwen4_exp");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, Family::kQwen4Exp);
  EXPECT_EQ(config->count(LayerKind::kFullAttention), 1);
  EXPECT_EQ(config->count(LayerKind::kLinearAttention), 3);
  EXPECT_TRUE(config->linear.sigmoid_gate && config->attn_output_gate && config->zero_centred_norms);
  EXPECT_EQ(config->gated_streams.count, 4);
  EXPECT_EQ(config->gated_streams.rank, 16);
  EXPECT_EQ(config->indexer.heads, 4);
  EXPECT_EQ(config->indexer.budget, 64);
  EXPECT_EQ(config->indexer.tokens, 4);
  EXPECT_THAT(config->ngrams.layers, ElementsAre(1));  // counted from 1 in the file
  EXPECT_EQ(config->ngrams.heads(), 8);
  EXPECT_EQ(config->ngrams.end_token, 2);
  EXPECT_EQ(config->mtp_layers, 1);
  EXPECT_EQ(config->experts.shared_intermediate_size, 64);

  // Released files say full_attention where they mean the sparse one, and no seed.
  json::object released = fixture("qwen4_exp");
  json::object& text = released["text_config"].as_object();
  text["layer_types"] = {"linear_attention", "linear_attention", "linear_attention", "full_attention"};
  text.erase("seed");
  EXPECT_EQ(canonical_text(*parse(released)), canonical_text(*config));
  text["output_gate_type"] = "silu";
  EXPECT_FALSE(parse(released)->linear.sigmoid_gate);
  EXPECT_NE(canonical_text(*parse(released)), canonical_text(*config));
}

// Protects: what cannot be is refused by key.
TEST(ModelConfig, RefusesWhatQwen4ExpCannotBe) {
  EXPECT_THAT(error_with("qwen4_exp", {{"hc_count", 1}}), HasSubstr("hc_count is 1"));
  EXPECT_THAT(error_with("qwen4_exp", {{"indexer_kv_heads", 2}}), HasSubstr("indexer_kv_heads is 2; allowed: 1"));
  EXPECT_THAT(error_with("qwen4_exp", {{"indexer_budget", 66}}),
              HasSubstr("indexer_budget is 66; allowed: a multiple"));
  EXPECT_THAT(error_with("qwen4_exp", {{"indexer_budget", nullptr}}), HasSubstr("indexer_budget is missing"));
  EXPECT_THAT(error_with("qwen4_exp", {{"indexer_compress_ratio", 3}}), HasSubstr("a divisor of 64"));
  EXPECT_THAT(error_with("qwen4_exp", {{"indexer_head_dim", 4}}), HasSubstr("at least the rotated dims, which are 8"));
  EXPECT_THAT(error_with("qwen4_exp", {{"ple_layer_ids", {5}}}), HasSubstr("ple_layer_ids"));
  EXPECT_THAT(error_with("qwen4_exp", {{"ple_embed_dim", 60}}), HasSubstr("ple_embed_dim is 60; allowed: a multiple"));
  EXPECT_THAT(error_with("qwen4_exp", {{"output_gate_type", "tanh"}}), HasSubstr("allowed: silu, sigmoid"));
  EXPECT_THAT(error_with("qwen3_5", {{"output_gate_type", "sigmoid"}}), HasSubstr("allowed: silu"));
}

// Protects: without layer_types the interval decides.
TEST(ModelConfig, LayerTypesFromInterval) {
  json::object config = fixture("qwen3_5");
  json::object& text = config["text_config"].as_object();
  const std::string listed = canonical_text(*parse(config));
  text.erase("layer_types");
  EXPECT_EQ(canonical_text(*parse(config)), listed);
  text["full_attention_interval"] = 2;
  EXPECT_EQ(parse(config)->count(LayerKind::kLinearAttention), 2);
}

// Protects: tie_word_embeddings may stand at either level; text_config wins and a conflict is remembered.
TEST(ModelConfig, TieAtEitherLevel) {
  json::object config = fixture("qwen3_5");
  config["tie_word_embeddings"] = true;
  EXPECT_TRUE(parse(config)->tie_levels_disagree);
  config["text_config"].as_object().erase("tie_word_embeddings");
  EXPECT_TRUE(parse(config)->tie_word_embeddings);
  EXPECT_FALSE(parse(config)->tie_levels_disagree);
}

// Protects: every checked range names key, value and what is allowed.
TEST(ModelConfig, RangesAreNamed) {
  EXPECT_THAT(error_with("llama", {{"hidden_size", 0}}),
              HasSubstr("hidden_size is 0; allowed: a whole number from 1 to 65536"));
  EXPECT_THAT(error_with("llama", {{"hidden_size", "64"}}), HasSubstr("hidden_size is \"64\""));
  EXPECT_THAT(error_with("llama", {{"hidden_size", nullptr}}), HasSubstr("hidden_size is missing"));
  EXPECT_THAT(error_with("llama", {{"hidden_size", 64.5}}), HasSubstr("64.5"));
  EXPECT_THAT(error_with("llama", {{"num_hidden_layers", 1e300}}), HasSubstr("num_hidden_layers is"));
  EXPECT_THAT(error_with("llama", {{"num_key_value_heads", 3}}),
              HasSubstr("num_key_value_heads is 3; allowed: a divisor of num_attention_heads, which is 8"));
  EXPECT_THAT(error_with("llama", {{"head_dim", 33}}), HasSubstr("head_dim is 33; allowed: an even number"));
  EXPECT_THAT(error_with("llama", {{"head_dim", nullptr}, {"hidden_size", 63}}),
              HasSubstr("hidden_size is 63; allowed: a multiple"));
  EXPECT_EQ(error_with("llama", {{"head_dim", nullptr}}), "no error");
  EXPECT_THAT(error_with("llama", {{"rms_norm_eps", -1}}), HasSubstr("rms_norm_eps is -1"));
  EXPECT_THAT(error_with("llama", {{"vocab_size", int64_t{1} << 40}}), HasSubstr("vocab_size is 1099511627776"));
  EXPECT_THAT(error_with("llama", {{"eos_token_id", 512}}), HasSubstr("eos_token_id is 512"));
  EXPECT_THAT(error_with("llama", {{"eos_token_id", {1, "x"}}}), HasSubstr("eos_token_id is"));
  EXPECT_EQ(error_with("llama", {{"pad_token_id", -1}}), "no error");
  EXPECT_THAT(
      error_with("qwen3_5", {{"linear_num_value_heads", 6}}),
      HasSubstr("text_config.linear_num_value_heads is 6; allowed: a multiple of linear_num_key_heads, which is 4"));
  EXPECT_THAT(error_with("qwen3_5", {{"linear_conv_kernel_dim", 1}}), HasSubstr("linear_conv_kernel_dim is 1"));
  EXPECT_THAT(error_with("qwen3_5", {{"layer_types", {"full_attention"}}}), HasSubstr("allowed: 4 names"));
  EXPECT_THAT(error_with("qwen3_5", {{"mtp_num_hidden_layers", 2}}), HasSubstr("mtp_num_hidden_layers is 2"));
}

// Protects: features that would change the numbers are refused by name, not ignored.
TEST(ModelConfig, FeaturesRefused) {
  EXPECT_THAT(error_with("llama", {{"attention_bias", true}}), HasSubstr("attention_bias is true; allowed: false"));
  EXPECT_THAT(error_with("llama", {{"mlp_bias", true}}), HasSubstr("mlp_bias is true"));
  EXPECT_THAT(error_with("llama", {{"hidden_act", "gelu"}}), HasSubstr("hidden_act is \"gelu\"; allowed: silu"));
  EXPECT_THAT(error_with("qwen3", {{"use_sliding_window", true}}), HasSubstr("use_sliding_window is true"));
  EXPECT_THAT(error_with("qwen3", {{"layer_types",
                                    {"full_attention", "sliding_attention", "full_attention", "full_attention"}}}),
              HasSubstr("layer_types[1] is 'sliding_attention'"));
  EXPECT_THAT(error_with("qwen3_5", {{"attn_output_gate", false}}), HasSubstr("attn_output_gate is false"));
  EXPECT_THAT(error_with("qwen3_5", {{"mtp_use_dedicated_embeddings", true}}),
              HasSubstr("mtp_use_dedicated_embeddings"));
  EXPECT_THAT(error_with("llama", {{"dtype", "float8_e4m3fn"}}), HasSubstr("dtype is \"float8_e4m3fn\""));
}

// Protects: rope types that are not computed are refused by name; contradictions and bad factors too.
TEST(ModelConfig, RopeRefused) {
  EXPECT_THAT(error_with("llama", {{"rope_parameters", object(R"({"rope_type":"ntk","rope_theta":1e4,"factor":4})")}}),
              HasSubstr("rope_type 'ntk', which is not read here. Read are: default, linear, llama3, yarn"));
  for (const char* type : {"dynamic", "longrope"}) {
    const std::string error =
        error_with("llama", {{"rope_parameters", {{"rope_type", type}, {"rope_theta", 1e4}, {"factor", 4}}}});
    EXPECT_THAT(error, HasSubstr(type));
    EXPECT_THAT(error, HasSubstr("change with the length of the whole sequence"));
  }
  EXPECT_THAT(
      error_with("llama", {{"rope_parameters", object(R"({"rope_type":"yarn","rope_theta":1e4,"factor":0.5})")}}),
      HasSubstr("factor is 0.5"));
  EXPECT_THAT(error_with("llama", {{"rope_parameters", object(R"({"full_attention":{"rope_theta":1e4}})")}}),
              HasSubstr("different rotary positions"));
  EXPECT_THAT(error_with("llama", {{"rope_theta", 5.0}}), HasSubstr("disagree"));
  EXPECT_THAT(error_with("llama", {{"rope_parameters", object(R"({"rope_type":"linear","rope_theta":1e4})")}}),
              HasSubstr("factor is missing"));
  EXPECT_THAT(
      error_with(
          "llama3_rope",
          {{"rope_parameters",
            object(
                R"({"rope_type":"llama3","rope_theta":1e4,"factor":8,"low_freq_factor":4,"high_freq_factor":4,"original_max_position_embeddings":128})")}}),
      HasSubstr("high_freq_factor is 4; allowed: a number over low_freq_factor"));
  EXPECT_THAT(error_with("llama", {{"partial_rotary_factor", 0.5}}),
              HasSubstr("partial_rotary_factor is 0.5; allowed for llama: 1"));
  EXPECT_THAT(error_with("qwen3", {{"rope_parameters", nullptr}}), HasSubstr("rope_theta is missing"));
  EXPECT_EQ(error_with("llama", {{"rope_parameters", nullptr}}), "no error");
}

// Protects: models of other families, and other architectures over a known family, are named with what is read.
TEST(ModelConfig, UnknownModels) {
  EXPECT_THAT(
      error_with("llama", {{"model_type", "gpt_oss"}}),
      HasSubstr("model_type 'gpt_oss' is not read here. Read are: llama, qwen3, qwen3_moe, qwen3_next, qwen3_5, "
                "qwen3_5_text, qwen3_5_moe, qwen3_5_moe_text"));
  EXPECT_THAT(error_with("llama", {{"model_type", nullptr}}), HasSubstr("model_type is missing"));
  EXPECT_THAT(error_with("qwen3", {{"architectures", {"DFlashDraftModel"}}}),
              HasSubstr("architecture 'DFlashDraftModel'"));
  EXPECT_THAT(error_with("qwen3_5", {{"model_type", "qwen3_5_moe_text"}}),
              HasSubstr("text_config.model_type is 'qwen3_5_moe_text'"));
  EXPECT_THAT(error_with("qwen3", {{"num_experts", 8}}), HasSubstr("num_experts is 8"));
}

// Protects: a quantisation that is not read is refused from config.json alone, with the list of formats.
TEST(ModelConfig, QuantisedFixturesRefused) {
  const std::vector<std::pair<std::string, std::string>> cases = {{"refuse_gptq", "gptq"}, {"refuse_awq", "awq"}};
  for (const auto& [folder, method] : cases) {
    ASSERT_FALSE(std::filesystem::exists(kFixtures + folder + "/model.safetensors"));
    const auto config = read_config(kFixtures + folder);
    ASSERT_FALSE(config.ok()) << folder;
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(method));
    EXPECT_THAT(
        std::string(config.status().message()),
        HasSubstr(
            "Read are: safetensors in bf16, f16, f32; MLX affine 2, 3, 4, 5, 6, 8 bits in groups of 32, 64, 128"));
  }
  for (const char* method : {"compressed-tensors", "modelopt", "bitsandbytes", "hqq", "mxfp4", "gguf"}) {
    EXPECT_THAT(error_with("qwen3", {{"quantization_config", {{"quant_method", method}, {"bits", 4}}}}),
                HasSubstr(method));
  }
}

// Protects: MLX modes, widths and groups that are not read; overrides; levels that disagree.
TEST(ModelConfig, MlxQuantisation) {
  const auto config = parse(fixture("mlx_4bit"));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->quantization.of("layers.0.mlp.down_proj"), (AffineFormat{4, 64}));
  EXPECT_EQ(config->quantization.of("layers.1.mlp.down_proj"), (AffineFormat{8, 64}));
  EXPECT_EQ(config->quantization.of("language_model.model.layers.1.mlp.down_proj"), (AffineFormat{8, 64}));
  EXPECT_EQ(config->quantization.of("lm_head"), (AffineFormat{4, 64}));

  const auto with = [](std::string_view quantization) {
    return error_with("qwen3", {{"quantization", object(quantization)}});
  };
  EXPECT_EQ(with(R"({"bits":3,"group_size":32,"model.embed_tokens":false,"lm_head":true,"x.y":{"bits":8}})"),
            "no error");
  EXPECT_THAT(with(R"({"bits":7,"group_size":64})"), HasSubstr("bits 7"));
  EXPECT_THAT(with(R"({"bits":4,"group_size":16})"), HasSubstr("group_size 16"));
  EXPECT_THAT(with(R"({"bits":4,"group_size":64,"mode":"mxfp4"})"),
              HasSubstr("MLX mode mxfp4 with bits 4 and group_size 64"));
  EXPECT_THAT(with(R"({"bits":4,"group_size":64,"mode":"mxfp6"})"), HasSubstr("MLX mode \"mxfp6\""));
  EXPECT_EQ(with(R"({"bits":4,"group_size":32,"mode":"mxfp4","lm_head":{"bits":8,"group_size":64}})"), "no error");
  EXPECT_THAT(with(R"({"bits":4,"group_size":64,"lm_head":{"bits":9}})"),
              HasSubstr("'lm_head' asks for MLX affine with bits 9"));
  EXPECT_THAT(with(R"({"group_size":64})"), HasSubstr("bits absent"));
  EXPECT_THAT(with(R"({"bits":4,"group_size":64,"model.a":{"bits":8},"a":{"bits":4}})"),
              HasSubstr("names module 'a' twice"));
  EXPECT_THAT(error_with("mlx_4bit", {{"quantization_config", object(R"({"bits":8,"group_size":64})")}}),
              HasSubstr("disagree"));
  EXPECT_THAT(error_with("qwen3", {{"quantization", 4}}), HasSubstr("allowed: an object"));
}

// Protects: what the configs of FP8, modelopt, compressed-tensors and EXL3 say: formats, modules, exceptions, blocks.
TEST(ModelConfig, StoredFormats) {
  const auto read = [](std::string_view text) {
    json::object config = fixture("qwen3");
    config["quantization_config"] = object(text);
    const auto parsed = parse(config);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return parsed.ok() ? parsed->quantization : QuantizationConfig{};
  };
  const QuantizationConfig fp8 =
      read(R"({"quant_method":"fp8","weight_block_size":[128,64],"modules_to_not_convert":["lm_head"]})");
  EXPECT_EQ(fp8.kinds, std::set{StoredKind::kFp8});
  EXPECT_EQ(fp8.fp8_block, (std::pair<int64_t, int64_t>{128, 64}));
  EXPECT_TRUE(fp8.ignores("lm_head") && !fp8.ignores("model.layers.0.mlp.up_proj") && !fp8.of("lm_head"));

  const QuantizationConfig mixed = read(R"({"quant_method":"modelopt","quant_algo":"MIXED_PRECISION",
      "quantized_layers":{"model.layers.0.mlp.up_proj":{"quant_algo":"NVFP4","group_size":16},
                          "model.layers.0.self_attn.q_proj":{"quant_algo":"FP8"}},"exclude_modules":["mtp*","*.gate"]})");
  EXPECT_EQ(mixed.kinds, (std::set{StoredKind::kNvfp4, StoredKind::kFp8}));
  EXPECT_EQ(mixed.stored_kind_of("model.language_model.layers.0.mlp.up_proj"), StoredKind::kNvfp4);
  EXPECT_EQ(mixed.stored_kind_of("layers.0.self_attn.q_proj"), StoredKind::kFp8);
  EXPECT_TRUE(mixed.ignores("mtp.fc") && mixed.ignores("model.layers.3.mlp.gate") && !mixed.ignores("layers.0.gates"));

  const std::string head = R"({"quant_method":"compressed-tensors","ignore":["re:.*gate$","lm_head"],"config_groups":
      {"group_0":{"targets":["Linear","model.layers.1.mlp.up_proj"],"weights":)";
  const QuantizationConfig tensors = read(head + R"({"num_bits":4,"type":"float","group_size":16}}}})");
  EXPECT_EQ(tensors.kinds, std::set{StoredKind::kNvfp4});
  EXPECT_EQ(tensors.stored_kind_of("layers.1.mlp.up_proj"), StoredKind::kNvfp4);
  EXPECT_EQ(read(head + R"({"num_bits":8,"type":"float","strategy":"channel"}}}})").kinds, std::set{StoredKind::kFp8});
  EXPECT_EQ(read(head + R"({"num_bits":8,"type":"float","strategy":"group","group_size":32}}}})").kinds,
            std::set{StoredKind::kMxfp8});
  EXPECT_EQ(read(R"({"quant_method":"exl3","bits":3.5})").kinds, std::set{StoredKind::kExl3});
  EXPECT_NE(canonical_text(mixed), canonical_text(tensors));
}

// Protects: schemes of the same methods that are not read, by their names.
TEST(ModelConfig, StoredFormatsRefused) {
  const auto error = [](std::string_view text) { return error_with("qwen3", {{"quantization_config", object(text)}}); };
  EXPECT_THAT(error(R"({"quant_method":"fp8","weight_block_size":[0,128]})"),
              HasSubstr("weight_block_size is [0,128]"));
  EXPECT_THAT(error(R"({"quant_method":"fp8","fmt":"e5m2"})"), HasSubstr("fp8 with fmt \"e5m2\""));
  EXPECT_THAT(error(R"({"quant_method":"modelopt","quant_algo":"W4A8_AWQ"})"), HasSubstr("quant_algo \"W4A8_AWQ\""));
  EXPECT_THAT(error(R"({"quant_method":"modelopt","quant_algo":"NVFP4","group_size":32})"),
              HasSubstr("nvfp4 with group_size 32"));
  EXPECT_THAT(error(R"({"quant_method":"compressed-tensors","config_groups":{"g":{"weights":
                    {"num_bits":4,"type":"int","group_size":128,"strategy":"group"}}}})"),
              HasSubstr("weights of type \"int\", 4 bits"));
  EXPECT_THAT(error(R"({"quant_method":"compressed-tensors","format":"pack-quantized","config_groups":{}})"),
              HasSubstr("format \"pack-quantized\""));
  EXPECT_THAT(error(R"({"quant_method":"compressed-tensors","config_groups":7})"), HasSubstr("config_groups is 7"));
  EXPECT_THAT(error(R"({"quant_method":"modelopt","quant_algo":"FP8","ignore":[1]})"), HasSubstr("ignore is [1]"));
}

// Protects: broken, deep or huge JSON is an error.
TEST(ModelConfig, HostileJson) {
  EXPECT_FALSE(parse_config("", "").ok());
  EXPECT_FALSE(parse_config("[]", "").ok());
  EXPECT_FALSE(parse_config(std::string(1 << 20, '['), "").ok());
  EXPECT_FALSE(parse_config("{\"a\":" + std::string(100, '[') + std::string(100, ']') + "}", "").ok());
  const std::string llama = *read_text_file(kFixtures + "llama/config.json", kMaxConfigBytes);
  EXPECT_FALSE(parse_config(llama, "{").ok());
  EXPECT_FALSE(parse_config(llama, R"({"eos_token_id": 99999})").ok());
  EXPECT_THAT(parse_config(llama, R"({"eos_token_id": [7, 2, 3]})")->eos_token_ids, ElementsAre(2, 3, 7));
  EXPECT_FALSE(read_text_file(kFixtures + "llama/config.json", 10).ok());
}

// Protects: folders of other formats are refused for what they hold.
TEST(ModelConfig, ForeignFolders) {
  const std::string dir = ModelCopy::fresh_dir("foreign");
  EXPECT_THAT(std::string(read_config(dir).status().message()), HasSubstr("config.json"));
  std::ofstream(dir + "/m-q4_k.gguf") << "GGUF";
  EXPECT_THAT(std::string(read_config(dir).status().message()), HasSubstr("holds 'm-q4_k.gguf' and no safetensors"));
  std::filesystem::remove(dir + "/m-q4_k.gguf");
  std::filesystem::copy_file(kFixtures + "llama/config.json", dir + "/config.json");
  std::ofstream(dir + "/pytorch_model.bin") << "x";
  EXPECT_THAT(std::string(read_config(dir).status().message()), HasSubstr("pytorch_model.bin"));
  std::filesystem::remove(dir + "/pytorch_model.bin");
  EXPECT_TRUE(read_config(dir).ok());
  std::ofstream(dir + "/hf_quant_config.json") << R"({"quantization":{"quant_algo":"NVFP4"}})";
  EXPECT_EQ(read_config(dir)->quantization.kinds, std::set{StoredKind::kNvfp4});
  std::ofstream(dir + "/hf_quant_config.json") << R"({"quantization":{"quant_algo":"W4A8_AWQ"}})";
  EXPECT_THAT(std::string(read_config(dir).status().message()), HasSubstr("W4A8_AWQ"));
  std::filesystem::remove(dir + "/hf_quant_config.json");
  std::ofstream(dir + "/quant_config.json") << R"({"w_bit":4})";
  EXPECT_THAT(std::string(read_config(dir).status().message()), HasSubstr("w_bit 4"));
  EXPECT_TRUE(absl::IsNotFound(read_config(dir + "/none").status()));
  EXPECT_THAT(std::string(read_config(dir + "/x.gguf").status().message()), HasSubstr("GGUF is not read"));
}

}  // namespace
}  // namespace tensorfold
