// Memory plans against what the backend really allocates, and what is refused.
#include "coordinator/plan/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/runtime/local_cluster.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const std::string kFixtures = std::string(TENSORFOLD_SOURCE_DIR) + "/tests/fixtures/";

struct Planned {
  Profile profile = default_profile();
  std::unique_ptr<Checkpoint> checkpoint;
  ModelFacts facts;

  explicit Planned(const std::string& fixture) {
    profile.model.path = kFixtures + fixture;
    profile.cluster.world = 1;
    profile.memory.kv_pages = 100;
    checkpoint = *Checkpoint::open(profile.model.path);
    facts = *inspect(*checkpoint);
  }
  MemoryPlan plan(int rank = 0) const { return *make_memory_plan(profile, checkpoint->config(), facts, rank); }
};

int64_t bytes_of(const MemoryPlan& plan, const std::string& name) {
  for (const MemoryItem& item : plan.items) {
    if (item.name == name) return item.bytes;
  }
  return 0;
}

// Protects: pages are planned to the byte as the runner allocates them, states but for their alignment, for dense and
// hybrid families; the weights within a tenth.
TEST(MemoryPlan, IsWhatTheRunnerAllocates) {
  for (const char* fixture : {"llama", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_next"}) {
    const Planned planned(fixture);
    const MemoryPlan plan = planned.plan();
    const std::unique_ptr<Ops> ops = *make_backend({.backend = "cpu", .isa = "auto", .threads = 1});
    auto shards = *ModelShards::load_all(planned.profile.model.path, 1, *ops);
    RunnerOptions options;
    options.slots = planned.profile.schedule.max_sequences;
    options.pages = plan.pages;
    auto runner = *PassRunner::create(*ops, shards->model(0), options);
    EXPECT_EQ(bytes_of(plan, "pages"), runner->kv_bytes()) << fixture;
    PassPlan pass;
    for (uint32_t slot = 0; slot < options.slots; ++slot) {
      SequencePlan& sequence = pass.sequences.emplace_back();
      sequence.slot = slot;
      sequence.fresh = true;
      sequence.certain = 1;
      sequence.tokens = {5};
      sequence.new_pages = {static_cast<int32_t>(slot)};
    }
    ASSERT_TRUE(runner->run(pass).ok()) << fixture;
    const ModelShape& shape = shards->model(0).shape();
    const int64_t kept =
        shape.has_mtp ? options.slots * kMaxWindow * shape.hidden * static_cast<int64_t>(sizeof(float)) : 0;
    EXPECT_NEAR(static_cast<double>(bytes_of(plan, "states")), static_cast<double>(runner->state_bytes() + kept), 4096)
        << fixture;
    const double weights = static_cast<double>(shards->model(0).weight_bytes());
    EXPECT_NEAR(static_cast<double>(bytes_of(plan, "weights")) / weights, 1.0, 0.35) << fixture;
  }
}

// Protects: weights in FP8 and FP4 are planned as backends keep them, which is not as numbers; EXL3 as numbers, of each
// backend's width.
TEST(MemoryPlan, KnowsWhatStoredFormatsTake) {
  for (const char* fixture : {"fp8_block", "fp8_tensor", "nvfp4_modelopt", "nvfp4_compressed_tensors", "exl3_mcg_4bit",
                              "deepseek_v4_quantised", "deepseek_v41"}) {
    Planned planned(fixture);
    const auto ops = *make_backend({.backend = "cpu", .isa = "auto", .threads = 1});
    const auto shards = ModelShards::load_all(planned.profile.model.path, 1, *ops);
    ASSERT_TRUE(shards.ok()) << fixture << ": " << shards.status();
    // What a pass reads: all but the table of words, which no format here has quantised.
    const auto read = static_cast<double>((*shards)->model(0).weight_bytes());
    const int64_t on_cpu = bytes_of(planned.plan(), "weights");
    const int64_t table = planned.facts.memory_by_kind.at("embedding");
    // The last two have slices and expert columns of 4 and 8, which are filled up to 16.
    const double within = std::string(fixture).starts_with("deepseek") ? 0.15 : 0.05;
    EXPECT_NEAR(static_cast<double>(on_cpu - table) / read, 1.0, within) << fixture;
    planned.profile.compute.backend = "cuda";
    const int64_t on_device = bytes_of(planned.plan(), "weights");
    if (std::string(fixture).starts_with("exl3")) {
      EXPECT_GT(on_cpu, on_device) << fixture;
    } else {  // as they are stored, too
      EXPECT_NEAR(static_cast<double>(on_device) / static_cast<double>(on_cpu), 1.0, 0.2) << fixture;
    }
  }
}

// Protects: a budget too small for the states that conversations leave is said at the start, with the one that is not.
TEST(MemoryPlan, SaysWhenSnapshotsAreFew) {
  Planned planned("qwen3_5");
  const auto note = [&] {
    const MemoryPlan plan = planned.plan();
    const auto found =
        std::find_if(plan.items.begin(), plan.items.end(), [](const auto& item) { return item.name == "snapshots"; });
    return found == plan.items.end() ? std::string("none") : found->note;
  };
  EXPECT_EQ(note().find("few"), std::string::npos) << note();
  planned.profile.cache.snapshot_bytes = 1;  // not even one
  EXPECT_NE(note().find("few: two a lane"), std::string::npos) << note();
  // The size that it names is one that a profile may have, and enough.
  const std::string said = note(), key = "cache.snapshot_bytes: ";
  const std::string size = said.substr(said.find(key) + key.size());
  EXPECT_TRUE(size.ends_with("MiB")) << said;
  planned.profile.cache.snapshot_bytes = std::stoll(size) << 20;
  EXPECT_EQ(note().find("few"), std::string::npos) << note();
  planned.profile.cache.snapshot_bytes = 0;  // as its owner wants it
  EXPECT_EQ(note(), "none");
}

// The plan is what a rank takes that loads this drafter, to the byte in its pages.
void expect_planned(const Planned& planned, const MemoryPlan& plan, const DrafterChoice& drafter) {
  const std::unique_ptr<Ops> ops = *make_backend({.backend = "cpu", .isa = "auto", .threads = 1});
  auto shards = *ModelShards::load_all(planned.profile.model.path, 1, *ops, drafter);
  RunnerOptions options;
  options.pages = plan.pages;
  auto runner = *PassRunner::create(*ops, shards->model(0), options, shards->drafter(0));
  EXPECT_EQ(bytes_of(plan, "pages"), runner->kv_bytes());
  EXPECT_EQ(plan.page_bytes, runner->page_bytes());
  EXPECT_GE(bytes_of(plan, "drafter"), shards->drafter(0)->weight_bytes());
}

// Protects: a block drafter's keys are planned to the byte, in every page, and its weights and taps have a line; where
// nothing would use it, it costs nothing.
TEST(MemoryPlan, CountsABlockDrafter) {
  Planned planned("qwen3_5");
  const MemoryPlan plain = planned.plan();
  planned.profile.draft.model = kFixtures + "dflash2";
  for (const char* kind : {"dflash", "auto"}) {
    planned.profile.draft.kind = kind;
    const MemoryPlan plan = planned.plan();
    expect_planned(planned, plan, DrafterChoice(planned.profile.draft.model));
    EXPECT_GT(plan.page_bytes, plain.page_bytes) << kind;
  }
  // In the format of the model's own keys; blocks and context rows are kept launches, too.
  planned.profile.compute.backend = "cuda";
  const MemoryPlan drafting = planned.plan();
  planned.profile.draft.kind = "copy";
  const int64_t keys_and_values = 2 * kPageTokens * 2 * 4 * 32;  // layers, heads, values of a head (8, kept as 32)
  EXPECT_EQ(drafting.page_bytes - planned.plan().page_bytes, keys_and_values * 2);  // bf16
  EXPECT_GT(bytes_of(drafting, "kept launches"), bytes_of(planned.plan(), "kept launches"));
  planned.profile.compute.backend = "cpu";
  EXPECT_EQ(planned.plan().page_bytes, plain.page_bytes);
  EXPECT_EQ(bytes_of(planned.plan(), "drafter"), 0);
  // As many bytes hold fewer pages.
  planned.profile.memory.kv_pages = 0;
  const int64_t without = planned.plan().pages;
  planned.profile.draft.kind = "dflash";
  EXPECT_LT(planned.plan().pages, without);
  planned.profile.draft.model = kFixtures + "qwen3";
  const auto refused = make_memory_plan(planned.profile, planned.checkpoint->config(), planned.facts, 0);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("DFlashDraftModel"));
}

