// How a model is cut into slices and what each rank of a world gets, from configurations alone.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "worker/model/families.h"

namespace tensorfold {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kSource = TENSORFOLD_SOURCE_DIR;

std::vector<std::string> model_folders() {
  std::vector<std::string> folders = {kSource + "/deploy/models/sprout"};
  for (const char* name : {"llama", "llama3_rope", "qwen3", "qwen3_5", "mlx_4bit"}) {
    folders.push_back(kSource + "/tests/fixtures/" + name);
  }
  return folders;
}

int64_t slices_of(const ModelShape& shape, const std::string& name) {
  for (const SlicePlan::Dimension& dimension : shape.slices.dimensions) {
    if (dimension.name == name) return dimension.slices;
  }
  ADD_FAILURE() << "no dimension \"" << name << "\" in " << shape.slices.text();
  return 0;
}

// A llama of 8 heads of 32, MLP 256, vocabulary 512, with what a test changes.
struct Llama {
  int64_t heads = 8;
  int64_t kv_heads = 4;
  int64_t head_dim = 32;
  int64_t intermediate = 256;
  int64_t vocab = 512;
  std::string more = {};  // further fields, each with a comma before it

  ModelConfig config() const {
    const std::string json = fmt::format(
        R"({{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": 128,
             "num_attention_heads": {}, "num_key_value_heads": {}, "head_dim": {}, "intermediate_size": {},
             "vocab_size": {}, "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096,
             "hidden_act": "silu", "rope_parameters": {{"rope_theta": 10000.0, "rope_type": "default"}},
             "tie_word_embeddings": true{}}})",
        heads, kv_heads, head_dim, intermediate, vocab, more);
    auto parsed = parse_config(json, "");
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return parsed.ok() ? *parsed : ModelConfig();
  }
  ModelShape shape(ShardSpec shard = {}) const {
    auto shape = model_shape(config(), shard);
    EXPECT_TRUE(shape.ok()) << shape.status();
    return shape.ok() ? *shape : ModelShape();
  }
};

std::string groups_of(int group, int bits = 4) {
  return fmt::format(R"(, "quantization": {{"group_size": {}, "bits": {}}})", group, bits);
}

// Protects: every unit of every cut dimension belongs to exactly one rank, in order, as evenly as possible.
TEST(Slicing, RanksShareEverythingOnce) {
  for (const std::string& folder : model_folders()) {
    SCOPED_TRACE(folder);
    const auto config = read_config(folder);
    ASSERT_TRUE(config.ok()) << config.status();
    const auto alone = model_shape(*config, {});
    ASSERT_TRUE(alone.ok()) << alone.status();
    for (const SlicePlan::Dimension& dimension : alone->slices.dimensions) {
      EXPECT_EQ(dimension.units % dimension.slices, 0) << dimension.name;
      for (int world = 1; world <= dimension.slices; ++world) {
        int64_t next = 0;
        int64_t fewest = dimension.slices;
        int64_t most = 0;
        for (int rank = 0; rank < world; ++rank) {
          const Cut cut = make_cut({dimension.units, dimension.slices}, {world, rank});
          EXPECT_EQ(cut.first_unit(), next) << dimension.name << ", rank " << rank << " of " << world;
          next = cut.first_unit() + cut.unit_count();
          fewest = std::min(fewest, cut.owned.count);
          most = std::max(most, cut.owned.count);
        }
        EXPECT_EQ(next, dimension.units) << dimension.name;
        EXPECT_LE(most - fewest, 1) << dimension.name;
      }
    }
  }
}

// Protects: S is a fact of the model: every rank of every world has the same slice plan.
TEST(Slicing, ThePlanNeverReadsTheCluster) {
  for (const std::string& folder : model_folders()) {
    SCOPED_TRACE(folder);
    const auto config = read_config(folder);
    ASSERT_TRUE(config.ok()) << config.status();
    const std::string plan = model_shape(*config, {})->slices.text();
    const int64_t widest = model_shape(*config, {})->slices.widest_world();
    EXPECT_EQ(widest, 8) << plan;
    for (int world = 1; world <= widest; ++world) {
      for (int rank = 0; rank < world; ++rank) {
        const auto shape = model_shape(*config, {world, rank});
        ASSERT_TRUE(shape.ok()) << shape.status();
        EXPECT_EQ(shape->slices.text(), plan);
      }
    }
  }
}

