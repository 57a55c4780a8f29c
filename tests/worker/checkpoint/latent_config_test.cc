// config.json of families of latent attention: what is read, in each of its forms, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>

#include "tests/worker/checkpoint/model_copy.h"
#include "worker/checkpoint/json_fields.h"
#include "worker/checkpoint/model_config.h"

namespace tensorfold {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace json = boost::json;

json::object fixture(const std::string& name) {
  return *parse_json_object(*read_text_file(kFixtures + name + "/config.json", kMaxConfigBytes), name);
}

absl::StatusOr<ModelConfig> parse_with(const std::string& name, std::string_view changes) {
  json::object config = fixture(name);
  json::object& at = config.contains("text_config") ? config["text_config"].as_object() : config;
  const json::value replaced = json::parse({changes.data(), changes.size()});
  for (const auto& [key, value] : replaced.as_object()) at[key] = value;
  return parse_config(json::serialize(config), "");
}

std::string error_with(const std::string& name, std::string_view changes) {
  const auto parsed = parse_with(name, changes);
  return parsed.ok() ? "no error" : std::string(parsed.status().message());
}

// Protects: glm5_next's facts, and the original files' nested linear_attn_config and layer patterns.
TEST(LatentConfig, Glm5Next) {
  const auto config = read_config(kFixtures + "glm5_next_mtp");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, Family::kGlm5Next);
  EXPECT_THAT(config->layers,
              ElementsAre(LayerKind::kLinearAttention, LayerKind::kFullAttention, LayerKind::kFullAttention));
  EXPECT_THAT(config->mlps, ElementsAre(MlpKind::kDense, MlpKind::kExperts, MlpKind::kExperts));
  EXPECT_THAT(config->latent.shared_choice, ElementsAre(false, false, true));
  EXPECT_EQ(config->latent.index_windows, 8);
  EXPECT_EQ(config->linear.decay_floor, -5.0);
  EXPECT_EQ(config->mtp_layers, 1);
  EXPECT_FALSE(config->experts.shared_gate);
  EXPECT_TRUE(config->experts.sigmoid);
  const auto nested = parse_with(
      "glm5_next",
      R"({"linear_attn_config": {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 3, "gate_lower_bound": -2}})");
  ASSERT_TRUE(nested.ok()) << nested.status();
  EXPECT_EQ(nested->linear.value_heads, 4);
  EXPECT_EQ(nested->linear.key_dim, 32);
  EXPECT_EQ(nested->linear.conv_kernel, 3);
  EXPECT_EQ(nested->linear.decay_floor, -2.0);
  const auto plain =
      parse_with("glm5_next", R"({"layer_types": null, "mlp_layer_types": null, "indexer_types": null})");
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->layers[3], LayerKind::kFullAttention);
  EXPECT_EQ(plain->count(LayerKind::kFullAttention), 1);
  EXPECT_EQ(plain->count(MlpKind::kDense), 3);
}

// Protects: what glm5_next would compute wrongly is refused by its key.
TEST(LatentConfig, Glm5NextRefusals) {
  EXPECT_EQ(error_with("glm5_next", "{}"), "no error");
  EXPECT_THAT(error_with("glm5_next", R"({"qk_rope_head_dim": 8})"), HasSubstr("qk_rope_head_dim"));
  EXPECT_THAT(error_with("glm5_next", R"({"n_group": 4})"), HasSubstr("n_group"));
  EXPECT_THAT(error_with("glm5_next", R"({"index_kpool": 24})"), HasSubstr("index_kpool"));
  EXPECT_THAT(error_with("glm5_next", R"({"index_topk": 65})"), HasSubstr("index_topk"));
  EXPECT_THAT(error_with("glm5_next", R"({"linear_lower_bound": 0})"), HasSubstr("linear_lower_bound"));
  EXPECT_THAT(error_with("glm5_next", R"({"num_key_value_heads": 4})"), HasSubstr("num_key_value_heads"));
  EXPECT_THAT(error_with("glm5_next", R"({"index_kpool_always_select_tail": false})"), HasSubstr("select_tail"));
  EXPECT_THAT(error_with("glm5_next", R"({"layer_types": ["linear_attention"]})"), HasSubstr("layer_types"));
  EXPECT_THAT(error_with("glm5_next", R"({"indexer_types": ["full", "full", "full", "shared", "full"]})"),
              HasSubstr("indexer_types"));
  EXPECT_THAT(error_with("glm5_next", R"({"hc_mult": 9})"), HasSubstr("hc_mult"));
}

