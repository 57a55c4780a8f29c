// Block drafters against their float64 references, along walks with kept and rejected drafts, at every world; and what
// is refused.
#include "worker/model/dflash.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/cpu/isa.h"
#include "tests/worker/checkpoint/model_copy.h"
#include "tests/worker/model/block_walk.h"
#include "worker/checkpoint/json_fields.h"
#include "worker/checkpoint/tensor_values.h"
#include "worker/runtime/local_cluster.h"
#include "worker/runtime/world_sum.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;

const BackendOptions kCpu = {.backend = "cpu", .isa = "auto", .threads = 1};
// Protects: both drafters compute what their definitions say, to fp32 accuracy, whatever was kept and rejected before,
// in any chunking and any world; and the drafts are the reference's, the selector's choices included.
TEST(Dflash, AgreesWithFloat64) {
  for (const Pair& pair : kPairs) {
    const Expected expected(pair.drafter);
    const std::vector<int64_t> ids = expected.ints("input_ids"), anchors = expected.ints("anchors");
    const std::vector<int64_t> drafts = expected.ints("drafts");
    const std::vector<float> logits = expected.floats("logits"), margin = expected.floats("margin");
    const size_t each = drafts.size() / anchors.size(), vocab = logits.size() / drafts.size();
    const double deviation = standard_deviation(logits);
    for (const int ranks : {1, 2, 3, 4, 8}) {
      SCOPED_TRACE(fmt::format("{} of {}, {} ranks", pair.drafter, pair.target, ranks));
      World world(pair, ranks, kCpu);
      ASSERT_NE(world.cluster, nullptr);
      Walk walk(world, ids, ranks == 3 ? 17 : 300);
      double worst = 0;
      int sure = 0;
      for (size_t a = 0; a < anchors.size(); ++a) {
        const Block block = walk.draft_at(anchors[a]);
        ASSERT_EQ(block.drafts.size(), each);
        for (size_t row = 0; row < each; ++row) {
          const std::vector<float>& found = block.rows[row + 1];
          ASSERT_EQ(found.size(), vocab);
          for (size_t i = 0; i < vocab; ++i) {
            const double want = logits[(a * each + row) * vocab + i];
            worst = std::max(worst, std::abs(want - static_cast<double>(found[i])));
          }
          if (margin[a * each + row] <= 1e-2f) break;  // behind it everything may be another
          EXPECT_EQ(block.drafts[row], drafts[a * each + row]) << "anchor " << anchors[a] << ", row " << row + 1;
          ++sure;
        }
      }
      std::printf("%s on %s, %d ranks: worst logit error %.2e of the standard deviation, %d sure drafts\n",
                  pair.drafter.c_str(), pair.target.c_str(), ranks, worst / deviation, sure);
      EXPECT_LT(worst / deviation, 2e-4);
      EXPECT_GT(sure, static_cast<int>(drafts.size() / 2));
    }
  }
}

// Protects: a block's bits do not depend on the world, on threads or on the instruction set: ranks of different
// machines must guess alike.
TEST(Dflash, BitsAreTheSameEverywhere) {
  for (const Pair& pair : kPairs) {
    const Expected expected(pair.drafter);
    const std::vector<int64_t> ids = expected.ints("input_ids");
    std::vector<Block> first;
    for (const int ranks : {1, 3}) {
      for (const std::string& isa : available_isas()) {
        SCOPED_TRACE(fmt::format("{}, {} ranks, {}", pair.drafter, ranks, isa));
        World world(pair, ranks, {.backend = "cpu", .isa = isa, .threads = ranks == 1 ? 2 : 1});
        ASSERT_NE(world.cluster, nullptr);
        Walk walk(world, ids, 64);
        std::vector<Block> blocks;
        for (const int64_t anchor : {int64_t{2}, int64_t{65}, int64_t{130}}) blocks.push_back(walk.draft_at(anchor));
        if (first.empty()) first = blocks;
        for (size_t i = 0; i < blocks.size(); ++i) {
          EXPECT_EQ(blocks[i].drafts, first[i].drafts);
          EXPECT_EQ(blocks[i].rows, first[i].rows);
        }
      }
    }
  }
}

// Keeps the residual as each layer leaves it.
class LastResiduals : public Trace {
 public:
  explicit LastResiduals(Ops& ops) : ops_(ops) {}
  void begin_pass(std::span<const int64_t>, std::span<const uint32_t>) override {}
  void record(int layer, const char* op, Tensor value, int64_t, int64_t) override {
    if (!std::string_view(op).ends_with(".residual")) return;
    std::vector<float> rows(static_cast<size_t>(value.rows * value.cols));
    ops_.download(value, rows);
    residuals[layer] = {std::move(rows), value.cols};
  }
  std::map<int, std::pair<std::vector<float>, int64_t>> residuals;  // by layer; columns

