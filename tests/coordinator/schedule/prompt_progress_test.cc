// How far a prompt has been read: what is said, when, and never nonsense.
#include "coordinator/schedule/prompt_progress.h"

#include <gtest/gtest.h>

namespace tensorfold {
namespace {

using std::chrono::milliseconds;
using Clock = PromptProgress::Clock;

const Clock::time_point kStart{std::chrono::hours(1)};

// The first pass shows where reading starts; then an event comes once an interval, with the pace since the last one.
TEST(PromptProgress, PaceSinceTheLastEvent) {
  PromptProgress progress(milliseconds(1000));
  EXPECT_FALSE(progress.after_pass(kStart, 2000, 10000).has_value());  // from a cache: not read
  EXPECT_FALSE(progress.after_pass(kStart + milliseconds(999), 2500, 10000).has_value());
  auto event = progress.after_pass(kStart + milliseconds(2000), 4000, 10000);
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->read, 4000u);
  EXPECT_EQ(event->total, 10000u);
  EXPECT_DOUBLE_EQ(event->tokens_per_s, 1000);
  EXPECT_DOUBLE_EQ(event->seconds_left, 6);
  event = progress.after_pass(kStart + milliseconds(4000), 5000, 10000);  // slower now
  ASSERT_TRUE(event.has_value());
  EXPECT_DOUBLE_EQ(event->tokens_per_s, 500);
  EXPECT_DOUBLE_EQ(event->seconds_left, 10);
}

// Read again after a rank was lost: no negative pace; it starts anew.
TEST(PromptProgress, StartsAnew) {
  PromptProgress progress(milliseconds(1000));
  progress.after_pass(kStart, 5000, 10000);
  EXPECT_FALSE(progress.after_pass(kStart + milliseconds(5000), 100, 10000).has_value());
  const auto event = progress.after_pass(kStart + milliseconds(6000), 1100, 10000);
  ASSERT_TRUE(event.has_value());
  EXPECT_DOUBLE_EQ(event->tokens_per_s, 1000);
}

// Two passes at the same moment have no pace: nothing is divided by zero.
TEST(PromptProgress, NoTimePassed) {
  PromptProgress progress(milliseconds(0));
  progress.after_pass(kStart, 10, 100);
  EXPECT_FALSE(progress.after_pass(kStart, 20, 100).has_value());
  EXPECT_TRUE(progress.after_pass(kStart + milliseconds(1), 30, 100).has_value());
}

}  // namespace
}  // namespace tensorfold
