// Plans that contradict a rank's state are refused by name before anything is computed.
#include "worker/runtime/pass_runner.h"

#include <algorithm>

#include "tests/worker/runtime/runtime_testing.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

// Counts forward passes.
class CountingTrace : public Trace {
 public:
  int passes = 0;
  void begin_pass(std::span<const int64_t>, std::span<const uint32_t>) override { ++passes; }
  void record(int, const char*, Tensor, int64_t, int64_t) override {}
};

// One rank with two slots and four pages.
class PassRunnerTest : public ::testing::Test {
 protected:
  void load(const std::string& fixture) {
    packer_ = one_thread_ops();
    auto shards = ModelShards::load_all(kFixtureRoot + fixture, 1, *packer_);
    ASSERT_TRUE(shards.ok()) << shards.status();
    shards_ = *std::move(shards);
    ops_ = one_thread_ops();
    auto runner = PassRunner::create(*ops_, shards_->model(0), {.slots = 2, .pages = 4});
    ASSERT_TRUE(runner.ok()) << runner.status();
    runner_ = *std::move(runner);
    runner_->set_trace(&trace_);
  }

  // Refused, and nothing was computed.
  template <typename... Matchers>
  void expect_refused(const PassPlan& plan, absl::StatusCode code, const Matchers&... matchers) {
    ASSERT_TRUE(validate_plan(plan).ok()) << "the codec would have refused this: " << validate_plan(plan);
    const int before = trace_.passes;
    EXPECT_STATUS(runner_->run(plan).status(), code, matchers...);
    EXPECT_EQ(trace_.passes, before) << "a refused plan was computed";
  }

  void run(const PassPlan& plan) {
    const auto result = runner_->run(plan);
    ASSERT_TRUE(result.ok()) << result.status();
  }

  std::unique_ptr<Ops> packer_;
  std::unique_ptr<ModelShards> shards_;
  std::unique_ptr<Ops> ops_;
  std::unique_ptr<PassRunner> runner_;
  CountingTrace trace_;
};

// Protects: a lost or repeated plan is never computed on: position and state are both named.
TEST_F(PassRunnerTest, RefusesAnotherPositionThanTheStates) {
  load("llama");
  run(prompt_plan(sample_tokens(10), 2));
  expect_refused(window_plan(9, 3), kPrecondition, HasSubstr("position 9 for slot 0"), HasSubstr("its state is at 10"));
  expect_refused(window_plan(11, 3), kPrecondition, HasSubstr("position 11"), HasSubstr("state is at 10"));
  run(window_plan(10, 3, {4, 5}));
  // Of the two tentative rows one is accepted, so the next position is 12, not 11 or 13.
  expect_refused(window_plan(11, 3, {}, 1), kPrecondition, HasSubstr("position 11"), HasSubstr("state is at 12"));
  run(window_plan(12, 3, {}, 1));
}

// Protects: rows that no window had cannot be accepted.
TEST_F(PassRunnerTest, RefusesMoreAcceptedThanTheWindowHad) {
  load("llama");
  run(prompt_plan(sample_tokens(10), 2));
  expect_refused(window_plan(11, 3, {}, 1), kPrecondition, HasSubstr("accepts 1 rows of slot 0"),
                 HasSubstr("its last window had 0"));
  run(window_plan(10, 3, {4, 5}));
  expect_refused(window_plan(14, 3, {}, 3), kPrecondition, HasSubstr("accepts 3"), HasSubstr("had 2"));
}

// Protects: slots that this rank does not have or that are free are not computed on.
TEST_F(PassRunnerTest, RefusesUnknownAndFreeSlots) {
  load("llama");
  expect_refused(prompt_plan({1, 2}, 1, 0, 2), kInvalid, HasSubstr("slot 2"), HasSubstr("this rank has 2"));
  expect_refused(window_plan(0, 3), kPrecondition, HasSubstr("slot 0"), HasSubstr("free here"));
  run(prompt_plan({1, 2}, 1));
  PassPlan release;
  release.release = {0};
  run(release);
  expect_refused(window_plan(2, 3), kPrecondition, HasSubstr("slot 0"), HasSubstr("free here"));
  release.release = {1, 2};
  expect_refused(release, kInvalid, HasSubstr("releases slot 2"), HasSubstr("this rank has 2"));
}

// Protects: keys are written to pages that exist and that reach as far as the rows do.
TEST_F(PassRunnerTest, RefusesPagesOutOfRange) {
  load("llama");
  expect_refused(prompt_plan({1, 2}, 1, 4), kInvalid, HasSubstr("page 4"), HasSubstr("this rank has 4"));
  expect_refused(prompt_plan(sample_tokens(65), 1), kInvalid, HasSubstr("to position 65"),
                 HasSubstr("its 1 pages end at 64"));
  run(prompt_plan(sample_tokens(64), 1));
  expect_refused(window_plan(64, 3), kInvalid, HasSubstr("to position 65"), HasSubstr("end at 64"));
}

// Protects: ids beyond the vocabulary never index the embedding.
TEST_F(PassRunnerTest, RefusesTokensOutOfRange) {
  load("llama");
  expect_refused(prompt_plan({1, 512}, 1), kInvalid, HasSubstr("token 512"), HasSubstr("vocabulary of 512"));
  run(prompt_plan({1, 511}, 1));
}

// Protects: MTP drafts are asked only of models with an MTP layer.
TEST_F(PassRunnerTest, RefusesMtpWithoutTheLayer) {
  load("llama");
  PassPlan plan = prompt_plan({1, 2}, 1);
  plan.sequences[0].use_mtp = true;
  expect_refused(plan, kInvalid, HasSubstr("MTP layer"), HasSubstr("lacks"));
}

