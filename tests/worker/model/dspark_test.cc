// DSpark, the block drafter that DeepSeek's checkpoints bring along, against its float64 references, along walks with
// kept and rejected drafts, at every world; and what is refused.
#include "worker/model/dspark.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/cpu/isa.h"
#include "tests/worker/model/block_walk.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;

const DrafterChoice kOwn("", DrafterChoice::Own::kWanted);

// A fixture, how its activations are rounded, and where its reference is.
struct Case {
  std::string folder;
  std::string precision;
  std::string prefix;
  std::string markov;  // its matrices, in and out
  std::string markov_out;
};
const Case kCases[] = {
    {kFixtures + "deepseek_v4_released", "checkpoint", "dspark.", "mtp.2.markov_head.markov_w1.weight",
     "mtp.2.markov_head.markov_w2.weight"},
    {kFixtures + "deepseek_v41", "checkpoint", "dspark.", "mtp.1.markov_head.embed.weight",
     "mtp.1.markov_head.head.weight"},
    {kFixtures + "deepseek_v41", "full", "full.dspark.", "mtp.1.markov_head.embed.weight",
     "mtp.1.markov_head.head.weight"},
};

BackendOptions cpu(const std::string& precision, const std::string& isa = "auto", int threads = 1) {
  return {.backend = "cpu", .isa = isa, .threads = threads, .precision = precision};
}

// What the Markov head adds to a row's logits behind `token`.
class Markov {
 public:
  explicit Markov(const Case& c) {
    const auto file = SafetensorsFile::open(c.folder + "/model.safetensors");
    EXPECT_TRUE(file.ok()) << file.status();
    rank_ = static_cast<size_t>(file->find(c.markov)->shape[1]);
    in_ = *read_floats(*file->find(c.markov));
    out_ = *read_floats(*file->find(c.markov_out));
  }
  double bias(int64_t token, size_t id) const {
    double sum = 0;
    for (size_t k = 0; k < rank_; ++k) {
      sum +=
          static_cast<double>(in_[static_cast<size_t>(token) * rank_ + k]) * static_cast<double>(out_[id * rank_ + k]);
    }
    return sum;
  }

 private:
  size_t rank_ = 0;
  std::vector<float> in_, out_;
};

// Protects: the drafter computes what its definition says, to fp32 accuracy, whatever was kept and rejected before, in
// any chunking and any world: the logits of all rows before the Markov head, and the tokens chosen one after the other
// with it. Windows shorter than the context, and longer; both ways of mixing streams; rounded rows and plain ones.
TEST(Dspark, AgreesWithFloat64) {
  for (const Case& c : kCases) {
    const Expected expected(c.folder);
    const Markov markov(c);
    const std::vector<int64_t> ids = expected.ints("input_ids"), anchors = expected.ints(c.prefix + "anchors");
    const std::vector<int64_t> drafts = expected.ints(c.prefix + "drafts");
    const std::vector<float> logits = expected.floats(c.prefix + "logits"), base = expected.floats(c.prefix + "base");
    const size_t each = drafts.size() / anchors.size(), vocab = logits.size() / drafts.size();
    const double deviation = standard_deviation(base);
    for (const int ranks : {1, 2, 3, 4, 8}) {
      SCOPED_TRACE(fmt::format("{}, {}, {} ranks", c.folder, c.precision, ranks));
      World world(c.folder, kOwn, ranks, cpu(c.precision));
      ASSERT_NE(world.cluster, nullptr);
      ASSERT_EQ(world.shards->block_drafts(), each);
      Walk walk(world, ids, ranks == 3 ? 17 : 300);
      double worst = 0;
      for (size_t a = 0; a < anchors.size(); ++a) {
        const Block block = walk.draft_at(anchors[a]);
        ASSERT_EQ(block.drafts.size(), each);
        ASSERT_EQ(block.rows.size(), each);
        int64_t before = ids[static_cast<size_t>(anchors[a])];
        for (size_t row = 0; row < each; ++row) {
          const size_t at = a * each + row;
          ASSERT_EQ(block.rows[row].size(), vocab);
          for (size_t i = 0; i < vocab; ++i) {
            const double want = static_cast<double>(logits[at * vocab + i]) - markov.bias(before, i);
            worst = std::max(worst, std::abs(want - static_cast<double>(block.rows[row][i])));
          }
          EXPECT_EQ(block.drafts[row], drafts[at]) << "anchor " << anchors[a] << ", row " << row;
          before = drafts[at];
        }
      }
      std::printf("%s %s, %d ranks: worst logit error %.2e of the standard deviation\n", c.folder.c_str(),
                  c.precision.c_str(), ranks, worst / deviation);
      EXPECT_LT(worst / deviation, 2e-4);
    }
  }
}

