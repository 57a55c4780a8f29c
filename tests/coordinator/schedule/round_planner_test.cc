// What a round holds, on sequences that no model computes: budgets, shares, priorities, limits.
#include "coordinator/schedule/round_planner.h"

#include <gtest/gtest.h>

#include <map>

namespace tensorfold {
namespace {

// Sequences with slots and pages, whose passes are answered by hand.
class RoundPlannerTest : public testing::Test {
 protected:
  Sequence& add(uint32_t prompt_tokens, Priority priority = Priority::kForeground, uint32_t max_tokens = 1000) {
    auto context = std::make_shared<RequestContext>();
    context->id = active_.size() + 1;
    context->request.prompt.assign(prompt_tokens, 7);
    context->request.max_tokens = max_tokens;
    context->request.sampling.temperature = 0;
    context->request.priority = priority;
    context->sink = [](GenerationEvent) {};
    auto sequence = std::make_unique<Sequence>(context, 0, DraftKind::kNone, CopyOptions{}, nullptr);
    sequence->slot = static_cast<uint32_t>(active_.size());
    for (uint32_t page = 0; page < (prompt_tokens + max_tokens) / kPageSize + 1; ++page) {
      sequence->pages.push_back(next_page_++);
    }
    active_.push_back(std::move(sequence));
    return *active_.back();
  }

  // Plans a round, answers it with token 9 for every wanted row, and tells the planner that it took
  // `row_ms` for each prompt row beside the windows. Returns the rows of each sequence.
  std::map<const Sequence*, size_t> round(RoundPlanner& planner, double row_ms) {
    const Round round = planner.plan(active_);
    std::map<const Sequence*, size_t> rows;
    for (size_t i = 0; i < round.sequences.size(); ++i) {
      const SequencePlan& plan = round.plan.sequences[i];
      rows[round.sequences[i]] = plan.tokens.size();
      std::vector<RowReport> reports(plan.wants.size());
      std::vector<std::vector<const RowReport*>> ranks(1);
      for (RowReport& report : reports) {
        report.candidates = {{1.0f, 9}};
        ranks[0].push_back(&report);
      }
      round.sequences[i]->take(plan, {}, ranks, policy_);
    }
    planner.record(round, round.window_ms + row_ms * static_cast<double>(round.prompt_rows));
    last_ = round.plan;
    return rows;
  }

  // A sequence whose prompt is read already.
  Sequence& decoding(RoundPlanner& planner) {
    Sequence& sequence = add(2);
    while (sequence.filling()) round(planner, 0.1);
    return sequence;
  }

  void window_costs(double ms) {
    for (size_t rows = 1; rows <= 64; ++rows) policy_.record_pass(rows, ms);
  }