// Protects: rows that are to be drafted, and wanted, but from which nothing can be drafted, are never read.
TEST_F(PassRunnerTest, RefusesMtpStepsWithNothingKept) {
  load("qwen3_5");
  PassPlan fresh = prompt_plan({1, 2}, 1);
  fresh.sequences[0].use_mtp = true;
  fresh.sequences[0].mtp_steps = 2;
  fresh.sequences[0].wants = {{3, kFullRow}};
  expect_refused(fresh, kPrecondition, HasSubstr("drafts 2 tokens of slot 0"), HasSubstr("kept nothing"));
  run(prompt_plan({1, 2}, 1));  // without use_mtp: nothing is kept
  PassPlan later = window_plan(2, 3);
  later.sequences[0].use_mtp = true;
  later.sequences[0].mtp_steps = 1;
  expect_refused(later, kPrecondition, HasSubstr("drafts 1 tokens of slot 0"), HasSubstr("kept nothing"));
}

// Protects: one bad sequence refuses the pass: the good ones beside it are not computed either.
TEST_F(PassRunnerTest, OneBadSequenceStopsThePass) {
  load("qwen3_5");
  PassPlan plan = prompt_plan({1, 2}, 1, 0, 0);
  const PassPlan bad = prompt_plan({1, 600}, 1, 1, 1);
  plan.sequences.push_back(bad.sequences[0]);
  expect_refused(plan, kInvalid, HasSubstr("token 600"));
}

// Protects: after a refusal and a reset the rank computes as one that never saw the plan: same bits.
TEST_F(PassRunnerTest, ResetForgetsEverything) {
  load("qwen3_5");
  const PassPlan prompt = prompt_plan(sample_tokens(20), 1);
  const auto first = runner_->run(prompt);
  ASSERT_TRUE(first.ok()) << first.status();
  run(window_plan(20, 3, {4, 5}));
  expect_refused(window_plan(99, 3), kPrecondition, HasSubstr("position 99"));
  runner_->reset();
  expect_refused(window_plan(21, 3), kPrecondition, HasSubstr("free here"));
  const auto again = runner_->run(prompt);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(same_bits(first->rows[0].logits, again->rows[0].logits));
}

// Protects: sizes that no plan could use are refused at start, with the limits.
TEST_F(PassRunnerTest, RefusesImpossibleSizes) {
  load("llama");
  for (const RunnerOptions& options : {RunnerOptions{.slots = 0}, RunnerOptions{.slots = kMaxSlots + 1},
                                       RunnerOptions{.pages = 0}, RunnerOptions{.pages = int64_t{kMaxPages} + 1}}) {
    EXPECT_STATUS(PassRunner::create(*ops_, shards_->model(0), options).status(), kInvalid, HasSubstr("1..1024"),
                  HasSubstr("1..1048576"));
  }
}

// Protects: long prompts get the time they need, so that no fixed limit ends them.
TEST_F(PassRunnerTest, DeadlinesScaleWithRows) {
  load("llama");
  auto runner = PassRunner::create(*ops_, shards_->model(0),
                                   {.slots = 1,
                                    .pages = 1,
                                    .step_timeout = std::chrono::milliseconds(2000),
                                    .row_timeout = std::chrono::microseconds(10000)});
  ASSERT_TRUE(runner.ok()) << runner.status();
  const auto seconds = [&](uint64_t rows) {
    return std::chrono::duration<double>((*runner)->deadline_for(rows).left()).count();
  };
  EXPECT_NEAR(seconds(0), 2.0, 0.2);
  EXPECT_NEAR(seconds(100), 3.0, 0.2);
  EXPECT_NEAR(seconds(kMaxPassRows), 2.0 + 0.01 * kMaxPassRows, 0.2);
}

// Protects: candidates are those of the whole row: best first, ties to the lower id, as many as were asked for.
TEST_F(PassRunnerTest, CandidatesAreTheRowsBest) {
  load("llama");
  PassPlan plan = prompt_plan(sample_tokens(12), 1);
  plan.sequences[0].wants = {{3, 5}, {7, kFullRow}, {11, 600}};
  const auto result = runner_->run(plan);
  ASSERT_TRUE(result.ok()) << result.status();
  PassPlan whole = prompt_plan(sample_tokens(12), 1, 1, 1);
  whole.sequences[0].wants = {{3, kFullRow}, {7, kFullRow}, {11, kFullRow}};
  const auto rows = runner_->run(whole);
  ASSERT_TRUE(rows.ok()) << rows.status();
  ASSERT_EQ(result->rows.size(), 3u);
  EXPECT_EQ(result->rows[0].candidates.size(), 5u);
  EXPECT_TRUE(same_bits(result->rows[1].logits, rows->rows[1].logits));
  EXPECT_EQ(result->rows[2].candidates.size(), 512u);  // no more than the vocabulary has
  for (const size_t index : {size_t{0}, size_t{2}}) {
    const std::vector<float>& logits = rows->rows[index].logits;
    std::vector<WireCandidate> expected;
    for (size_t id = 0; id < logits.size(); ++id) expected.push_back({logits[id], static_cast<int32_t>(id)});
    std::sort(expected.begin(), expected.end(), [](const WireCandidate& a, const WireCandidate& b) {
      return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
    });
    expected.resize(result->rows[index].candidates.size());
    EXPECT_EQ(result->rows[index].candidates, expected);
  }
}

}  // namespace
}  // namespace tensorfold