// Protects: deepseek_v4's facts, in the library's form and in the original one, whose ratios count the drafter too.
TEST(LatentConfig, DeepseekV4BothForms) {
  const auto config = read_config(kFixtures + "deepseek_v4");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->layers[0], LayerKind::kWindow);
  EXPECT_EQ(config->layers[1], LayerKind::kWindowAndPooled);
  EXPECT_EQ(config->latent.pooled_tokens, 32);
  EXPECT_TRUE(config->latent.experts_by_token[0]);
  EXPECT_FALSE(config->latent.experts_by_token[1]);
  EXPECT_EQ(config->rope.dims, 8);
  const auto original = read_config(kFixtures + "deepseek_v4_released");
  ASSERT_TRUE(original.ok()) << original.status();
  EXPECT_THAT(original->layers, ElementsAre(LayerKind::kWindow, LayerKind::kWindowAndChosen,
                                            LayerKind::kWindowAndPooled, LayerKind::kWindowAndChosen));
  EXPECT_EQ(original->latent.pooled_tokens, 128);
  EXPECT_EQ(original->rope.type, RopeType::kDefault);
  EXPECT_EQ(original->rope.theta, 10000.0);
  EXPECT_EQ(original->latent.pooled_rope.type, RopeType::kYarn);
  EXPECT_EQ(original->latent.pooled_rope.theta, 160000.0);
  EXPECT_EQ(original->mtp_layers, 0);
}

// Protects: what deepseek_v4 would compute wrongly is refused by its key.
TEST(LatentConfig, DeepseekV4Refusals) {
  EXPECT_EQ(error_with("deepseek_v4_released", "{}"), "no error");
  EXPECT_THAT(error_with("deepseek_v4_released", R"({"compress_ratios": [0, 4, 96, 4]})"),
              HasSubstr("compress_ratios"));
  EXPECT_THAT(error_with("deepseek_v4_released", R"({"compress_ratios": [0, 4]})"), HasSubstr("compress_ratios"));
  EXPECT_THAT(error_with("deepseek_v4_released", R"({"compress_rate_hca": 96})"), HasSubstr("compress"));
  EXPECT_THAT(error_with("deepseek_v4_released", R"({"num_key_value_heads": 2})"), HasSubstr("num_key_value_heads"));
  EXPECT_THAT(error_with("deepseek_v4_released", R"({"o_groups": 3})"), HasSubstr("o_groups"));
  EXPECT_THAT(error_with("deepseek_v4_released", R"({"qk_rope_head_dim": 7})"), HasSubstr("qk_rope_head_dim"));
  EXPECT_THAT(error_with("deepseek_v4_released", R"({"scoring_func": "tanh"})"), HasSubstr("scoring_func"));
  EXPECT_THAT(error_with("deepseek_v4_released", R"({"rope_scaling": {"type": "longrope"}})"), HasSubstr("longrope"));
}

// Protects: deepseek_v41's facts: which layer makes rows, which chooses, for which others; engram tables.
TEST(DeepseekV41Config, SourcesByLayer) {
  const auto config = read_config(kFixtures + "deepseek_v41");
  ASSERT_TRUE(config.ok()) << config.status();
  const SharedLatentsConfig& shared = config->shared_latents;
  EXPECT_THAT(shared.tokens, ElementsAre(0, 0, 2, 2, 1, 1, 1, 1));
  EXPECT_THAT(shared.kv_source, ElementsAre(-1, -1, 2, 2, 4, 4, 4, 4));
  EXPECT_THAT(shared.index_source, ElementsAre(-1, -1, 2, 2, 4, 4, 6, 6));
  EXPECT_EQ(shared.candidate_layer, 4);
  EXPECT_EQ(shared.candidate_blocks, 3);
  EXPECT_EQ(shared.candidate_block, 2);
  EXPECT_EQ(config->count(LayerKind::kWindow), 2);
  EXPECT_EQ(config->count(LayerKind::kWindowAndChosen), 6);
  EXPECT_EQ(config->latent.pooled_rope.type, RopeType::kYarn);
  EXPECT_EQ(config->rope.type, RopeType::kDefault);
  EXPECT_EQ(config->rms_norm_eps, 1e-20);
  EXPECT_THAT(config->engram.layers, ElementsAre(1, 5));
  EXPECT_EQ(config->engram.heads(), 8);
  EXPECT_EQ(config->mtp_layers, 0);
  EXPECT_THAT(config->quantization.kinds,
              ::testing::UnorderedElementsAre(StoredKind::kFp8, StoredKind::kMxfp4, StoredKind::kMxfp8));
}