// Protects: the same of the drafter that a model brings along, where it would be used; and a plan that does not fit
// says that it can be left out.
TEST(MemoryPlan, CountsTheModelsOwnDrafter) {
  for (const char* fixture : {"deepseek_v4_released", "deepseek_v41"}) {
    Planned planned(fixture);
    planned.profile.draft.kind = "copy";
    const MemoryPlan plain = planned.plan();
    EXPECT_EQ(bytes_of(plain, "drafter"), 0);
    for (const char* kind : {"dspark", "auto"}) {
      planned.profile.draft.kind = kind;
      const MemoryPlan plan = planned.plan();
      expect_planned(planned, plan, DrafterChoice::of_kind(kind, ""));
      EXPECT_GT(plan.page_bytes, plain.page_bytes) << kind;
      EXPECT_EQ(bytes_of(plan, "weights"), bytes_of(plain, "weights")) << kind;
      EXPECT_THAT(std::string(check_memory_plan(plan, planned.profile, 1).message()), HasSubstr("draft.kind"));
    }
    EXPECT_THAT(std::string(check_memory_plan(plain, planned.profile, 1).message()), Not(HasSubstr("draft.kind")));
  }
}

// Protects: every rank has the same pages, and ranks of a world together hold what one rank does, but for what is whole
// on each.
TEST(MemoryPlan, RanksShare) {
  Planned planned("qwen3");
  const MemoryPlan one = planned.plan();
  planned.profile.cluster.world = 2;
  const MemoryPlan first = planned.plan(0);
  const MemoryPlan second = planned.plan(1);
  EXPECT_EQ(first.pages, second.pages);
  EXPECT_LT(bytes_of(first, "weights"), bytes_of(one, "weights"));
  EXPECT_EQ(bytes_of(first, "pages") + bytes_of(second, "pages"), bytes_of(one, "pages"));
  EXPECT_EQ(bytes_of(second, "tokens"), 0);
  EXPECT_FALSE(make_memory_plan(planned.profile, planned.checkpoint->config(), planned.facts, 2).ok());
}