// Protects: the shapes of all ranks together are the model: vocabulary rows once, key/value heads where query heads
// need them, linear attention heads once with the right key heads.
TEST(Slicing, ShapesOfAllRanksAreTheModel) {
  for (const std::string& folder : model_folders()) {
    SCOPED_TRACE(folder);
    const auto config = read_config(folder);
    ASSERT_TRUE(config.ok()) << config.status();
    for (int world = 1; world <= 8; ++world) {
      SCOPED_TRACE(world);
      int64_t vocabulary = 0;
      int64_t v_heads = 0;
      int64_t first_head = 0;
      for (int rank = 0; rank < world; ++rank) {
        const auto shape = model_shape(*config, {world, rank});
        ASSERT_TRUE(shape.ok()) << shape.status();
        EXPECT_EQ(shape->first_vocab_id, vocabulary);
        vocabulary += shape->local_vocab;
        // Query heads of this rank, and the key/value heads that they read.
        const int64_t heads = make_cut(head_slices(*config), {world, rank}).unit_count();
        std::set<int64_t> needed;
        for (int64_t head = first_head; head < first_head + heads; ++head) {
          needed.insert(head / (config->heads / config->kv_heads));
        }
        first_head += heads;
        EXPECT_EQ(shape->kv_heads, static_cast<int64_t>(needed.size()));
        EXPECT_EQ(shape->recurrent.size(), static_cast<size_t>(config->count(LayerKind::kLinearAttention)));
        EXPECT_EQ(shape->kv_layers, config->count(LayerKind::kFullAttention) + (shape->has_mtp ? 1 : 0));
        if (shape->recurrent.empty()) continue;
        const DeltaNetShape& linear = std::get<DeltaNetShape>(shape->recurrent[0]);
        const int64_t group = config->linear.value_heads / config->linear.key_heads;
        ASSERT_EQ(linear.k_head_of.size(), static_cast<size_t>(linear.v_heads));
        const int64_t first_k = v_heads / group;
        for (int64_t v = 0; v < linear.v_heads; ++v) {
          EXPECT_EQ(linear.k_head_of[static_cast<size_t>(v)], (v_heads + v) / group - first_k);
          EXPECT_LT(linear.k_head_of[static_cast<size_t>(v)], linear.k_heads);
        }
        EXPECT_EQ(linear.k_head_of.back() + 1, linear.k_heads) << "a key head that no value head reads";
        v_heads += linear.v_heads;
      }
      EXPECT_EQ(vocabulary, config->vocab_size);
      EXPECT_EQ(first_head, config->heads);
      EXPECT_EQ(v_heads, config->count(LayerKind::kLinearAttention) > 0 ? config->linear.value_heads : 0);
    }
  }
}

