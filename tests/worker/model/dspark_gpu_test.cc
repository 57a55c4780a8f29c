// DSpark on the CUDA backend; skipped by name without a GPU.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/worker/model/block_walk.h"

namespace tensorfold {
namespace {

const std::string kFolder = kFixtures + "deepseek_v4_released";
const DrafterChoice kOwn("", DrafterChoice::Own::kWanted);

// How far the logits of a block's rows before the Markov head may be from float64, in their standard deviations: worst,
// and median of the rows' worst. The CPU backend with products, queries and latents rounded to bf16 has 0.04 to 0.07
// and 0.03 to 0.05, but 0.95 and 0.97 (0.08 and 0.09) with two of seven choices of noise below bf16's last place, as a
// choice between two nearly equal experts would show. An H200 had 0.99 and 0.07.
constexpr double kWorst = 1.5, kMedian = 0.1;
// And how far those of two tokens that compete for a draft, which are two among all.
constexpr double kOfPair = 0.12;

class DsparkOnGpu : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (const auto ops = make_backend(on_gpu(GetParam())); !ops.ok()) GTEST_SKIP() << ops.status().message();
  }
};

// Protects: the drafter computes what its definition says, to the accuracy of bf16 products, as graphs and launch by
// launch, in chunks, whatever was kept and rejected before, alone and cut into three ranks on one GPU; and takes the
// tokens that the Markov head says where they are no near-ties.
TEST_P(DsparkOnGpu, AgreesWithFloat64) {
  const Expected expected(kFolder);
  const std::vector<int64_t> ids = expected.ints("input_ids"), anchors = expected.ints("dspark.anchors");
  const std::vector<int64_t> drafts = expected.ints("dspark.drafts");
  const std::vector<float> base = expected.floats("dspark.base"), margin = expected.floats("dspark.margin");
  const size_t each = drafts.size() / anchors.size(), known = anchors.size() - 2, vocab = base.size() / (2 * each);
  const double deviation = standard_deviation(base);
  for (const int ranks : {1, 3}) {
    SCOPED_TRACE(fmt::format("{} ranks", ranks));
    World world(kFolder, kOwn, ranks, on_gpu(GetParam()));
    ASSERT_NE(world.cluster, nullptr);
    Walk walk(world, ids, ranks == 3 ? 17 : 300);
    std::vector<double> errors;  // the worst of each row
    int sure = 0;
    for (size_t a = 0; a < anchors.size(); ++a) {
      const Block block = walk.draft_at(anchors[a]);
      ASSERT_EQ(block.drafts.size(), each);
      bool same = true;
      for (size_t row = 0; row < each; ++row) {
        // Both scores may be off; behind a draft that may be another one all may be.
        same = same && static_cast<double>(margin[a * each + row]) > 2 * kOfPair * deviation;
        if (same) {
          EXPECT_EQ(block.drafts[row], drafts[a * each + row]) << "anchor " << anchors[a] << ", row " << row;
          ++sure;
        }
        if (a < known) continue;
        double worst = 0;
        for (size_t i = 0; i < vocab; ++i) {
          const double want = base[((a - known) * each + row) * vocab + i];
          worst = std::max(worst, std::abs(want - static_cast<double>(block.rows[row][i])) / deviation);
        }
        errors.push_back(worst);
      }
    }
    std::sort(errors.begin(), errors.end());
    std::printf("%d ranks: worst logit error %.2e of the standard deviation, median of rows %.2e, %d sure drafts\n",
                ranks, errors.back(), errors[errors.size() / 2], sure);
    EXPECT_LT(errors.back(), kWorst);
    EXPECT_LT(errors[errors.size() / 2], kMedian);
    EXPECT_GT(sure, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Launch, DsparkOnGpu, ::testing::Values("eager", "graph"),
                         [](const auto& param) { return std::string(param.param); });

// Protects: a block's bits are the same as graphs and launch by launch, whole and cut, and however the text before
// came.
TEST(DsparkOnGpuBits, AreTheSame) {
  if (const auto ops = make_backend(on_gpu("eager")); !ops.ok()) GTEST_SKIP() << ops.status().message();
  const std::vector<int64_t> ids = Expected(kFolder).ints("input_ids");
  expect_same_on_gpu(kFolder, kOwn, ids, {2, 16, 65, 66, 130, 200});
}

}  // namespace
}  // namespace tensorfold