// Protects: a block's bits do not depend on the world, on threads or on the instruction set: ranks of different
// machines must guess alike.
TEST(Dspark, BitsAreTheSameEverywhere) {
  for (const Case& c : kCases) {
    const std::vector<int64_t> ids = Expected(c.folder).ints("input_ids");
    std::vector<Block> first;
    for (const int ranks : {1, 3}) {
      for (const std::string& isa : available_isas()) {
        SCOPED_TRACE(fmt::format("{}, {} ranks, {}", c.folder, ranks, isa));
        World world(c.folder, kOwn, ranks, cpu(c.precision, isa, ranks == 1 ? 2 : 1));
        ASSERT_NE(world.cluster, nullptr);
        Walk walk(world, ids, 64);
        std::vector<Block> blocks;
        for (const int64_t anchor : {int64_t{2}, int64_t{65}, int64_t{80}}) blocks.push_back(walk.draft_at(anchor));
        if (first.empty()) first = blocks;
        for (size_t i = 0; i < blocks.size(); ++i) {
          EXPECT_EQ(blocks[i].drafts, first[i].drafts);
          EXPECT_EQ(blocks[i].rows, first[i].rows);
        }
      }
    }
  }
}

// Protects: what the drafter keeps of tokens goes where their pages go, as the prefix cache and files on disk move
// them: else its guesses would be poor, and no byte would show it.
TEST(Dspark, ContextMovesWithItsPages) {
  for (const Case& c : kCases) {
    const std::vector<int64_t> ids = Expected(c.folder).ints("input_ids");
    std::vector<Block> blocks;
    for (const bool moves : {false, true}) {
      World world(c.folder, kOwn, 1, cpu(c.precision));
      ASSERT_NE(world.cluster, nullptr);
      Walk walk(world, ids, 64);
      walk.draft_at(68);
      if (moves) walk.move_to_copies();
      blocks.push_back(walk.draft_at(69));
    }
    EXPECT_EQ(blocks[0].drafts, blocks[1].drafts);
    EXPECT_EQ(blocks[0].rows, blocks[1].rows);
  }
}

// Protects: the drafter changes nothing of the model: neither the hash of the checkpoint nor the logits, whether it is
// loaded or not; and without being asked for it is not loaded.
TEST(Dspark, IsReadOnlyWhereItDrafts) {
  for (const Case& c : kCases) {
    const auto without = *ModelShards::load_all(c.folder, 1, cpu(c.precision));
    const auto with = *ModelShards::load_all(c.folder, 1, cpu(c.precision), nullptr, kOwn);
    EXPECT_EQ(without->drafter(0), nullptr);
    EXPECT_EQ(without->block_drafts(), 0u);
    ASSERT_NE(with->drafter(0), nullptr);
    EXPECT_EQ(with->checkpoint_hash(), without->checkpoint_hash());
    EXPECT_EQ(with->model(0).weight_bytes(), without->model(0).weight_bytes());
    EXPECT_NE(with->drafter_hash(), "");
    EXPECT_THAT(with->notes(), ::testing::Contains(HasSubstr("block drafter of ")));
  }
  EXPECT_EQ(DrafterChoice::of_kind("auto", "").own, DrafterChoice::Own::kIfThere);
  EXPECT_EQ(DrafterChoice::of_kind("dspark", "").own, DrafterChoice::Own::kWanted);
  EXPECT_EQ(DrafterChoice::of_kind("copy", "x").folder, "");
  EXPECT_EQ(DrafterChoice::of_kind("copy", "x").own, DrafterChoice::Own::kNo);
  const auto plain =
      ModelShards::open(kFixtures + "qwen3", 1, Precision::kCheckpoint, DrafterChoice::of_kind("auto", ""));
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ((*plain)->drafter_facts(), nullptr);
}