// Protects: key/value heads are copied to each rank that reads them, and only there.
TEST(Slicing, KeyValueHeadsAreReplicatedAsNeeded) {
  const auto counts = [](const Llama& llama, int world) {
    std::vector<int64_t> counts;
    for (int rank = 0; rank < world; ++rank) counts.push_back(llama.shape({world, rank}).kv_heads);
    return counts;
  };
  // 8 heads on 4 key/value heads, two each.
  EXPECT_EQ(counts({}, 1), (std::vector<int64_t>{4}));
  EXPECT_EQ(counts({}, 2), (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(counts({}, 3), (std::vector<int64_t>{2, 2, 1}));  // heads 0-2, 3-5, 6-7
  EXPECT_EQ(counts({}, 4), (std::vector<int64_t>{1, 1, 1, 1}));
  EXPECT_EQ(counts({}, 8), (std::vector<int64_t>(8, 1)));  // each of the four on two ranks
  EXPECT_EQ(counts({.heads = 8, .kv_heads = 1}, 8), (std::vector<int64_t>(8, 1)));
  EXPECT_EQ(counts({.heads = 8, .kv_heads = 8}, 3), (std::vector<int64_t>{3, 3, 2}));
  EXPECT_EQ(counts({.heads = 32, .kv_heads = 2}, 3), (std::vector<int64_t>{1, 2, 1}));  // 12, 12, 8 heads; 16 a group
  EXPECT_EQ(kv_share({.heads = 32, .kv_heads = 2, .slices = make_slices(32)}, make_cut(make_slices(32), {3, 2})).first,
            1);
}

// Protects: a dimension is cut into 8, or the largest power of two that its units divide by.
TEST(Slicing, SIsTheLargestPowerOfTwoThatDivides) {
  const std::map<int64_t, int64_t> heads = {{8, 8}, {16, 8}, {24, 8}, {12, 4}, {20, 4},
                                            {6, 2}, {14, 2}, {7, 1},  {1, 1}};
  for (const auto& [count, expected] : heads) {
    EXPECT_EQ(slices_of(Llama{.heads = count, .kv_heads = 1}.shape(), "attention heads"), expected) << count;
  }
  EXPECT_EQ(slices_of(Llama{.intermediate = 260}.shape(), "mlp columns"), 4);
  EXPECT_EQ(slices_of(Llama{.vocab = 50257}.shape(), "vocabulary rows"), 1);
  EXPECT_EQ(slices_of(Llama{.vocab = 32002}.shape(), "vocabulary rows"), 2);
}

// Protects: a slice of a quantised matrix ends where a quantisation group ends.
TEST(Slicing, SlicesEndOnQuantisationGroups) {
  // 640 columns in groups of 32 are 20 units: four slices of five.
  const ModelShape shape = Llama{.intermediate = 640, .more = groups_of(32)}.shape();
  EXPECT_EQ(slices_of(shape, "mlp column groups"), 4);
  EXPECT_EQ(shape.slices.widest_world(), 4);
  EXPECT_EQ(slices_of(Llama{.intermediate = 640}.shape(), "mlp columns"), 8) << "the same without groups";
  EXPECT_EQ(slices_of(Llama{.intermediate = 640, .more = groups_of(64)}.shape(), "mlp column groups"), 2);
  EXPECT_EQ(slices_of(Llama{.intermediate = 640, .more = groups_of(128)}.shape(), "mlp column groups"), 1);
  // 8 heads of 32: groups of 64 hold two heads, groups of 128 four.
  EXPECT_EQ(slices_of(Llama{.more = groups_of(32)}.shape(), "attention heads"), 8);
  EXPECT_EQ(slices_of(Llama{.more = groups_of(64)}.shape(), "attention heads"), 4);
  EXPECT_EQ(slices_of(Llama{.more = groups_of(128)}.shape(), "attention heads"), 2);
  // Heads of 64 on groups of 64: none is cut.
  EXPECT_EQ(slices_of(Llama{.head_dim = 64, .more = groups_of(64)}.shape(), "attention heads"), 8);
  // One module with larger groups decides for all layers; a module without quantisation needs no group.
  const std::string mixed =
      R"(, "quantization": {"group_size": 32, "bits": 4,
          "model.layers.1.mlp.down_proj": {"group_size": 128, "bits": 8},
          "model.layers.0.self_attn.o_proj": false, "model.layers.1.self_attn.o_proj": false})";
  EXPECT_EQ(slices_of(Llama{.intermediate = 512, .more = mixed}.shape(), "mlp column groups"), 4);
  EXPECT_EQ(slices_of(Llama{.more = mixed}.shape(), "attention heads"), 8);
}

