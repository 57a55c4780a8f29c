#include "coordinator/sampling/logprobs.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace tensorfold {
namespace {

// Protects the values: log-softmax of the raw logits, and the order of ties.
TEST(Logprobs, AreLogSoftmax) {
  const std::vector<float> row = {1.0f, 3.0f, 3.0f, -2.0f};
  const auto got = compute_logprobs(row, 3, 3, 0);
  ASSERT_TRUE(got.ok());
  double sum = 0;
  for (float x : row) sum += std::exp(static_cast<double>(x));
  EXPECT_EQ(got->chosen.id, 3u);
  EXPECT_NEAR(got->chosen.logprob, -2.0 - std::log(sum), 1e-12);
  ASSERT_EQ(got->top.size(), 3u);
  EXPECT_EQ(got->top[0].id, 1u);
  EXPECT_EQ(got->top[1].id, 2u);
  EXPECT_EQ(got->top[2].id, 0u);
  EXPECT_NEAR(got->top[0].logprob, 3.0 - std::log(sum), 1e-12);
}

// Protects extreme rows: finite logits give finite log-probabilities.
TEST(Logprobs, StayFinite) {
  const std::vector<float> row = {3e38f, -3e38f, 0.0f};
  const auto got = compute_logprobs(row, 1, 20, 0);
  ASSERT_TRUE(got.ok());
  EXPECT_TRUE(std::isfinite(got->chosen.logprob));
  EXPECT_EQ(got->top.size(), 3u);
  EXPECT_EQ(got->top[0].logprob, 0.0);
}

// Protects against broken models and bad calls.
TEST(Logprobs, Errors) {
  std::vector<float> row = {0.0f, 1.0f};
  EXPECT_FALSE(compute_logprobs(row, 2, 0, 0).ok());
  EXPECT_FALSE(compute_logprobs(row, 0, 21, 0).ok());
  EXPECT_FALSE(compute_logprobs({}, 0, 0, 0).ok());
  row[1] = std::numeric_limits<float>::quiet_NaN();
  const auto status = compute_logprobs(row, 0, 0, 17).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_NE(std::string(status.message()).find("position 17"), std::string::npos);
}

}  // namespace
}  // namespace tensorfold