 private:
  Ops& ops_;
};

// Protects: every family hands out what its layers leave, in the order asked for, the mean where a residual has several
// streams; and what it hands out besides has the same bits as without.
TEST(Dflash, EveryFamilyHandsOutItsTaps) {
  for (const char* family : {"llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h",
                             "qwen4_exp", "glm5_next_mtp", "deepseek_v4", "deepseek_v41"}) {
    SCOPED_TRACE(family);
    const std::unique_ptr<Ops> ops = *make_backend(kCpu);
    auto shards = *ModelShards::load_all(kFixtures + family, 1, *ops);
    Model& model = shards->model(0);
    const ModelShape& shape = model.shape();
    ASSERT_TRUE(model.serves_drafters());
    const auto kv = ops->make_kv_cache(shape.kv_layers, 1, shape.kv_heads, shape.head_dim);
    const auto rows_cache = shape.row_layers.empty() ? nullptr : ops->make_row_cache(shape.row_layers, 1);
    const std::unique_ptr<WorldSum> sum = make_world_sum(*ops);
    LastResiduals trace(*ops);
    constexpr int64_t kRows = 11;
    const std::vector<int32_t> tokens = {9, 40, 7, 300, 12, 9, 9, 77, 41, 8, 100}, pages = {0};
    std::vector<int64_t> positions(kRows);
    std::iota(positions.begin(), positions.end(), 0);
    const RowGroup group = {.rows = kRows, .certain = kRows, .pages = pages};
    const int64_t last = shape.layers - 1;
    const std::vector<int64_t> layers = {last, 0, 1};
    std::vector<float> plain;
    for (const bool tapped : {false, true}) {
      ops->begin_pass();
      ASSERT_TRUE(sum->begin_pass(Deadline::after(std::chrono::seconds(10))).ok());
      std::vector<std::unique_ptr<RecurrentState>> states;
      std::vector<std::vector<RecurrentState*>> recurrent;
      for (const StateShape& state : shape.recurrent) {
        recurrent.push_back({states.emplace_back(ops->make_recurrent_state(state)).get()});
        states.back()->reset();
      }
      PassContext pass;
      pass.ops = ops.get();
      pass.kv = kv.get();
      pass.row_cache = rows_cache.get();
      pass.sum = sum.get();
      pass.rows = {.tokens = tokens, .positions = positions, .groups = {&group, 1}, .recurrent = recurrent};
      if (tapped) {
        pass.trace = &trace;
        pass.tap_layers = layers;
        pass.tap_width = shape.hidden;
      }
      Tensor hidden;
      ASSERT_TRUE(model.forward(pass, &hidden).ok());
      std::vector<float> rows(static_cast<size_t>(kRows * hidden.cols));
      ops->download(hidden, rows);
      if (!tapped) plain = rows;
      EXPECT_EQ(rows, plain);
      for (size_t i = 0; tapped && i < layers.size(); ++i) {
        ASSERT_TRUE(trace.residuals.contains(static_cast<int>(layers[i])));
        const auto& [residual, cols] = trace.residuals.at(static_cast<int>(layers[i]));
        const int64_t streams = cols / shape.hidden;
        std::vector<float> tap(static_cast<size_t>(kRows * shape.hidden));
        ops->download(pass.handed.columns(static_cast<int64_t>(i) * shape.hidden, shape.hidden), tap);
        for (size_t at = 0; at < tap.size(); ++at) {
          const size_t row = at / static_cast<size_t>(shape.hidden), c = at % static_cast<size_t>(shape.hidden);
          double mean = 0;
          for (int64_t s = 0; s < streams; ++s) {
            mean += static_cast<double>(
                        residual[row * static_cast<size_t>(cols) + static_cast<size_t>(s * shape.hidden) + c]) /
                    static_cast<double>(streams);
          }
          ASSERT_NEAR(static_cast<double>(tap[at]), mean, 1e-5 * (1.0 + std::abs(mean)));
        }
      }
    }
  }
}

std::string config_text(const std::string& drafter) {
  return *read_text_file(kFixtures + drafter + "/config.json", kMaxConfigBytes);
}

