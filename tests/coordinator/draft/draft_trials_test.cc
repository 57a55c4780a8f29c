// Whether many streams draft: what makes more tokens a millisecond, found out by doing it.
#include "coordinator/draft/draft_trials.h"

#include <gtest/gtest.h>

namespace tensorfold {
namespace {

// Rounds of `streams` sequences of which one with drafts makes `with` tokens a millisecond and one without `without`.
// The round after a drafting one pays `later` of its milliseconds. Returns the share of the last half that drafted.
double drafting_share(DraftTrials& trials, size_t streams, double with, double without, double later = 0,
                      int rounds = 4000) {
  int drafted = 0;
  bool before = false;
  for (int i = 0; i < rounds; ++i) {
    const bool drafts = trials.may_draft(streams);
    const size_t tokens = drafts ? 2 * streams : streams;
    const double ms = static_cast<double>(tokens) / (drafts ? with : without);
    trials.record(streams, drafts, tokens, ms * (1.0 + (before ? later : 0.0)), static_cast<double>(streams) / without);
    before = drafts;
    if (i >= rounds / 2) drafted += drafts;
  }
  return 2.0 * drafted / rounds;
}

// Protects: many streams end up with what makes more tokens, and what loses clearly is tried seldom.
TEST(DraftTrials, TheFasterKindIsUsed) {
  DraftTrials pays;
  EXPECT_GT(drafting_share(pays, 16, 8.0, 5.0), 0.95);
  DraftTrials loses;
  EXPECT_LT(drafting_share(loses, 16, 4.0, 5.0), 0.05);
  DraftTrials nearly;
  EXPECT_LT(drafting_share(nearly, 16, 4.8, 5.0), 0.2);
}

// Protects: what drafts cost in the next round counts, which no estimate of their own pass shows.
TEST(DraftTrials, LaterCostsCount) {
  DraftTrials trials;
  EXPECT_LT(drafting_share(trials, 8, 5.5, 5.0, 0.3), 0.2);
}

// Protects: a choice is revised when texts change, and each number of streams has its own.
TEST(DraftTrials, FollowsChangesAndSizes) {
  DraftTrials trials;
  EXPECT_LT(drafting_share(trials, 16, 4.0, 5.0), 0.05);
  EXPECT_GT(drafting_share(trials, 6, 8.0, 5.0), 0.95);
  EXPECT_LT(drafting_share(trials, 16, 4.0, 5.0), 0.05);
  EXPECT_GT(drafting_share(trials, 16, 8.0, 5.0), 0.95);
}

// Protects: numbers of streams that share their trials are compared fairly, though more streams make more tokens.
TEST(DraftTrials, MoreStreamsDoNotLookLikeDrafts) {
  DraftTrials trials;
  int drafted = 0;
  for (int i = 0; i < 4000; ++i) {
    const bool drafts = trials.may_draft(16);
    const size_t streams = drafts ? 10 : 16;  // a pass takes as long for either; drafts add half
    trials.record(streams, drafts, drafts ? 15 : 16, drafts ? 1.3 : 1.0, 1.0);
    if (i >= 2000) drafted += drafts;
  }
  EXPECT_GT(drafted, 1700);
}

// Protects: few streams are left to the width policy, and so are many that never draft.
TEST(DraftTrials, FewStreamsAreNotTried) {
  DraftTrials trials;
  for (size_t streams = 1; streams <= DraftTrials::kFewStreams; ++streams) {
    EXPECT_EQ(drafting_share(trials, streams, 1.0, 50.0), 1.0) << streams;
  }
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(trials.may_draft(16));
    trials.record(16, false, 16, 1.0, 1.0);
  }
}

}  // namespace
}  // namespace tensorfold
