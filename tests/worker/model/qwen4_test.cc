// qwen4_exp: the hash of n-grams, other layouts of the same weights, and refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/cpu/isa.h"
#include "kernels/numerics/ngram_hash.h"
#include "tests/worker/checkpoint/model_copy.h"
#include "worker/model/ngrams.h"
#include "worker/runtime/local_cluster.h"

namespace tensorfold {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const NgramConfig kNgrams = {.layers = {1},
                             .embed_dim = 64,
                             .size = 3,
                             .heads_per_size = 4,
                             .table_base = 500,
                             .table_divisor = 128,
                             .shards = 4,
                             .seed = 1234,
                             .conv_kernel = 4,
                             .end_token = 2};

std::vector<int32_t> rows_of(const NgramHash& hash, int32_t token, const std::vector<int32_t>& before) {
  const NgramHeads& heads = hash.heads();
  std::vector<int32_t> rows;
  for (size_t head = 0; head < heads.table_rows.size(); ++head) {
    rows.push_back(ngram_row(token, static_cast<int>(heads.backs(static_cast<int64_t>(head))), heads.multipliers.data(),
                             heads.end_token, heads.table_rows[head],
                             [&](int back) { return before[static_cast<size_t>(back - 1)]; }));
  }
  return rows;
}

// Protects the tables' sizes and places: successive primes from the base on, a later layer's after an earlier one's.
TEST(NgramHash, TablesAreSuccessivePrimes) {
  const NgramHash hash(kNgrams, 512, 0);
  EXPECT_THAT(hash.table_rows(), ElementsAre(503, 509, 521, 523, 541, 547, 557, 563));
  EXPECT_THAT(hash.offsets(), ElementsAre(0, 503, 1012, 1533, 2056, 2597, 3144, 3701));
  EXPECT_EQ(hash.padded_rows(), 4352);
  EXPECT_EQ(NgramHash(kNgrams, 512, 1).table_rows().front(), 569);
}

// Protects the factors: odd, of the seed and the layer, and so small that no product of a token reaches the sign bit.
TEST(NgramHash, MultipliersAreOddAndSmall) {
  const NgramHash hash(kNgrams, 512, 0);
  for (const int64_t factor : hash.multipliers()) {
    EXPECT_EQ(factor % 2, 1);
    EXPECT_LT(factor, std::numeric_limits<int64_t>::max() / 512);
  }
  EXPECT_NE(hash.multipliers(), NgramHash(kNgrams, 512, 1).multipliers());
  NgramConfig other = kNgrams;
  other.seed = 1235;
  EXPECT_NE(hash.multipliers(), NgramHash(other, 512, 0).multipliers());
}

// Protects the mix: by definition, the xor of products modulo each table's size.
TEST(NgramHash, RowsAreTheMixOfTheLastTokens) {
  const NgramHash hash(kNgrams, 512, 0);
  const std::vector<int64_t>& m = hash.multipliers();
  const int64_t two = 7 * m[0] ^ 11 * m[1], three = two ^ 13 * m[2];
  std::vector<int32_t> want;
  for (size_t i = 0; i < 4; ++i) want.push_back(static_cast<int32_t>(two % hash.table_rows()[i]));
  for (size_t i = 4; i < 8; ++i) want.push_back(static_cast<int32_t>(three % hash.table_rows()[i]));
  EXPECT_EQ(rows_of(hash, 7, {11, 13}), want);
}

// Protects the start of a text: what was before it, or before an end token, counts as end tokens; the end token itself
// still belongs to the text that it ends.
TEST(NgramHash, EndTokensHideWhatWasBefore) {
  const NgramHash hash(kNgrams, 512, 0);
  EXPECT_EQ(rows_of(hash, 7, {-1, -1}), rows_of(hash, 7, {2, 2}));
  EXPECT_EQ(rows_of(hash, 7, {2, 13}), rows_of(hash, 7, {2, 2}));
  EXPECT_EQ(rows_of(hash, 7, {11, -1}), rows_of(hash, 7, {11, 2}));
  EXPECT_NE(rows_of(hash, 7, {11, 13}), rows_of(hash, 7, {11, 2}));
  EXPECT_NE(rows_of(hash, 2, {11, 13}), rows_of(hash, 2, {2, 2}));
}

const BackendOptions kCpu = {.backend = "cpu", .isa = "auto", .threads = 1};

std::string load_error(const std::string& dir, int world = 1) {
  const auto shards = ModelShards::load_all(dir, world, kCpu);
  return shards.ok() ? "no error" : std::string(shards.status().message());
}

// Protects: numbers of the hash that are stored beside the tables must be those that are computed; tables must be
// whole; an indexer and both sides of the streams must be there.
TEST(Qwen4Exp, ContradictionsAndGapsAreNamed) {
  ModelCopy seed = ModelCopy::of(kFixtures + "qwen4_exp");
  seed.replace_in_config("\"seed\": 1234", "\"seed\": 1235");
  EXPECT_THAT(load_error(seed.write("seed")), HasSubstr("layer_multipliers holds other numbers"));
  for (const std::string part : {"ngram_embedding.shard_2.weight", "layers.3.self_attn.indexer.k_layernorm.weight",
                                 "layers.0.mlp_hyper_connection.block_inject_weight.weight",
                                 "layers.1.ple.conv1d.weight", "mtp.hyper_connection_mixer.hc_norm.weight"}) {
    ModelCopy copy = ModelCopy::of(kFixtures + "qwen4_exp");
    std::erase_if(copy.tensors, [&](const OwnedTensor& t) { return t.name.find(part) != std::string::npos; });
    EXPECT_THAT(load_error(copy.write("missing")), AllOf(HasSubstr("no tensor"), HasSubstr(part)));
  }
}

class NoStreams : public CpuOps {
 public:
  NoStreams() : CpuOps(kernels_for("auto"), std::make_shared<ThreadPool>(1)) {}
  bool supports_gated_streams() const override { return false; }
  std::string fingerprint_name() const override { return "plain"; }
};

// Protects: a backend without the operations refuses the model at load, in a sentence.
TEST(Qwen4Exp, BackendWithoutStreamsRefuses) {
  NoStreams ops;
  const auto shards = ModelShards::load_all(kFixtures + "qwen4_exp", 1, ops);
  ASSERT_FALSE(shards.ok());
  EXPECT_EQ(std::string(shards.status().message()),
            "model_type qwen4_exp has a residual of gated streams and attention over chosen keys, which backend plain "
            "does not compute: run it with backend cpu");
}

}  // namespace
}  // namespace tensorfold