std::string changed(const std::string& drafter, const std::function<void(boost::json::object&)>& change) {
  boost::json::object config = boost::json::parse(config_text(drafter)).as_object();
  change(config);
  return boost::json::serialize(config);
}

struct Refusal {
  const char* key;
  boost::json::value value;
  const char* says;
  bool inside = false;  // dflash_config
};

// Protects: a drafter that is not computed here is refused by its config.json alone, naming the key and what is
// allowed.
TEST(Dflash, RefusesByConfig) {
  const std::vector<Refusal> refusals = {
      {"architectures", {"LlamaForCausalLM"}, "Read are: DFlashDraftModel, DFlash2DraftModel"},
      {"architectures", {"EagleDraftModel", "DFlashDraftModel"}, "no drafter that is read here"},
      {"model_type", "llama", "allowed: qwen3"},
      {"is_causal", true, "is_causal"},
      {"attention_bias", true, "attention_bias"},
      {"fc_layernorm", true, "fc_layernorm", true},
      {"hidden_act", "gelu", "allowed: silu"},
      {"block_size", 17, "block_size is 17"},
      {"block_size", 1, "block_size is 1"},
      {"mask_token_id", 512, "mask_token_id is 512", true},
      {"target_layer_ids", boost::json::array{}, "target_layer_ids", true},
      {"target_layer_ids", {0, 0}, "different layer numbers", true},
      {"layer_types", {"full_attention"}, "as many as num_hidden_layers"},
      {"layer_types", {"full_attention", "linear_attention"}, "allowed: full_attention, sliding_attention"},
      {"sliding_window", 8, "sliding_window is 8"},
      {"head_dim", 12, "a multiple of 8"},
      {"num_key_value_heads", 3, "a divisor of num_attention_heads"},
      {"rope_scaling", boost::json::object{{"rope_type", "longrope"}}, "longrope"},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.key);
    const std::string text = changed("dflash", [&](boost::json::object& config) {
      (refusal.inside ? config["dflash_config"].as_object() : config)[refusal.key] = refusal.value;
    });
    const absl::StatusOr<DflashConfig> config = parse_dflash_config(text);
    ASSERT_FALSE(config.ok());
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(refusal.says));
  }
  for (const char* key : {"conv_kernel", "conv_group", "selector_rank", "selector_top_k"}) {
    const absl::StatusOr<DflashConfig> config = parse_dflash_config(
        changed("dflash2", [&](boost::json::object& c) { c["dflash_config"].as_object().erase(key); }));
    ASSERT_FALSE(config.ok());
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(key));
  }
  EXPECT_TRUE(parse_dflash_config(config_text("dflash")).ok());
  EXPECT_TRUE(parse_dflash_config(config_text("dflash2")).ok());
  // The block's size may stand in either place.
  EXPECT_TRUE(parse_dflash_config(changed("dflash", [](boost::json::object& c) {
                c["dflash_config"].as_object()["block_size"] = c["block_size"];
                c.erase("block_size");
              })).ok());
}

// Protects: a drafter of another target is refused at the start, with both values, before any weight is read.
TEST(Dflash, RefusesWhatDoesNotFit) {
  const ModelConfig target = *read_config(kFixtures + "qwen3");
  const DflashConfig fits = *parse_dflash_config(config_text("dflash"));
  ASSERT_TRUE(check_dflash_fits(fits, target).ok());
  struct Misfit {
    std::function<void(DflashConfig&)> change;
    const char* says;
  };
  for (const Misfit& misfit : {
           Misfit{[](DflashConfig& c) { c.model.vocab_size = 500; }, "vocab_size: the drafter has 500, the target 512"},
           Misfit{[](DflashConfig& c) { c.model.hidden_size = 96; }, "hidden_size: the drafter has 96, the target 64"},
           Misfit{[](DflashConfig& c) { c.target_hidden = 32; },
                  "target_hidden_size: the drafter has 32, the target 64"},
           Misfit{[](DflashConfig& c) { c.stated_target_layers = 5; },
                  "num_target_layers: the drafter has 5, the target 4"},
           Misfit{[](DflashConfig& c) {
                    c.target_layers = {0, 4};
                  },
                  "target_layer_ids: the drafter has layer 4, the target layers 0 to 3"},
       }) {
    DflashConfig drafter = fits;
    misfit.change(drafter);
    const absl::Status status = check_dflash_fits(drafter, target);
    ASSERT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr(misfit.says));
  }
  const auto wrong =
      ModelShards::open(kFixtures + "follower", 1, Precision::kCheckpoint, DrafterChoice(kFixtures + "dflash"));
  ASSERT_FALSE(wrong.ok());
  EXPECT_THAT(std::string(wrong.status().message()), HasSubstr("vocab_size: the drafter has 512, the target 128"));
  const auto no_drafter =
      ModelShards::open(kFixtures + "qwen3", 1, Precision::kCheckpoint, DrafterChoice(kFixtures + "qwen3"));
  ASSERT_FALSE(no_drafter.ok());
  EXPECT_THAT(std::string(no_drafter.status().message()), HasSubstr("Read are: DFlashDraftModel"));
  const auto nowhere =
      ModelShards::open(kFixtures + "qwen3", 1, Precision::kCheckpoint, DrafterChoice(kFixtures + "nowhere"));
  EXPECT_TRUE(absl::IsNotFound(nowhere.status())) << nowhere.status();
  const auto wide = drafter_shape(fits, {16, 0});
  ASSERT_FALSE(wide.ok());
  EXPECT_THAT(std::string(wide.status().message()), HasSubstr("drafter's attention heads"));
}