std::string open_error(const std::string& folder) {
  const auto shards = ModelShards::load_all(folder, 1, cpu("checkpoint"), nullptr, kOwn);
  EXPECT_FALSE(shards.ok());
  return std::string(shards.status().message());
}

// Protects: what is asked for and not there is refused in the user's terms, at the start.
TEST(Dspark, RefusesWhatIsNotThere) {
  EXPECT_THAT(open_error(kFixtures + "qwen3"), HasSubstr("draft.kind dspark: this checkpoint brings no block drafter"));
  EXPECT_THAT(open_error(kFixtures + "deepseek_v4"), HasSubstr("brings no block drafter"));
  ModelCopy none = ModelCopy::of(kFixtures + "deepseek_v4_released");
  std::erase_if(none.tensors, [](const OwnedTensor& t) { return t.name.starts_with("mtp."); });
  const std::string dir = none.write("none");
  EXPECT_THAT(open_error(dir), HasSubstr("brings no block drafter"));
  EXPECT_TRUE(ModelShards::load_all(dir, 1, cpu("checkpoint"), nullptr, DrafterChoice::of_kind("auto", "")).ok());
}

// Protects: stages that are missing or too many are an error that names the key; a tensor that is missing, of another
// shape or unknown is one that names the tensor.
TEST(Dspark, RefusesOtherTensors) {
  const std::string fixture = kFixtures + "deepseek_v4_released";
  ModelCopy fewer = ModelCopy::of(fixture);
  std::erase_if(fewer.tensors, [](const OwnedTensor& t) { return t.name.starts_with("mtp.2."); });
  EXPECT_THAT(open_error(fewer.write("fewer")),
              ::testing::AllOf(HasSubstr("2 draft stages in the weights (mtp.0 to mtp.1), by config.json there are 3"),
                               HasSubstr("set n_mtp_layers")));
  for (const std::string name :
       {"mtp.0.main_proj.weight", "mtp.0.main_norm.weight", "mtp.1.attn.wkv.weight", "mtp.1.attn.attn_sink",
        "mtp.2.hc_head_fn", "mtp.2.norm.weight", "mtp.2.markov_head.markov_w2.weight", "mtp.0.ffn.gate.weight",
        "mtp.1.ffn.experts.2.w2.weight", "mtp.2.hc_ffn_base"}) {
    ModelCopy copy = ModelCopy::of(fixture);
    std::erase_if(copy.tensors, [&](const OwnedTensor& t) { return t.name == name; });
    EXPECT_THAT(open_error(copy.write("missing")), ::testing::AllOf(HasSubstr("no tensor"), HasSubstr(name)));
  }
  ModelCopy more = ModelCopy::of(fixture);
  more.tensors.push_back(more.at("norm.weight"));
  more.tensors.back().name = "mtp.1.attn.wq_a.bias";
  EXPECT_THAT(open_error(more.write("more")), HasSubstr("mtp.1.attn.wq_a.bias"));
  ModelCopy taps = ModelCopy::of(fixture);
  taps.replace_in_config("\"dspark_markov_rank\": 16", "\"dspark_markov_rank\": 8");
  EXPECT_THAT(open_error(taps.write("rank")), HasSubstr("mtp.2.markov_head.markov_w1"));
}

