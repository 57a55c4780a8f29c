// How often background work that waits counts as foreground.
#include "coordinator/schedule/background_turns.h"

#include <gtest/gtest.h>

namespace tensorfold {
namespace {

using std::chrono::milliseconds;

// Protects: the bound on what background work waits for, and on what it costs others: one turn an interval, counted
// from when something began to wait; none while nothing waits, and never if the profile says never.
TEST(BackgroundTurns, OneAnInterval) {
  const BackgroundTurns::Clock::time_point start{};
  BackgroundTurns turns(milliseconds(100));
  EXPECT_FALSE(turns.due(start, false));
  EXPECT_FALSE(turns.due(start + milliseconds(500), true));
  EXPECT_FALSE(turns.due(start + milliseconds(599), true));
  EXPECT_TRUE(turns.due(start + milliseconds(600), true));
  EXPECT_FALSE(turns.due(start + milliseconds(601), true)) << "the next one has its own interval";
  EXPECT_TRUE(turns.due(start + milliseconds(700), true));
  EXPECT_FALSE(turns.due(start + milliseconds(710), false));
  EXPECT_FALSE(turns.due(start + milliseconds(2000), true)) << "it began to wait just now";
  BackgroundTurns never(milliseconds(0));
  EXPECT_FALSE(never.due(start, true));
  EXPECT_FALSE(never.due(start + std::chrono::hours(1), true));
}

}  // namespace
}  // namespace tensorfold