// Protects: every slice's columns are whole groups, for any size, head and group.
TEST(Slicing, CutDimensionKeepsColumnUnits) {
  for (int64_t units = 1; units <= 64; ++units) {
    for (const int64_t unit_columns : {1, 16, 32, 64, 96, 128}) {
      for (const int64_t column_unit : {1, 32, 64, 128}) {
        const Slices slices = cut_dimension(units, unit_columns, column_unit);
        EXPECT_EQ(slices.units, units);
        EXPECT_EQ(units % slices.count, 0);
        EXPECT_TRUE(slices.count == 1 || slices.units_per_slice() * unit_columns % column_unit == 0)
            << units << " units of " << unit_columns << " columns in groups of " << column_unit;
        // And none larger would do.
        const int64_t twice = slices.count * 2;
        EXPECT_TRUE(twice > kMaxSlices || units % twice != 0 || units / twice * unit_columns % column_unit != 0);
      }
    }
  }
}

// Protects: columns that no group divides are refused by name and numbers.
TEST(Slicing, RefusesColumnsThatNoGroupDivides) {
  const auto shape = model_shape(Llama{.intermediate = 624, .more = groups_of(32)}.config(), {});
  ASSERT_FALSE(shape.ok());
  EXPECT_THAT(std::string(shape.status().message()),
              AllOf(HasSubstr("intermediate_size 624"), HasSubstr("quantisation group of 32")));
}

// Protects: a world wider than the smallest S is refused, naming the dimension, its units and the widest world.
TEST(Slicing, RefusesWiderWorldsByDimension) {
  struct Wide {
    Llama llama;
    int world;
    const char* dimension;
    const char* widest;
  };
  const Wide cases[] = {
      {{.heads = 6, .kv_heads = 2}, 3, "its 6 attention heads cut into 2 slices", "widest world is 2"},
      {{.heads = 7, .kv_heads = 1}, 2, "its 7 attention heads cut into 1 slice,", "widest world is 1"},
      {{.intermediate = 640, .more = groups_of(32)}, 5, "its 20 mlp column groups cut into 4 slices", "world is 4"},
      {{.intermediate = 260}, 8, "its 260 mlp columns cut into 4 slices", "widest world is 4"},
      {{.vocab = 510}, 3, "its 510 vocabulary rows cut into 2 slices", "widest world is 2"},
  };
  for (const Wide& wide : cases) {
    SCOPED_TRACE(wide.dimension);
    const auto shape = model_shape(wide.llama.config(), {wide.world, 0});
    ASSERT_FALSE(shape.ok());
    EXPECT_EQ(shape.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(shape.status().message()),
                AllOf(HasSubstr(fmt::format("{} ranks are too many", wide.world)), HasSubstr(wide.dimension),
                      HasSubstr(wide.widest)));
    EXPECT_TRUE(model_shape(wide.llama.config(), {1, 0}).ok());
  }
}

// Protects: linear attention heads limit the world too, and are named.
TEST(Slicing, LinearAttentionHeadsLimitTheWorld) {
  auto config = read_config(kSource + "/tests/fixtures/qwen3_5");
  ASSERT_TRUE(config.ok()) << config.status();
  config->linear.value_heads = 12;
  EXPECT_EQ(model_shape(*config, {})->slices.widest_world(), 4);
  const auto wide = model_shape(*config, {5, 0});
  ASSERT_FALSE(wide.ok());
  EXPECT_THAT(std::string(wide.status().message()), HasSubstr("its 12 linear attention heads cut into 4 slices"));
}

// Protects: no rank outside its world, and no world of none or more than 8.
TEST(Slicing, RefusesImpossibleRanks) {
  const ModelConfig config = Llama().config();
  for (const ShardSpec shard :
       {ShardSpec{0, 0}, ShardSpec{9, 0}, ShardSpec{2, 2}, ShardSpec{2, -1}, ShardSpec{-1, 0}}) {
    const auto shape = model_shape(config, shard);
    ASSERT_FALSE(shape.ok());
    EXPECT_THAT(std::string(shape.status().message()),
                AllOf(HasSubstr(fmt::format("rank {} of {}", shard.rank, shard.world)), HasSubstr("1 to 8 ranks")));
  }
}

}  // namespace
}  // namespace tensorfold
