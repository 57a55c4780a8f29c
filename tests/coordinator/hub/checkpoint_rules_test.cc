// What a pull knows of checkpoints: refusals by configuration, and shards that no rank reads.
#include "coordinator/commands/pull/checkpoint_rules.h"

#include <gmock/gmock.h>

#include <fstream>
#include <iterator>

namespace tensorfold {
namespace {

std::string fixture(const std::string& path) {
  std::ifstream in(std::string(TENSORFOLD_SOURCE_DIR) + "/tests/fixtures/" + path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// A world wider than the model can be cut for is refused before any weight, and so is what is not read.
TEST(PullRules, Config) {
  const std::string config = fixture("qwen3/config.json");
  ASSERT_FALSE(config.empty());
  EXPECT_TRUE(examine_config(config, "", "m", std::nullopt).ok());
  EXPECT_TRUE(examine_config(config, "", "m", PullRank{0, 1}).ok());
  EXPECT_FALSE(examine_config(config, "", "m", PullRank{0, 1000}).ok());
  EXPECT_FALSE(examine_config(R"({"model_type": "unheard_of"})", "", "m", std::nullopt).ok());
}

// Only a shard with nothing but a vision tower's tensors can be left out; one tensor of the model keeps a shard.
TEST(PullRules, Shards) {
  const absl::StatusOr<ModelConfig> config = examine_config(fixture("qwen3/config.json"), "", "m", std::nullopt);
  ASSERT_TRUE(config.ok()) << config.status();
  std::map<std::string, std::string> map = {{"model.embed_tokens.weight", "1"},
                                            {"lm_head.weight", "2"},
                                            {"model.visual.blocks.0.attn.qkv.weight", "2"},
                                            {"model.visual.patch_embed.proj.weight", "3"}};
  EXPECT_THAT(shards_of_rank(*config, map), testing::IsSupersetOf({"1"}));
  EXPECT_FALSE(shards_of_rank(*config, map).contains("3"));
  map.erase("model.embed_tokens.weight");  // no layout to be made out: the loader shall say what is wrong
  EXPECT_THAT(shards_of_rank(*config, map), testing::ElementsAre("2", "3"));
}

// The block drafter that a model brings along is fetched with it; what an older release has in its place is not.
TEST(PullRules, TheModelsOwnDrafter) {
  const std::string text = fixture("deepseek_v4_released/config.json");
  const absl::StatusOr<ModelConfig> config = examine_config(text, "", "m", std::nullopt);
  ASSERT_TRUE(config.ok()) << config.status();
  const std::map<std::string, std::string> map = {
      {"embed.weight", "1"},           {"head.weight", "1"},
      {"mtp.0.attn.wq_a.weight", "2"}, {"mtp.1.attn.wq_a.weight", "2"},
      {"mtp.2.attn.wq_a.weight", "3"}, {"mtp.2.markov_head.markov_w1.weight", "4"}};
  EXPECT_THAT(shards_of_rank(*config, map), testing::ElementsAre("1", "2", "3", "4"));
  ModelConfig older = *config;
  older.dspark = {};
  EXPECT_THAT(shards_of_rank(older, map), testing::ElementsAre("1"));
}

// Block drafters are fetched, too, and refused by their own rules before any weight.
TEST(PullRules, BlockDrafters) {
  for (const char* name : {"dflash/config.json", "dflash2/config.json"}) {
    const std::string config = fixture(name);
    EXPECT_TRUE(examine_config(config, "", "m", PullRank{1, 8}).ok()) << name;
    EXPECT_FALSE(examine_config(config, "", "m", PullRank{0, 9}).ok()) << name;
  }
  const absl::StatusOr<ModelConfig> other =
      examine_config(R"({"architectures": ["DFlash3DraftModel"], "model_type": "qwen3"})", "", "m", std::nullopt);
  ASSERT_FALSE(other.ok());
  EXPECT_THAT(std::string(other.status().message()), testing::HasSubstr("Read are: DFlashDraftModel"));
}

}  // namespace
}  // namespace tensorfold
