// Model folders: single files, shards and their index, hashes, and the facts that inspect gives.
#include "worker/checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/worker/checkpoint/model_copy.h"
#include "worker/checkpoint/inspect.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

std::string error_of(const std::string& dir) {
  const auto checkpoint = Checkpoint::open(dir);
  return checkpoint.ok() ? "no error" : std::string(checkpoint.status().message());
}

// Two shards and an index that may be edited before it is written.
struct Sharded {
  std::string dir;
  std::map<std::string, std::string> map;

  explicit Sharded(const std::string& name) : dir(ModelCopy::fresh_dir(name)) {
    const ModelCopy copy = ModelCopy::of(kFixtures + "llama");
    std::ofstream(dir + "/config.json") << copy.config;
    const size_t half = copy.tensors.size() / 2;
    copy.write_part(dir + "/a.safetensors", 0, half);
    copy.write_part(dir + "/b.safetensors", half, copy.tensors.size() - half);
    for (size_t i = 0; i < copy.tensors.size(); ++i) {
      map[copy.tensors[i].name] = i < half ? "a.safetensors" : "b.safetensors";
    }
  }
  std::string error() const {
    std::ofstream out(dir + "/model.safetensors.index.json");
    out << R"({"metadata":{"total_size":1},"weight_map":{)";
    const char* comma = "";
    for (const auto& [tensor, file] : map) {
      out << comma << '"' << tensor << "\":\"" << file << '"';
      comma = ",";
    }
    out << "}}";
    out.close();
    return error_of(dir);
  }
};

// Protects: every readable fixture and the sharded demo model open.
TEST(Checkpoint, OpensFixtures) {
  for (const char* name : {"llama", "llama3_rope", "qwen3", "qwen3_5", "mlx_4bit"}) {
    const auto checkpoint = Checkpoint::open(kFixtures + name);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_FALSE((*checkpoint)->names().empty());
  }
  const auto sprout = Checkpoint::open(kSprout);
  ASSERT_TRUE(sprout.ok()) << sprout.status();
  EXPECT_EQ((*sprout)->files().size(), 2u);
  const TensorInfo* fc = (*sprout)->find("mtp.fc.weight");
  ASSERT_NE(fc, nullptr);
  EXPECT_EQ(fc->shape, (std::vector<int64_t>{256, 512}));
  EXPECT_EQ((*sprout)->find("mtp.fc"), nullptr);
}

// Protects: a config that is refused is refused before a (here: broken) weight file is looked at.
TEST(Checkpoint, ConfigDecidesBeforeWeights) {
  const std::string dir = ModelCopy::fresh_dir("before");
  fs::copy_file(kFixtures + "refuse_gptq/config.json", dir + "/config.json");
  std::ofstream(dir + "/model.safetensors") << "broken";
  EXPECT_THAT(error_of(dir), HasSubstr("gptq"));
  EXPECT_THAT(error_of(kFixtures + "refuse_awq"), HasSubstr("awq"));
}

// Protects: a folder without weights says which files were looked for.
TEST(Checkpoint, NoWeights) {
  const std::string dir = ModelCopy::fresh_dir("none");
  fs::copy_file(kFixtures + "llama/config.json", dir + "/config.json");
  EXPECT_THAT(error_of(dir), HasSubstr("neither model.safetensors nor model.safetensors.index.json"));
  std::ofstream(dir + "/other.safetensors") << "x";
  EXPECT_THAT(error_of(dir), HasSubstr("it has 'other.safetensors'"));
}

// Protects: index and shards must agree, in both directions; each disagreement is named.
TEST(Checkpoint, IndexErrors) {
  EXPECT_EQ(Sharded("good").error(), "no error");
  const std::string tensor = "model.norm.weight";

  Sharded missing("missing");
  fs::remove(missing.dir + "/b.safetensors");
  EXPECT_THAT(missing.error(), HasSubstr("1 of 2 shards are missing: 'b.safetensors'"));

  Sharded wrong_shard("wrong");
  wrong_shard.map[tensor] = "a.safetensors";
  EXPECT_THAT(wrong_shard.error(), HasSubstr("'model.norm.weight' should be in a.safetensors, which does not hold it"));

  Sharded unlisted("unlisted");
  unlisted.map.erase(tensor);
  EXPECT_THAT(unlisted.error(), HasSubstr("weight_map does not list: 'model.norm.weight'"));

  Sharded invented("invented");
  invented.map["model.more"] = "a.safetensors";
  EXPECT_THAT(invented.error(), HasSubstr("'model.more' should be in a.safetensors"));

  Sharded both("both");
  fs::copy_file(both.dir + "/a.safetensors", both.dir + "/model.safetensors");
  EXPECT_THAT(both.error(), HasSubstr("which one is meant"));
}

// Protects: the index cannot name a file outside the folder.
TEST(Checkpoint, ShardNames) {
  for (const char* name : {"../a.safetensors", "/etc/a.safetensors", "x/a.safetensors", "..", "", ".safetensors",
                           "a.bin", "x\\\\a.safetensors", "a\\u0000.safetensors"}) {
    Sharded sharded("names");
    sharded.map["model.norm.weight"] = name;
    EXPECT_THAT(sharded.error(), HasSubstr("without a path")) << name;
  }
}