std::string load_error(const std::string& drafter) {
  const auto shards = ModelShards::load_all(kFixtures + "qwen3_5", 1, kCpu, nullptr, DrafterChoice(drafter));
  EXPECT_FALSE(shards.ok());
  return std::string(shards.status().message());
}

// Protects: a drafter whose tensors are missing, of other shapes (other taps than its config says) or unknown is
// refused at load, naming the tensor.
TEST(Dflash, RefusesOtherTensors) {
  for (const std::string part :
       {"fc.weight", "hidden_norm.weight", "layers.1.self_attn.k_norm.weight", "layers.0.attention_conv.base_kernel",
        "candidate_selector.successor_codebook", "layers.1.mlp_conv.kernel_projection.weight"}) {
    ModelCopy copy = ModelCopy::of(kFixtures + "dflash2");
    std::erase_if(copy.tensors, [&](const OwnedTensor& t) { return t.name == part; });
    EXPECT_THAT(load_error(copy.write("missing")), ::testing::AllOf(HasSubstr("no tensor"), HasSubstr(part)));
  }
  ModelCopy taps = ModelCopy::of(kFixtures + "dflash2");
  taps.replace_in_config("      3,\n      0,\n", "      3,\n");
  EXPECT_THAT(load_error(taps.write("taps")),
              HasSubstr("tensor 'fc.weight' is BF16 [64, 256]; by config.json it must be"));
  ModelCopy kernel = ModelCopy::of(kFixtures + "dflash2");
  kernel.replace_in_config("\"conv_kernel\": 2", "\"conv_kernel\": 3");
  EXPECT_THAT(load_error(kernel.write("kernel")), HasSubstr("attention_conv.base_kernel"));
  ModelCopy more = ModelCopy::of(kFixtures + "dflash2");
  more.tensors.push_back(more.at("norm.weight"));
  more.tensors.back().name = "layers.0.self_attn.q_proj.bias";
  EXPECT_THAT(load_error(more.write("more")), HasSubstr("layers.0.self_attn.q_proj.bias"));
}

class NoBlocks : public CpuOps {
 public:
  NoBlocks() : CpuOps(kernels_for("auto"), std::make_shared<ThreadPool>(1)) {}
  bool supports_block_drafts() const override { return false; }
  std::string fingerprint_name() const override { return "plain"; }
};

// Protects: a backend without the operations refuses a drafter in a sentence, and runs its target without.
TEST(Dflash, BackendWithoutBlocksRefuses) {
  NoBlocks ops;
  const auto shards = ModelShards::load_all(kFixtures + "qwen3", 1, ops, DrafterChoice(kFixtures + "dflash"));
  ASSERT_FALSE(shards.ok());
  EXPECT_EQ(std::string(shards.status().message()),
            "a block drafter (draft.model) drafts blocks of rows at once, which backend plain does not compute: run it "
            "with backend cpu, or with another draft.kind");
  EXPECT_TRUE(ModelShards::load_all(kFixtures + "qwen3", 1, ops).ok());
}

class WideProducts : public CpuOps {
 public:
  WideProducts() : CpuOps(kernels_for("auto"), std::make_shared<ThreadPool>(1)) {}
  int64_t input_unit() const override { return 8; }
  std::string fingerprint_name() const override { return "wide"; }
};

