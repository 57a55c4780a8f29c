// Block drafters on the CUDA backend; skipped by name without a GPU.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/worker/checkpoint/wide_follower.h"
#include "tests/worker/model/block_walk.h"

namespace tensorfold {
namespace {

class DflashOnGpu : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (const auto ops = make_backend(on_gpu(GetParam())); !ops.ok()) GTEST_SKIP() << ops.status().message();
  }
};

// How far a block's rows may be from float64, in standard deviations of the logits: worst, and median of the rows'
// worst. What bf16 inputs of products, queries, keys and values cost by themselves, seen on the CPU backend with
// nothing but those rounded to bf16, is 0.019 and 0.011 for dflash, 0.099 and 0.035 for dflash2, whose target amplifies
// them.
struct Allowance {
  double worst;
  double median;
};
Allowance allowance_of(const Pair& pair) {
  return pair.drafter.ends_with("dflash2") ? Allowance{0.2, 0.06} : Allowance{0.04, 0.02};
}

// Protects: both drafters compute what their definitions say, to the accuracy of bf16 products, as graphs and launch by
// launch, in chunks, whatever was kept and rejected before, alone and cut into three ranks on one GPU.
TEST_P(DflashOnGpu, AgreesWithFloat64) {
  for (const Pair& pair : kPairs) {
    const Expected expected(pair.drafter);
    const std::vector<int64_t> ids = expected.ints("input_ids"), anchors = expected.ints("anchors");
    const std::vector<int64_t> drafts = expected.ints("drafts");
    const std::vector<float> logits = expected.floats("logits"), margin = expected.floats("margin");
    const size_t each = drafts.size() / anchors.size(), vocab = logits.size() / drafts.size();
    const double deviation = standard_deviation(logits);
    const Allowance allowed = allowance_of(pair);
    for (const int ranks : {1, 3}) {
      SCOPED_TRACE(fmt::format("{}, {} ranks", pair.drafter, ranks));
      World world(pair, ranks, on_gpu(GetParam()));
      ASSERT_NE(world.cluster, nullptr);
      Walk walk(world, ids, ranks == 3 ? 17 : 300);
      std::vector<double> errors;  // the worst of each row
      int sure = 0;
      for (size_t a = 0; a < anchors.size(); ++a) {
        const Block block = walk.draft_at(anchors[a]);
        ASSERT_EQ(block.drafts.size(), each);
        bool same = true;
        for (size_t row = 0; row < each; ++row) {
          const std::vector<float>& found = block.rows[row + 1];
          ASSERT_EQ(found.size(), vocab);
          double worst = 0;
          for (size_t i = 0; i < vocab; ++i) {
            const double want = logits[(a * each + row) * vocab + i];
            worst = std::max(worst, std::abs(want - static_cast<double>(found[i])) / deviation);
          }
          errors.push_back(worst);
          // Two scores may each be off by the allowance; behind a draft that may be another one all may be.
          same = same && margin[a * each + row] > 2 * allowed.worst * deviation;
          if (!same) continue;
          EXPECT_EQ(block.drafts[row], drafts[a * each + row]) << "anchor " << anchors[a] << ", row " << row + 1;
          ++sure;
        }
      }
      std::sort(errors.begin(), errors.end());
      std::printf(
          "%s, %d ranks: worst logit error %.2e of the standard deviation, median of rows %.2e, %d sure drafts\n",
          pair.drafter.c_str(), ranks, errors.back(), errors[errors.size() / 2], sure);
      EXPECT_LT(errors.back(), allowed.worst);
      EXPECT_LT(errors[errors.size() / 2], allowed.median);
      // Choices of dflash2's selector are nearer to each other than that: RightGuessesAreFound has them.
      EXPECT_TRUE(sure > 0 || pair.drafter.ends_with("dflash2"));
    }
  }
}

// Protects: a drafter whose guesses are right by its keys alone is right here too: keys of kept and of rejected rows,
// of prompts in pieces and of windows are where blocks look for them. DFlash2's selector has the last word.
TEST_P(DflashOnGpu, RightGuessesAreFound) {
  const std::string target = wide_follower("follower");
  std::vector<int64_t> ids;  // its cycle
  for (int64_t i = 0; i < 250; ++i) ids.push_back(40 + i % 8);
  for (const char* drafter : {"follower_dflash", "follower_dflash2"}) {
    const Pair pair = {target, wide_follower(drafter)};
    for (const int ranks : {1, 3}) {
      SCOPED_TRACE(fmt::format("{}, {} ranks", drafter, ranks));
      World world(pair, ranks, on_gpu(GetParam()));
      ASSERT_NE(world.cluster, nullptr);
      Walk walk(world, ids, ranks == 3 ? 17 : 300);
      for (const int64_t anchor : {20, 31, 63, 64, 130, 200}) {
        const Block block = walk.draft_at(anchor);
        ASSERT_EQ(block.drafts.size(), 7u);
        for (int64_t i = 0; i < 7; ++i) {
          EXPECT_EQ(block.drafts[static_cast<size_t>(i)], ids[static_cast<size_t>(anchor + 1 + i)])
              << "anchor " << anchor << ", draft " << i + 1;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Launch, DflashOnGpu, ::testing::Values("eager", "graph"),
                         [](const auto& param) { return std::string(param.param); });

// Protects: a block's bits are the same as graphs and launch by launch, whole and cut, and however the text before
// came.
TEST(DflashOnGpuBits, AreTheSame) {
  if (const auto ops = make_backend(on_gpu("eager")); !ops.ok()) GTEST_SKIP() << ops.status().message();
  for (const Pair& pair : kPairs) {
    const std::vector<int64_t> ids = Expected(pair.drafter).ints("input_ids");
    expect_same_on_gpu(pair.target, DrafterChoice(pair.drafter), ids, {2, 65, 66, 130, 200});
  }
}

}  // namespace
}  // namespace tensorfold
