#include "coordinator/draft/copy_drafter.h"

#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <vector>

namespace tensorfold {
namespace {

using Ids = std::vector<uint32_t>;

// The definition, by looking everywhere: the longest match (capped), the latest of equals.
std::pair<size_t, size_t> brute_force(const Ids& h, size_t min_match, size_t max_match) {
  size_t best_end = 0;
  size_t best = 0;
  for (size_t end = h.size() - 1; end >= 1; --end) {
    size_t length = 0;
    while (length < max_match && length < end && h[end - 1 - length] == h[h.size() - 1 - length]) ++length;
    if (length >= min_match && length > best) {
      best = length;
      best_end = end;
    }
  }
  return {best_end, best};
}

// Protects the definition: on random histories the index finds what looking everywhere finds, grown in any steps.
TEST(CopyDrafter, FindsTheLongestLatestMatch) {
  std::mt19937 rng(1);
  const CopyOptions options{.min_match = 2, .max_match = 16, .max_chain = 100000};
  for (int round = 0; round < 60; ++round) {
    CopyDrafter drafter(options);
    const uint32_t alphabet = 2 + rng() % 6;
    Ids history;
    for (int step = 0; step < 120; ++step) {
      const size_t grow = 1 + rng() % 3;
      for (size_t i = 0; i < grow; ++i) history.push_back(rng() % alphabet);
      if (rng() % 2) drafter.observe(history);
      const Draft draft = drafter.propose(history, 5);
      const auto [end, length] = brute_force(history, 2, 16);
      ASSERT_EQ(draft.match, length);
      if (length == 0) {
        ASSERT_TRUE(draft.ids.empty());
        continue;
      }
      ASSERT_EQ(draft.ids.size(), 5u);
      for (size_t i = 0; i < 5 && end + i < history.size(); ++i) ASSERT_EQ(draft.ids[i], history[end + i]);
    }
  }
}

// Protects periodic text: the guess goes past the history's end.
TEST(CopyDrafter, ContinuesAPeriod) {
  CopyDrafter drafter;
  const Ids history = {1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4};
  EXPECT_EQ(drafter.propose(history, 10).ids, (Ids{1, 2, 3, 4, 1, 2, 3, 4, 1, 2}));
  const Ids same(50, 7);
  CopyDrafter other;
  EXPECT_EQ(other.propose(same, 3).ids, (Ids{7, 7, 7}));
}

// Protects the small cases.
TEST(CopyDrafter, NothingToCopy) {
  CopyDrafter drafter;
  EXPECT_TRUE(drafter.propose({}, 4).ids.empty());
  EXPECT_TRUE(drafter.propose(Ids{1, 2}, 4).ids.empty());
  EXPECT_TRUE(drafter.propose(Ids{1, 2, 3, 1, 2}, 4).ids.empty());  // a match of 2 is under min_match
  EXPECT_TRUE(drafter.propose(Ids{1, 2, 3, 1, 2, 3}, 0).ids.empty());
  EXPECT_EQ(drafter.propose(Ids{1, 2, 3, 1, 2, 3}, 1).ids, (Ids{1}));
}

// Protects the step's time on long histories, the worst kinds included (one token repeated; few different tokens). The
// bound is wide: it is the difference between microseconds and a scan.
TEST(CopyDrafter, LongHistoriesCostMicroseconds) {
  std::mt19937 rng(2);
  for (uint32_t alphabet : {1u, 2u, 50000u}) {
    CopyDrafter drafter;
    Ids history;
    for (int i = 0; i < 100000; ++i) history.push_back(rng() % alphabet);
    drafter.observe(history);
    const auto start = std::chrono::steady_clock::now();
    constexpr int kSteps = 2000;
    for (int i = 0; i < kSteps; ++i) {
      history.push_back(rng() % alphabet);
      drafter.propose(history, 7);
    }
    const double us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
    EXPECT_LT(us / kSteps, 200.0) << alphabet;
    RecordProperty("us_per_step_" + std::to_string(alphabet), std::to_string(us / kSteps));
  }
}

// Protects the names that profiles and requests use.
TEST(DraftKind, Names) {
  for (DraftKind kind : {DraftKind::kNone, DraftKind::kMtp, DraftKind::kCopy, DraftKind::kAuto}) {
    EXPECT_EQ(*parse_draft_kind(draft_kind_name(kind)), kind);
    EXPECT_EQ(make_drafter(kind)->kind() == DraftKind::kCopy, kind == DraftKind::kCopy || kind == DraftKind::kAuto);
  }
  EXPECT_EQ(*parse_draft_kind("off"), DraftKind::kNone);
  EXPECT_FALSE(parse_draft_kind("eagle").ok());
  EXPECT_TRUE(info_of(DraftKind::kMtp).on_workers);
  EXPECT_FALSE(info_of(DraftKind::kCopy).on_workers);
  EXPECT_TRUE(make_drafter(DraftKind::kNone)->propose(Ids{1, 1, 1, 1, 1}, 4).ids.empty());
}

}  // namespace
}  // namespace tensorfold