// Protects: slices that a backend's products cannot begin at are refused at load, with the matrix and both numbers.
TEST(Dflash, BackendWithWideProductsRefusesNarrowSlices) {
  WideProducts ops;
  const auto shards =
      ModelShards::load_all(kFixtures + "follower", 1, ops, DrafterChoice(kFixtures + "follower_dflash"));
  ASSERT_FALSE(shards.ok());
  EXPECT_THAT(
      std::string(shards.status().message()),
      HasSubstr("mlp.down_proj: 8 slices of 2 columns; backend wide computes products of multiples of 8 columns"));
  EXPECT_TRUE(ModelShards::load_all(kPairs[0].target, 1, ops, DrafterChoice(kPairs[0].drafter)).ok());
}

// Has no memory left from the `last`th cache or state on.
class NoRoom : public CpuOps {
 public:
  explicit NoRoom(int last) : CpuOps(kernels_for("auto"), std::make_shared<ThreadPool>(1)), left_(last) {}
  std::unique_ptr<KvCache> make_kv_cache(int64_t layers, int64_t pages, int64_t kv_heads, int64_t dim) override {
    return --left_ > 0 ? CpuOps::make_kv_cache(layers, pages, kv_heads, dim) : nullptr;
  }
  std::unique_ptr<RowCache> make_row_cache(std::span<const RowCacheLayer> layers, int64_t pages) override {
    return --left_ > 0 ? CpuOps::make_row_cache(layers, pages) : nullptr;
  }
  std::unique_ptr<RecurrentState> make_recurrent_state(const StateShape& shape) override {
    return --left_ > 0 ? CpuOps::make_recurrent_state(shape) : nullptr;
  }
  std::string finish_pass() override { return "no memory left"; }

 private:
  int left_;
};

// Protects: a backend that has no room for something says so at the start, and for what, whatever it is.
TEST(Dflash, BackendWithoutRoomRefuses) {
  struct Room {
    std::string target, drafter;
    DrafterChoice::Own own;
    int last;
    const char* says;
  };
  const auto no = DrafterChoice::Own::kNo, own = DrafterChoice::Own::kWanted;
  for (const Room& room : {
           Room{kFixtures + "qwen3", kFixtures + "dflash", no, 1, "keys and values of the model"},
           Room{kFixtures + "qwen3", kFixtures + "dflash", no, 2, "keys and values of the block drafter (draft.model)"},
           Room{kFixtures + "deepseek_v4_released", "", own, 2, "keys and values of the model"},
           Room{kFixtures + "deepseek_v4_released", "", own, 3,
                "keys and values of the checkpoint's own block drafter (draft.kind: dspark)"},
           Room{kFixtures + "qwen3_5", "", no, 3, "states of 2 snapshots (cache.snapshot_bytes)"},
           Room{kFixtures + "qwen3_5", "", no, 9, "states of 16 sequences (schedule.max_sequences)"},
       }) {
    NoRoom ops(room.last);
    auto shards = *ModelShards::load_all(room.target, 1, ops, DrafterChoice(room.drafter, room.own));
    RunnerOptions options;
    options.snapshots = 2;
    const auto runner = PassRunner::create(ops, shards->model(0), options, shards->drafter(0));
    ASSERT_FALSE(runner.ok()) << room.says;
    EXPECT_EQ(std::string(runner.status().message()), std::string(room.says) + ": no memory left");
  }
}

// Protects: plans that ask for blocks which a rank cannot give are errors that say so.
TEST(Dflash, PlansMustFitTheDrafter) {
  World world(kPairs[0], 1, kCpu);
  ASSERT_NE(world.cluster, nullptr);
  PassPlan plan;
  SequencePlan& sequence = plan.sequences.emplace_back();
  sequence.fresh = sequence.use_block = true;
  sequence.tokens = {5};
  sequence.certain = 1;
  sequence.new_pages = {0};
  sequence.block_drafts = 6;
  const absl::StatusOr<PassResult> pass = world.cluster->executor().execute(plan);
  ASSERT_FALSE(pass.ok());
  EXPECT_THAT(std::string(pass.status().message()), HasSubstr("drafts 6 tokens of a block of 6"));
  auto plain = *ModelShards::load_all(kFixtures + "qwen3", 1, kCpu);
  LocalClusterOptions options;
  options.backend = kCpu;
  options.runner.slots = options.runner.pages = 1;
  auto cluster = *LocalCluster::start(*plain, options);
  sequence.block_drafts = 0;
  const absl::StatusOr<PassResult> none = cluster->executor().execute(plan);
  ASSERT_FALSE(none.ok());
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("asks for a block drafter, which this rank lacks"));
}

}  // namespace
}  // namespace tensorfold
