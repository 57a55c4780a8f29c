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

}  // namespace
}  // namespace tensorfold