// Protects: keys of config.json that are not computed are refused by name, with what is allowed.
TEST(Dspark, RefusesByConfig) {
  struct Refusal {
    const char* from;
    const char* to;
    const char* says;
  };
  for (const Refusal& refusal : {
           Refusal{"\"dspark_block_size\": 5", "\"dspark_block_size\": 17", "dspark_block_size is 17"},
           Refusal{"\"dspark_noise_token_id\": 492", "\"dspark_noise_token_id\": 512", "dspark_noise_token_id is 512"},
           Refusal{"\"dspark_markov_rank\": 16", "\"dspark_markov_rank\": 0", "dspark_markov_rank is 0"},
           Refusal{"\"dspark_markov_rank\": 16", "\"dspark_markov_rank\": 16, \"dspark_markov_head_type\": \"gated\"",
                   "allowed: vanilla"},
           Refusal{"\"dspark_markov_rank\": 16", "\"dspark_markov_rank\": 16, \"draft_vocab_size\": 100",
                   "draft_vocab_size is 100; allowed: 512"},
           Refusal{"\"dspark_markov_rank\": 16", "\"dspark_markov_rank\": 16, \"dspark_num_experts_per_tok\": 5",
                   "the drafter's experts"},
           Refusal{"\"dspark_block_size\": 5", "\"dspark_block_size\": 5, \"n_mtp_layers\": 9", "n_mtp_layers is 9"},
       }) {
    SCOPED_TRACE(refusal.to);
    ModelCopy copy = ModelCopy::of(kFixtures + "deepseek_v4_released");
    copy.replace_in_config(refusal.from, refusal.to);
    const absl::StatusOr<ModelConfig> config = parse_config(copy.config, "");
    ASSERT_FALSE(config.ok());
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(refusal.says));
  }
  // Inputs of the first layer are no layer's outputs, and those of an engram layer two things.
  ModelCopy v41 = ModelCopy::of(kFixtures + "deepseek_v41");
  for (const char* layer : {"0", "5"}) {
    ModelCopy copy = v41;
    const size_t at = copy.config.find("dspark_target_layer_ids");
    ASSERT_NE(at, std::string::npos);
    const size_t first = copy.config.find('4', at);
    copy.config.replace(first, 1, layer);
    const absl::StatusOr<ModelConfig> config = parse_config(copy.config, "");
    ASSERT_FALSE(config.ok()) << layer;
    EXPECT_THAT(std::string(config.status().message()), HasSubstr("no engram"));
  }
}

class WideProducts : public CpuOps {
 public:
  WideProducts() : CpuOps(kernels_for("auto"), std::make_shared<ThreadPool>(1)) {}
  int64_t input_unit() const override { return 8; }
  std::string fingerprint_name() const override { return "wide"; }
};

// Protects: a rank that a backend's products cannot take is refused at load, with the key and both numbers.
TEST(Dspark, BackendWithWideProductsRefusesNarrowRanks) {
  WideProducts ops;
  EXPECT_TRUE(ModelShards::load_all(kFixtures + "deepseek_v4_released", 1, ops, kOwn).ok());
  ModelCopy copy = ModelCopy::of(kFixtures + "deepseek_v4_released");
  copy.replace_in_config("\"dspark_markov_rank\": 16", "\"dspark_markov_rank\": 12");
  const auto shards = ModelShards::load_all(copy.write("narrow"), 1, ops, kOwn);
  ASSERT_FALSE(shards.ok());
  EXPECT_THAT(std::string(shards.status().message()),
              HasSubstr("dspark_markov_rank is 12; backend wide computes products of multiples of 8 columns"));
}

// Protects: a world that the taps cannot be cut for is refused, naming what cannot be cut.
TEST(Dspark, WorldsItCanBeCutFor) {
  ModelConfig config = *read_config(kFixtures + "deepseek_v4_released");
  EXPECT_TRUE(dspark_shape(config, {8, 0}).ok());
  config.dspark.target_layers = {1};
  config.hidden_size = 4;
  const auto wide = dspark_shape(config, {8, 0});
  ASSERT_FALSE(wide.ok());
  EXPECT_THAT(std::string(wide.status().message()), HasSubstr("drafter's tap columns"));
}

}  // namespace
}  // namespace tensorfold