// Protects: a tensor that stands in two shards is refused: which of the two would be served?
TEST(Checkpoint, TensorInTwoShards) {
  Sharded sharded("twice");
  const ModelCopy copy = ModelCopy::of(kFixtures + "llama");
  copy.write_part(sharded.dir + "/a.safetensors", 0, copy.tensors.size());
  EXPECT_THAT(sharded.error(), HasSubstr("stands in two of the files"));
}

// Protects: an index that is not one.
TEST(Checkpoint, BrokenIndex) {
  for (const char* text :
       {"", "[]", "{}", R"({"weight_map":[]})", R"({"weight_map":{}})", R"({"weight_map":{"a":1}})"}) {
    const Sharded sharded("broken");
    std::ofstream(sharded.dir + "/model.safetensors.index.json") << text;
    EXPECT_THAT(error_of(sharded.dir), HasSubstr("model.safetensors.index.json: ")) << text;
  }
}

// Protects: the content hash sees every byte, name and shape, not the split into shards or the number of threads.
TEST(Checkpoint, Hashes) {
  const Sharded sharded("hash");
  ASSERT_EQ(sharded.error(), "no error");
  const auto single = Checkpoint::open(kFixtures + "llama"), split = Checkpoint::open(sharded.dir);
  uint64_t done = 0, total = 0;
  const auto hash = (*single)->content_hash([&](uint64_t d, uint64_t t) { done = d, total = t; }, 1);
  ASSERT_TRUE(hash.ok());
  EXPECT_EQ(hash->size(), 64u);
  EXPECT_EQ(done, 853120u);
  EXPECT_EQ(total, 853120u);
  EXPECT_EQ(*hash, *(*split)->content_hash({}, 3));
  EXPECT_NE((*single)->header_hash(), (*split)->header_hash());
  EXPECT_EQ((*single)->header_hash(), (*Checkpoint::open(kFixtures + "llama"))->header_hash());

  ModelCopy copy = ModelCopy::of(kFixtures + "llama");
  copy.at("model.norm.weight").bytes[5] ^= std::byte{1};
  const auto changed = Checkpoint::open(copy.write("flip"));
  EXPECT_NE(*hash, *(*changed)->content_hash());
  ModelCopy config = ModelCopy::of(kFixtures + "llama");
  config.replace_in_config("\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 1e-05");
  EXPECT_NE((*changed)->header_hash(), (*Checkpoint::open(config.write("eps")))->header_hash());
}

// Protects: the numbers that inspect shows, against the demo model's own description.
TEST(Inspect, Sprout) {
  const auto facts = inspect(kSprout);
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_EQ(facts->family, "qwen3_5");
  EXPECT_EQ(facts->parameters, 9492832);
  EXPECT_EQ(facts->weight_bytes, 2 * 9492832);
  EXPECT_EQ(facts->file_bytes, 18998840);
  EXPECT_EQ(facts->bytes_by_format.size(), 1u);
  EXPECT_EQ(facts->bytes_by_format.at("bf16"), 2 * 9492832);
  EXPECT_EQ(facts->bytes_by_kind.at("mtp"), 2 * facts->mtp_parameters);
  EXPECT_EQ(facts->bytes_by_kind.at("embedding"), 2 * 4096 * 256);
  EXPECT_EQ(facts->bytes_by_kind.count("other"), 0u);
  EXPECT_TRUE(facts->has_mtp);
  EXPECT_TRUE(facts->tied_head);
  EXPECT_EQ(facts->linear_attention_layers, 6);
  EXPECT_EQ(facts->kv_values_per_token, 2 * 4 * 64 * 3);
  EXPECT_EQ(facts->recurrent_values_per_sequence, 6 * (8 * 64 * 64 + 1024 * 3));
}

// Protects: quantised weights are counted as the numbers they stand for; vision tensors apart.
TEST(Inspect, QuantisedAndVision) {
  const auto mlx = inspect(kFixtures + "mlx_4bit");
  ASSERT_TRUE(mlx.ok()) << mlx.status();
  // Embedding and head, two layers of q/k/v/o and MLP, norms.
  EXPECT_EQ(mlx->parameters,
            2 * 512 * 128 + 2 * (2 * 512 * 128 + 2 * 256 * 128 + 3 * 512 * 128 + 2 * 128 + 2 * 64) + 128);
  EXPECT_EQ(mlx->column_unit, 64);
  EXPECT_EQ(mlx->bytes_by_format.count("mlx affine 8-bit g64"), 1u);
  const auto vision = inspect(kFixtures + "qwen3_5");
  ASSERT_TRUE(vision.ok());
  EXPECT_EQ(vision->bytes_by_kind.at("vision"), 1320864 - 1068576);
  EXPECT_EQ(vision->bytes_by_kind.count("other"), 0u);
}

}  // namespace
}  // namespace tensorfold