// Protects: what does not fit is refused with both numbers, and a context that the pool cannot hold, too.
TEST(MemoryPlan, RefusesWhatDoesNotFit) {
  Planned planned("qwen3");
  planned.profile.memory.floor_free = 1 << 20;
  const MemoryPlan plan = planned.plan();
  EXPECT_TRUE(check_memory_plan(plan, planned.profile, plan.total() + (1 << 20)).ok());
  EXPECT_TRUE(check_memory_plan(plan, planned.profile, -1).ok());
  const absl::Status status = check_memory_plan(plan, planned.profile, plan.total() + (1 << 20) - 1);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr(human_bytes(plan.total())));
  planned.profile.model.context_length = 100 * 64;
  const absl::Status context = check_memory_plan(planned.plan(), planned.profile, -1);
  EXPECT_TRUE(absl::IsResourceExhausted(context));
  EXPECT_THAT(std::string(context.message()), HasSubstr("6400 tokens, but the pool's 100 pages hold 6384"));
  planned.profile.model.context_length = 100 * 64 - kMaxWindow;
  EXPECT_TRUE(check_memory_plan(planned.plan(), planned.profile, -1).ok());
}

// Protects: a pool smaller than a page is an error; sizes come from kv_bytes where pages are not said; a million tokens
// are 16,384 pages.
TEST(MemoryPlan, PagesFromBytes) {
  Planned planned("qwen3");
  planned.profile.memory.kv_pages = 0;
  const int64_t page = page_bytes(planned.profile, *model_shape(planned.checkpoint->config(), {1, 0}));
  planned.profile.memory.kv_bytes = page - 1;
  EXPECT_FALSE(planned_pages(planned.profile, planned.checkpoint->config()).ok());
  planned.profile.memory.kv_bytes = 16384 * page + 5;
  EXPECT_EQ(*planned_pages(planned.profile, planned.checkpoint->config()), 16384);
  planned.profile.model.context_length = 1 << 20;
  EXPECT_EQ(planned.plan().tokens_each(1), (1 << 20) - kMaxWindow);
  EXPECT_EQ(planned.plan().tokens_each(4), (1 << 18) - kMaxWindow);
}

// Protects: the table names every item, the total and the contexts.
TEST(MemoryPlan, Text) {
  const Planned planned("qwen3_5");
  const std::string text = memory_plan_text(planned.plan());
  for (const char* part : {"weights", "pages", "states", "scratch", "tokens", "program", "total", "1 x ", "8 x "}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

}  // namespace
}  // namespace tensorfold
