// deepseek_v41 beside its fixture: the released tables' hash, and what is refused at load.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/cpu/isa.h"
#include "tests/worker/checkpoint/model_copy.h"
#include "worker/model/engram.h"
#include "worker/runtime/shards.h"

namespace tensorfold {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

EngramConfig released() {
  EngramConfig config;
  config.layers = {1, 14};
  config.size = 4;
  config.heads_per_size = 8;
  config.head_dim = 256;
  config.table_base = 16'000'000;
  config.classes = 99092;
  return config;
}

// Protects: the released model's tables: 24 primes a layer, none twice, add up to the numbers of rows in its
// configuration.
TEST(EngramHash, ReleasedTables) {
  EXPECT_EQ(EngramHash(released(), 0).rows(), 384006168);
  EXPECT_EQ(EngramHash(released(), 1).rows(), 384016682);
  EXPECT_THAT(EngramHash(released(), 0).multipliers(),
              ElementsAre(76632096046245, 4839876093313, 35959672319349, 73987337458391));
}

// Protects: the rows of n-grams, against whole numbers without end in Python.
TEST(EngramHash, Rows) {
  std::vector<int32_t> rows(24);
  const auto some = [&](int64_t index, const std::vector<int32_t>& classes) {
    EngramHash(released(), index).rows_of(classes, rows);
    return std::vector<int32_t>{rows[0], rows[7], rows[8], rows[23]};
  };
  EXPECT_THAT(some(0, {5, 99091, 0, 7}), ElementsAre(12391924, 13214120, 4830967, 4993394));
  EXPECT_THAT(some(0, {99091, 99091, 99091, 99091}), ElementsAre(12193612, 5453576, 4501346, 7124719));
  EXPECT_THAT(some(1, {5, 99091, 0, 7}), ElementsAre(743092, 12348763, 10149304, 4687507));
  EXPECT_THAT(some(1, {99091, 99091, 99091, 99091}), ElementsAre(11374428, 13393432, 11954937, 7862307));
}

std::string load_error(const std::string& dir, Ops& ops) {
  const auto shards = ModelShards::load_all(dir, 1, ops);
  return shards.ok() ? "no error" : std::string(shards.status().message());
}

// A copy of the fixture with a change to its configuration; with its tokenizer or without.
std::string changed(const std::string& from, const std::string& to, bool tokenizer = true) {
  ModelCopy copy = ModelCopy::of(kFixtures + "deepseek_v41");
  if (!from.empty()) copy.replace_in_config(from, to);
  const std::string dir = copy.write("v41");
  if (tokenizer) std::filesystem::copy_file(kFixtures + "deepseek_v41/tokenizer.json", dir + "/tokenizer.json");
  return dir;
}

// Protects: tables that n-grams would look up wrongly are refused: no tokenizer, other classes, other table sizes.
TEST(DeepseekV41, EngramRefusals) {
  CpuOps ops(kernels_for("auto"), std::make_shared<ThreadPool>(1));
  EXPECT_EQ(load_error(changed("", ""), ops), "no error");
  EXPECT_THAT(load_error(changed("", "", false), ops), HasSubstr("tokenizer.json"));
  EXPECT_THAT(
      load_error(changed(R"("engram_compressed_vocab_size": 296)", R"("engram_compressed_vocab_size": 297)"), ops),
      HasSubstr("512 tokens in 296 classes"));
  EXPECT_THAT(load_error(changed(R"("engram_vocab_size": 50)", R"("engram_vocab_size": 60)"), ops),
              HasSubstr("a sum of primes"));
}

class NoSharedLatents : public CpuOps {
 public:
  NoSharedLatents() : CpuOps(kernels_for("auto"), std::make_shared<ThreadPool>(1)) {}
  bool supports_shared_latents() const override { return false; }
  std::string fingerprint_name() const override { return "plain"; }
};

// Protects: a backend without the operations refuses the model at load, in a sentence.
TEST(DeepseekV41, BackendWithoutSharedLatentsRefuses) {
  NoSharedLatents ops;
  EXPECT_EQ(
      load_error(kFixtures + "deepseek_v41", ops),
      "model_type deepseek_v41 has pooled rows that layers share, activations of small formats and engram tables, "
      "which backend plain does not compute: run it with backend cpu");
}

// Protects: precision is told by name, and is a part of the fingerprint.
TEST(Precision, NamesAndFingerprint) {
  EXPECT_EQ(*parse_precision("checkpoint"), Precision::kCheckpoint);
  EXPECT_EQ(*parse_precision("full"), Precision::kFull);
  EXPECT_THAT(std::string(parse_precision("half").status().message()), HasSubstr("allowed: checkpoint, full"));
  CpuOps ops(kernels_for("auto"), std::make_shared<ThreadPool>(1));
  const SlicePlan slices;
  EXPECT_NE(numeric_fingerprint(ops, slices, "precision checkpoint kv f32", "hash"),
            numeric_fingerprint(ops, slices, "precision full kv f32", "hash"));
}

// Protects: who loads or inspects the model is told that it is unproven.
TEST(DeepseekV41, SaysThatItIsUnproven) {
  const auto shards = ModelShards::open(kFixtures + "deepseek_v41", 1);
  ASSERT_TRUE(shards.ok()) << shards.status();
  EXPECT_THAT((*shards)->notes(), ::testing::Contains(HasSubstr("deepseek_v41 is unproven")));
}

}  // namespace
}  // namespace tensorfold
