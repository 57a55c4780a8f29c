// Lines about long prompts, on a clock that the test moves.
#include "coordinator/schedule/fill_log.h"

#include <gtest/gtest.h>

namespace tensorfold {
namespace {

// Protects: a long prompt says every five seconds how far and how fast it is read, and how long it will take; a short
// one says nothing.
TEST(FillLog, EveryFiveSecondsOfALongPrompt) {
  std::vector<std::string> lines;
  FillLog log([&](const std::string& line) { lines.push_back(line); });
  auto context = std::make_shared<RequestContext>();
  context->request.id = "cmpl-7";
  context->request.prompt.assign(10000, 3);
  context->request.max_tokens = 10;
  std::vector<std::unique_ptr<Sequence>> active;
  active.push_back(std::make_unique<Sequence>(context, 0, DraftKind::kNone, CopyOptions{}, nullptr));
  FillLog::Clock::time_point now{};
  WidthPolicy policy;
  for (int second = 0; second < 13; ++second) {
    log.update(active, now);
    SequencePlan plan;
    active[0]->plan_prompt(500, false, &plan);
    active[0]->take(plan, {}, {}, policy);
    now += std::chrono::seconds(1);
  }
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0], "cmpl-7: read 2500 of 10000 tokens, 500 tokens/s, about 15 s left");
  EXPECT_EQ(lines[1], "cmpl-7: read 5000 of 10000 tokens, 500 tokens/s, about 10 s left");
  now += std::chrono::seconds(20);
  active.clear();
  log.update(active, now);
  EXPECT_EQ(lines.size(), 2u);
}

}  // namespace
}  // namespace tensorfold