  WidthPolicy policy_;
  std::vector<std::unique_ptr<Sequence>> active_;
  PassPlan last_;
  int32_t next_page_ = 0;
};

// Protects: beside decoding sequences the prompt rows are as many as the measured costs say fit the budget, and they
// become fewer as they become dearer.
TEST_F(RoundPlannerTest, PromptRowsFitTheBudget) {
  window_costs(2.0);
  RoundPlanner planner({.max_batch_rows = 512, .prompt_chunk = 512, .budget = std::chrono::milliseconds(20)}, policy_);
  decoding(planner);
  Sequence& prompt = add(60000);
  size_t rows = 0;
  for (int i = 0; i < 60; ++i) rows = round(planner, 0.1)[&prompt];
  EXPECT_NEAR(static_cast<double>(rows), 160, 10);  // 0.9 of 20 ms less 2 ms, at 0.1 ms a row
  for (int i = 0; i < 60; ++i) rows = round(planner, 1.0)[&prompt];
  EXPECT_NEAR(static_cast<double>(rows), 16, 2);
  for (int i = 0; i < 60; ++i) rows = round(planner, 50.0)[&prompt];
  EXPECT_EQ(rows, 8u);  // however dear: it is read on
}

// Protects: a wrong estimate costs one round little: rows grow at most twofold from rounds that kept the budget.
TEST_F(RoundPlannerTest, WrongEstimatesCostLittle) {
  window_costs(2.0);
  RoundPlanner planner({.max_batch_rows = 512, .prompt_chunk = 512, .budget = std::chrono::milliseconds(20)}, policy_);
  decoding(planner);
  for (int i = 0; i < 20; ++i) {  // short prompts whose rows look as good as free
    add(10);
    round(planner, 0.001);
  }
  Sequence& prompt = add(60000);
  EXPECT_LE(round(planner, 3.0)[&prompt], 40u);
  for (int i = 0; i < 3; ++i) EXPECT_LE(round(planner, 3.0)[&prompt], 10u);
}

// Protects: nobody's tokens wait, so a prompt may take more time, up to the chunk.
TEST_F(RoundPlannerTest, AlonePromptsTakeWholeChunks) {
  window_costs(2.0);
  RoundPlanner planner({.max_batch_rows = 512, .prompt_chunk = 200, .budget = std::chrono::milliseconds(20)}, policy_);
  Sequence& prompt = add(60000);
  size_t rows = 0;
  for (int i = 0; i < 20; ++i) rows = round(planner, 0.1)[&prompt];
  EXPECT_EQ(rows, 200u);
}

// Protects: prompts share the rows alike, whatever their lengths and however few rows fit a round.
TEST_F(RoundPlannerTest, PromptsShareFairly) {
  window_costs(2.0);
  for (const double row_ms : {0.1, 2.0}) {
    active_.clear();
    RoundPlanner planner({.max_batch_rows = 512, .prompt_chunk = 512, .budget = std::chrono::milliseconds(20)},
                         policy_);
    decoding(planner);
    std::map<const Sequence*, size_t> total;
    for (const uint32_t tokens : {50000u, 40000u, 30000u}) add(tokens);
    for (int i = 0; i < 90; ++i) {
      for (const auto& [sequence, rows] : round(planner, row_ms)) total[sequence] += rows;
    }
    const double mean =
        static_cast<double>(total[active_[1].get()] + total[active_[2].get()] + total[active_[3].get()]) / 3;
    for (size_t i = 1; i <= 3; ++i) {
      EXPECT_NEAR(static_cast<double>(total[active_[i].get()]), mean, 0.05 * mean + 32) << i << " at " << row_ms;
    }
  }
}

// Protects: a short prompt does not wait for a long one to end.
TEST_F(RoundPlannerTest, ShortPromptsPassLongOnes) {
  window_costs(2.0);
  RoundPlanner planner({.max_batch_rows = 256, .prompt_chunk = 256, .budget = std::chrono::milliseconds(20)}, policy_);
  decoding(planner);
  Sequence& longer = add(50000);
  for (int i = 0; i < 5; ++i) round(planner, 0.2);
  Sequence& shorter = add(120);
  int rounds = 0;
  while (shorter.filling() && rounds < 100) {
    round(planner, 0.2);
    ++rounds;
  }
  EXPECT_LE(rounds, 5);
  EXPECT_TRUE(longer.filling());
}

// Protects: background prompts get what foreground prompts leave, and all of it when these are read.
TEST_F(RoundPlannerTest, ForegroundPromptsComeFirst) {
  window_costs(2.0);
  RoundPlanner planner({.max_batch_rows = 64, .prompt_chunk = 64, .budget = std::chrono::milliseconds(20)}, policy_);
  decoding(planner);
  Sequence& background = add(2000, Priority::kBackground);
  Sequence& foreground = add(1000);
  while (foreground.filling()) {
    const auto rows = round(planner, 0.1);
    if (foreground.filling()) {
      EXPECT_FALSE(rows.contains(&background));
    }
  }
  EXPECT_GT(round(planner, 0.1)[&background], 30u);
}

// Protects: every decoding sequence has its row in every round, and no pass is larger than it may be.
TEST_F(RoundPlannerTest, EveryWindowEveryRound) {
  window_costs(30.0);  // over the budget already
  RoundPlanner planner({.max_batch_rows = 24, .prompt_chunk = 24, .budget = std::chrono::milliseconds(20)}, policy_);
  for (int i = 0; i < 12; ++i) decoding(planner);
  Sequence& prompt = add(500);
  for (int i = 0; i < 10; ++i) {
    const auto rows = round(planner, 0.1);
    EXPECT_EQ(rows.size(), 13u);
    EXPECT_GT(rows.at(&prompt), 0u);
    EXPECT_LE(last_.rows(), 24u);
  }
}

// Protects: a measured budget follows the passes: a few of them, and as much for prompts as for windows.
TEST_F(RoundPlannerTest, BudgetFromMeasuredPasses) {
  for (size_t rows = 1; rows <= 64; ++rows) policy_.record_pass(rows, 10.0 + static_cast<double>(rows));
  const RoundPlanner planner({.budget = std::chrono::microseconds(0)}, policy_);
  EXPECT_NEAR(planner.budget_ms(1), 66.0, 0.01);
  EXPECT_NEAR(planner.budget_ms(64), 148.0, 0.01);
}

// Protects: a plan names only the pages that its rows reach, so a prompt of a million tokens does not outgrow the
// limit of a plan, and in the end all are named once.
TEST_F(RoundPlannerTest, PlansNamePagesAsTheyAreReached) {
  window_costs(2.0);
  RoundPlanner planner({.max_batch_rows = 8192, .prompt_chunk = 8192, .budget = std::chrono::seconds(10)}, policy_);
  Sequence& prompt = add(1 << 20, Priority::kForeground, 200);
  std::vector<int32_t> told;
  while (prompt.filling()) {
    round(planner, 0.001);
    EXPECT_LT(encode_plan(last_).size(), 64u << 10);
    EXPECT_TRUE(validate_plan(last_).ok());
    told.insert(told.end(), last_.sequences[0].new_pages.begin(), last_.sequences[0].new_pages.end());
  }
  EXPECT_EQ(told.size(), (1u << 20) / 64);
  for (int i = 0; i < 70; ++i) {
    round(planner, 0.001);
    told.insert(told.end(), last_.sequences[0].new_pages.begin(), last_.sequences[0].new_pages.end());
  }
  EXPECT_EQ(told, std::vector<int32_t>(prompt.pages.begin(), prompt.pages.begin() + (1 << 20) / 64 + 2));
}

}  // namespace
}  // namespace tensorfold
