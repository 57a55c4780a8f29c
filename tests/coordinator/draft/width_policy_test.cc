#include "coordinator/draft/width_policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "coordinator/draft/prompt_costs.h"

namespace tensorfold {
namespace {

void record_costs(WidthPolicy& policy, double per_row) {
  for (size_t rows = 1; rows <= 64; ++rows) policy.record_pass(rows, 10.0 + per_row * static_cast<double>(rows - 1));
}

void record_windows(WidthPolicy& policy, DraftKind kind, uint32_t match, size_t drafted, size_t accepted, int times) {
  for (int i = 0; i < times; ++i) {
    policy.record_window({kind, static_cast<uint32_t>(drafted)}, match, accepted, nullptr);
  }
}

WidthRequest mtp_request() {
  WidthRequest request;
  request.kind = DraftKind::kMtp;
  request.mtp_available = true;
  request.room = 100;
  return request;
}

// Protects the estimate between and beyond what was measured, and against noise that makes more rows look cheaper.
TEST(PassCosts, Estimates) {
  PassCosts costs;
  EXPECT_EQ(costs.estimate(1), 1.0);
  EXPECT_GT(costs.estimate(8), 1.0);
  costs.record(1, 10.0);
  EXPECT_EQ(costs.estimate(1), 10.0);
  EXPECT_GT(costs.estimate(2), 10.0);
  costs.record(5, 14.0);
  EXPECT_DOUBLE_EQ(costs.estimate(3), 12.0);
  costs.record(3, 8.0);
  EXPECT_EQ(costs.estimate(3), 9.0);  // the two that fall are taken together
  EXPECT_EQ(costs.estimate(1), 9.0);
  EXPECT_GE(costs.estimate(100), 14.0);
  costs.record(2, std::numeric_limits<double>::quiet_NaN());
  costs.record(0, 1.0);
  costs.record(2, -1.0);
  EXPECT_EQ(costs.estimate(2), 9.0);
  PassCosts later;
  later.record(4, 10.0);
  EXPECT_LT(later.estimate(1), 10.0);
}

// Protects: one disturbed pass does not make all wider ones look dear for ever, though it is never measured again.
TEST(PassCosts, OneDisturbedPassIsOutweighed) {
  PassCosts costs;
  for (int i = 0; i < 20; ++i) costs.record(2, 10.0);
  costs.record(3, 100.0);
  for (int i = 0; i < 20; ++i) costs.record(4, 11.0);
  EXPECT_LT(costs.estimate(4), 20.0);
}

// Protects: passes whose times vary as those of a busy machine do (here by half, the same every time) do not make the
// policy believe that rows are free: sixteen streams come near what they would with the true costs.
TEST(WidthPolicy, NoisyCostsDoNotInviteDrafts) {
  const auto truth = [](size_t rows) { return 0.5 + 0.3 * static_cast<double>(rows); };
  WidthPolicy policy;
  record_windows(policy, DraftKind::kMtp, 0, 7, 2, 50);
  uint64_t state = 7;
  double tokens = 0;
  double ms = 0;
  for (int round = 0; round < 400; ++round) {
    const auto choices = policy.choose(std::vector<WidthRequest>(16, mtp_request()));
    size_t rows = 0;
    for (const WidthChoice& choice : choices) rows += 1 + choice.drafts;
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    const double noise = 0.75 + static_cast<double>(state >> 40) / static_cast<double>(1 << 24);
    policy.record_pass(rows, truth(rows) * noise);
    if (round < 100) continue;
    double chance = 1;
    for (const WidthChoice& choice : choices) {
      tokens += 1;
      chance = 1;
      for (uint32_t d = 1; d <= choice.drafts; ++d) {
        tokens += chance *= policy.global().rate(DraftSource::kMtp, d, nullptr);
      }
    }
    ms += truth(rows);
  }
  double best = 0;
  for (size_t drafts = 0; drafts <= 7; ++drafts) {
    double kept = 1;
    double chance = 1;
    for (size_t d = 1; d <= drafts; ++d) kept += chance *= policy.global().rate(DraftSource::kMtp, d, nullptr);
    best = std::max(best, 16 * kept / truth(16 * (1 + drafts)));
  }
  EXPECT_GT(tokens / ms, 0.93 * best);
}

// Protects: a prompt row's cost grows with its position, and is extrapolated for prompts that have come less far.
TEST(PromptCosts, GrowWithThePosition) {
  PromptCosts costs;
  EXPECT_EQ(costs.row_ms(5000, 3.0), 3.0);
  for (int64_t at = 0; at < 65536; at += 256) {
    costs.record(256, static_cast<double>(at), 256 * (0.5 + static_cast<double>(at) / 65536));
  }
  EXPECT_NEAR(costs.row_ms(65536, 3.0), 1.5, 0.05);
  EXPECT_NEAR(costs.row_ms(32768, 3.0), 1.0, 0.1);
  EXPECT_GT(costs.row_ms(0, 3.0), 0.3);
  costs.record(0, 1.0, 5.0);
  costs.record(8, 1.0, std::numeric_limits<double>::infinity());
  EXPECT_NEAR(costs.row_ms(65536, 3.0), 1.5, 0.05);
}

// Protects the rates: depth d is only judged when those before it were kept, and a sequence overrules the prior with
// time.
TEST(Acceptance, ByDepth) {
  Acceptance global;
  for (int i = 0; i < 200; ++i) global.record(DraftSource::kMtp, 4, 2);
  EXPECT_GT(global.rate(DraftSource::kMtp, 1, nullptr), 0.95);
  EXPECT_GT(global.rate(DraftSource::kMtp, 2, nullptr), 0.95);
  EXPECT_LT(global.rate(DraftSource::kMtp, 3, nullptr), 0.1);
  EXPECT_NEAR(global.rate(DraftSource::kMtp, 4, nullptr), 0.7, 1e-12);  // never tried
  Acceptance own;
  EXPECT_DOUBLE_EQ(own.rate(DraftSource::kMtp, 1, &global), global.rate(DraftSource::kMtp, 1, nullptr));
  for (int i = 0; i < 100; ++i) own.record(DraftSource::kMtp, 1, 0);
  EXPECT_LT(own.rate(DraftSource::kMtp, 1, &global), 0.2);
  own.record(DraftSource::kMtp, 40, 50);  // more than counters, more kept than drafted: bounded
}

// Protects the choice: cheap rows and good drafts give wide windows, dear rows or bad drafts none.
TEST(WidthPolicy, FollowsCostAndAcceptance) {
  const std::vector<WidthRequest> one = {mtp_request()};
  WidthPolicy good;
  record_costs(good, 0.1);
  good.record_mtp_step(0.2);
  record_windows(good, DraftKind::kMtp, 0, 7, 7, 100);
  EXPECT_EQ(good.choose(one)[0].drafts, 7u);
  EXPECT_EQ(good.choose(one)[0].kind, DraftKind::kMtp);

  WidthPolicy bad;
  record_costs(bad, 1.0);
  bad.record_mtp_step(1.0);
  record_windows(bad, DraftKind::kMtp, 0, 7, 0, 100);
  EXPECT_EQ(bad.choose(one)[0].drafts, 0u);
  EXPECT_EQ(bad.choose(one)[0].kind, DraftKind::kNone);

  WidthPolicy dear;  // a row costs as much as a pass: a draft would have to be kept always
  record_costs(dear, 10.0);
  dear.record_mtp_step(1.0);
  record_windows(dear, DraftKind::kMtp, 0, 7, 7, 100);
  EXPECT_EQ(dear.choose(one)[0].drafts, 0u);
}

// Protects the optimum: against trying every width for one sequence.
TEST(WidthPolicy, IsTheBestRatio) {
  for (double per_row : {0.05, 0.5, 1.0, 2.0, 4.0}) {
    for (size_t kept : {0u, 1u, 2u, 4u, 7u}) {
      WidthPolicy policy;
      record_costs(policy, per_row);
      policy.record_mtp_step(0.3);
      record_windows(policy, DraftKind::kMtp, 0, 7, kept, 30);
      double best = 0;
      uint32_t best_drafts = 0;
      double tokens = 1;
      double chance = 1;
      for (uint32_t d = 0; d <= 7; ++d) {
        if (d > 0) {
          chance *= policy.global().rate(DraftSource::kMtp, d, nullptr);
          tokens += chance;
        }
        const double value = tokens / (policy.costs().estimate(1 + d) + 0.3 * d);
        if (value > best) {
          best = value;
          best_drafts = d;
        }
      }
      EXPECT_EQ(policy.choose(std::vector<WidthRequest>{mtp_request()})[0].drafts, best_drafts);
    }
  }
}

// Protects limits: width, room, what the copy found, a request that asked for no drafts, a model without an MTP layer.
TEST(WidthPolicy, KeepsLimits) {
  WidthPolicy policy({.max_width = 4, .probe_interval = 32, .adaptive = false});
  WidthRequest wide = mtp_request();
  WidthRequest little = mtp_request();
  little.room = 1;
  WidthRequest none = mtp_request();
  none.kind = DraftKind::kNone;
  WidthRequest lacking = mtp_request();
  lacking.mtp_available = false;
  WidthRequest copy;
  copy.kind = DraftKind::kCopy;
  copy.copy_match = 9;
  copy.copy_ids = 2;
  copy.room = 9;
  const auto got = policy.choose(std::vector<WidthRequest>{wide, little, none, lacking, copy});
  EXPECT_EQ(got[0].drafts, 3u);
  EXPECT_EQ(got[1].drafts, 1u);
  EXPECT_EQ(got[2].drafts, 0u);
  EXPECT_EQ(got[3].drafts, 0u);
  EXPECT_EQ(got[4].drafts, 2u);
  EXPECT_EQ(got[4].kind, DraftKind::kCopy);
  EXPECT_TRUE(policy.choose({}).empty());
  EXPECT_EQ(WidthPolicy({.max_width = 1}).choose(std::vector<WidthRequest>{wide})[0].drafts, 0u);
}

// Protects `auto`: a long match whose kind is measured good is copied, otherwise the model guesses.
TEST(WidthPolicy, AutoPicksTheBetterSource) {
  WidthPolicy policy;
  record_costs(policy, 0.2);
  policy.record_mtp_step(0.5);
  record_windows(policy, DraftKind::kMtp, 0, 7, 2, 100);
  record_windows(policy, DraftKind::kCopy, 40, 7, 7, 100);
  record_windows(policy, DraftKind::kCopy, 4, 7, 0, 100);
  WidthRequest request = mtp_request();
  request.kind = DraftKind::kAuto;
  request.copy_ids = 7;
  request.copy_match = 40;
  EXPECT_EQ(policy.choose(std::vector<WidthRequest>{request})[0].kind, DraftKind::kCopy);
  request.copy_match = 4;
  EXPECT_EQ(policy.choose(std::vector<WidthRequest>{request})[0].kind, DraftKind::kMtp);
  request.copy_match = 0;
  EXPECT_EQ(policy.choose(std::vector<WidthRequest>{request})[0].kind, DraftKind::kMtp);
  request.mtp_available = false;
  EXPECT_EQ(policy.choose(std::vector<WidthRequest>{request})[0].kind, DraftKind::kNone);
}

// Protects `auto` with a block drafter: it drafts where its tokens a millisecond are the most, its one step is paid
// once however many tokens it gives, and it never gives more than a block has.
TEST(WidthPolicy, AutoWeighsBlocks) {
  WidthRequest request = mtp_request();
  request.kind = DraftKind::kAuto;
  request.block_drafts = 5;
  const auto choose = [&](double block_ms, size_t kept) {
    WidthPolicy policy;
    record_costs(policy, 0.1);
    policy.record_mtp_step(1.0);
    policy.record_block(block_ms);
    record_windows(policy, DraftKind::kMtp, 0, 7, 5, 100);
    record_windows(policy, DraftKind::kBlock, 0, 5, kept, 100);
    return policy.choose(std::vector<WidthRequest>{request})[0];
  };
  // As good as chained steps and cheaper: all of a block.
  EXPECT_EQ(choose(1.0, 5).kind, DraftKind::kBlock);
  EXPECT_EQ(choose(1.0, 5).drafts, 5u);
  // As good and dearer than all those steps; or cheap and never kept.
  EXPECT_EQ(choose(9.0, 5).kind, DraftKind::kMtp);
  EXPECT_EQ(choose(1.0, 0).kind, DraftKind::kMtp);
  // Pinned, it is that or nothing; a dear block whose first draft alone is kept is not worth it.
  request.kind = DraftKind::kBlock;
  EXPECT_EQ(choose(9.0, 5).kind, DraftKind::kBlock);
  EXPECT_EQ(choose(20.0, 1).drafts, 0u);
  request.block_drafts = 0;
  EXPECT_EQ(choose(1.0, 5).kind, DraftKind::kNone);
  request.kind = DraftKind::kMtp;
  request.block_drafts = 5;
  EXPECT_EQ(choose(1.0, 5).kind, DraftKind::kMtp);
}

// Protects the cost of blocks: one step a pass, whatever its rows, never under what was measured.
TEST(WidthPolicy, ABlockIsOneStep) {
  WidthPolicy policy;
  record_costs(policy, 0.05);
  policy.record_block(9.0);
  for (const size_t rows : {1u, 4u, 32u}) {
    EXPECT_NEAR(policy.pass_ms(rows, 0, true) - policy.pass_ms(rows, 0), 9.0, 1e-9);
  }
  policy.record_block(std::numeric_limits<double>::quiet_NaN());
  policy.record_block(-1.0);
  EXPECT_NEAR(policy.pass_ms(4, 0, true) - policy.pass_ms(4, 0), 9.0, 1e-9);
}

// Protects batches: rows go to the sequences whose drafts are kept.
TEST(WidthPolicy, SharesRowsByWorth) {
  WidthPolicy policy;
  record_costs(policy, 1.0);
  policy.record_mtp_step(0.1);
  Acceptance sure;
  Acceptance poor;
  for (int i = 0; i < 100; ++i) {
    sure.record(DraftSource::kMtp, 7, 7);
    poor.record(DraftSource::kMtp, 1, 0);
  }
  WidthRequest a = mtp_request();
  a.acceptance = &sure;
  WidthRequest b = mtp_request();
  b.acceptance = &poor;
  const auto got = policy.choose(std::vector<WidthRequest>{b, a, b});
  EXPECT_EQ(got[0].drafts, 0u);
  EXPECT_GT(got[1].drafts, 3u);
  EXPECT_EQ(got[2].drafts, 0u);
}

// Protects: however many streams there are, together they are expected to keep no fewer tokens a millisecond than one
// alone, and many streams get narrow windows where rows cost. The costs are those of a machine that reads weights at
// first and computes later.
TEST(WidthPolicy, MoreStreamsNeverKeepLess) {
  for (const double free_rows : {1.0, 8.0, 32.0, 1000.0}) {
    for (const size_t kept : {0u, 2u, 7u}) {
      WidthPolicy policy;
      for (size_t rows = 1; rows <= 512; ++rows) {
        policy.record_pass(rows, 10.0 + 10.0 * std::max(0.0, static_cast<double>(rows) - free_rows) / free_rows);
      }
      policy.record_mtp_step(0.2);
      record_windows(policy, DraftKind::kMtp, 0, 7, kept, 50);
      uint32_t deepest = 0;
      const auto value = [&](size_t streams) {
        const auto choices = policy.choose(std::vector<WidthRequest>(streams, mtp_request()));
        double tokens = 0;
        size_t rows = 0;
        deepest = 0;
        for (const WidthChoice& choice : choices) {
          double chance = 1;
          tokens += 1;
          rows += 1 + choice.drafts;
          deepest = std::max(deepest, choice.drafts);
          for (uint32_t d = 1; d <= choice.drafts; ++d) {
            tokens += chance *= policy.global().rate(DraftSource::kMtp, d, nullptr);
          }
        }
        return tokens / policy.pass_ms(rows, deepest);
      };
      const double one = value(1);
      const uint32_t alone = deepest;
      for (const size_t streams : {2u, 3u, 5u, 8u, 16u, 33u, 64u}) {
        EXPECT_GE(value(streams), one * 0.999) << free_rows << " free rows, " << kept << " kept, " << streams;
        EXPECT_LE(deepest, std::max(alone, 1u));
      }
      if (free_rows == 8.0 && kept == 2) {
        EXPECT_LT(deepest, alone);
      }
    }
  }
}

// Protects: the windows of a pass together keep its limit, and every sequence has its row.
TEST(WidthPolicy, KeepsThePassLimit) {
  for (const bool adaptive : {false, true}) {
    WidthPolicy policy({.adaptive = adaptive});
    record_costs(policy, 0.01);
    record_windows(policy, DraftKind::kMtp, 0, 7, 7, 100);
    for (const size_t most : {3u, 4u, 9u}) {
      size_t rows = 0;
      for (const WidthChoice& choice : policy.choose(std::vector<WidthRequest>(4, mtp_request()), most)) {
        rows += 1 + choice.drafts;
      }
      EXPECT_EQ(rows, std::max<size_t>(most, 4));
    }
  }
}

// Protects against never measuring again: after a while without drafts, one is tried.
TEST(WidthPolicy, Probes) {
  WidthPolicy policy;
  record_costs(policy, 1.0);
  record_windows(policy, DraftKind::kMtp, 0, 7, 0, 100);
  WidthRequest request = mtp_request();
  EXPECT_EQ(policy.choose(std::vector<WidthRequest>{request})[0].drafts, 0u);
  request.idle_rounds = 32;
  EXPECT_EQ(policy.choose(std::vector<WidthRequest>{request})[0].drafts, 1u);
  request.room = 0;
  EXPECT_EQ(policy.choose(std::vector<WidthRequest>{request})[0].drafts, 0u);
}

}  // namespace
}  // namespace tensorfold