// Protects: what deepseek_v41 would compute wrongly is refused by its key.
TEST(DeepseekV41Config, Refusals) {
  const auto refused = [](std::string_view changes) { return error_with("deepseek_v41", changes); };
  EXPECT_EQ(refused("{}"), "no error");
  EXPECT_EQ(refused(R"({"candidate_source_layer_id": -1})"), "no error");
  EXPECT_EQ(refused(R"({"engram_layer_ids": []})"), "no error");
  EXPECT_THAT(refused(R"({"compress_ratios": [0, 0, 2]})"), HasSubstr("compress_ratios"));
  EXPECT_THAT(refused(R"({"compress_ratios": [0, 0, 3, 3, 1, 1, 1, 1]})"), HasSubstr("compress_ratios"));
  EXPECT_THAT(refused(R"({"compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1]})"), HasSubstr("for layer 1"));
  EXPECT_THAT(refused(R"({"compress_ratios": [0, 0, 2, 1, 1, 1, 1, 1]})"), HasSubstr("for layer 3"));
  EXPECT_THAT(refused(R"({"compress_ratios": [0, 0, 0, 2, 1, 1, 1, 1]})"), HasSubstr("kv_source_layer_ids"));
  EXPECT_THAT(refused(R"({"kv_source_layer_ids": [4, 2]})"), HasSubstr("ascending"));
  EXPECT_THAT(refused(R"({"kv_source_layer_ids": [2, 4, 8]})"), HasSubstr("kv_source_layer_ids"));
  EXPECT_THAT(refused(R"({"index_source_layer_ids": [2, 6]})"), HasSubstr("layer 4 is not"));
  EXPECT_THAT(refused(R"({"candidate_source_layer_id": 5})"), HasSubstr("candidate_source_layer_id"));
  EXPECT_THAT(refused(R"({"candidate_source_layer_id": 2})"), HasSubstr("candidate_source_layer_id"));
  EXPECT_THAT(refused(R"({"candidate_topk_blocks": 0})"), HasSubstr("candidate_topk_blocks"));
  EXPECT_THAT(refused(R"({"engram_num_embeddings": [546]})"), HasSubstr("engram_num_embeddings"));
  EXPECT_THAT(refused(R"({"engram_pad_token_id": 512})"), HasSubstr("engram_pad_token_id"));
  EXPECT_THAT(refused(R"({"engram_compressed_vocab_size": null})"), HasSubstr("engram_compressed_vocab_size"));
  EXPECT_THAT(refused(R"({"gate_temp": 2})"), HasSubstr("gate_temp"));
  EXPECT_THAT(refused(R"({"topk_method": "greedy"})"), HasSubstr("topk_method"));
}

// Protects: the token classes are a part of what ranks must agree on.
TEST(DeepseekV41Config, ClassesAreInTheText) {
  auto config = read_config(kFixtures + "deepseek_v41");
  ASSERT_TRUE(config.ok()) << config.status();
  const std::string without = canonical_text(*config);
  config->engram.class_of = std::make_shared<const std::vector<int32_t>>(std::vector<int32_t>{0, 1, 1});
  const std::string with = canonical_text(*config);
  config->engram.class_of = std::make_shared<const std::vector<int32_t>>(std::vector<int32_t>{0, 1, 2});
  EXPECT_NE(with, without);
  EXPECT_NE(with, canonical_text(*config));
}

}  // namespace
}  // namespace tensorfold
