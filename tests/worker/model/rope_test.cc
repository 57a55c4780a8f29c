// Rotary frequencies and attention factors against the published formulas, computed in float64 by rope_yarn.py.
#include "worker/model/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace tensorfold {
namespace {

struct Case {
  RopeConfig rope;
  double attention_factor;
  std::vector<double> frequencies;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
#include "tests/worker/model/rope_values.inc"
  };
  return all;
}

// Protects: every rope type that is read has the formula's frequencies to the last bit of fp32 but one, and its factor.
TEST(Rope, FrequenciesAreTheFormulas) {
  for (const Case& expected : cases()) {
    ModelConfig config;
    config.rope = expected.rope;
    const std::vector<float> got = inverse_frequencies(config);
    ASSERT_EQ(got.size(), expected.frequencies.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i] / expected.frequencies[i], 1.0, std::ldexp(1.0, -24))
          << "type " << static_cast<int>(config.rope.type) << " theta " << config.rope.theta << " dim " << i;
    }
    EXPECT_NEAR(rope_attention_factor(config), expected.attention_factor, 1e-14);
  }
}

// Protects: yarn keeps the fast dims as they are and slows the slow ones by the whole factor.
TEST(Rope, YarnKeepsFastAndSlowsSlowDims) {
  ModelConfig plain;
  plain.rope.theta = 1e6;
  plain.rope.dims = 128;
  ModelConfig yarn = plain;
  yarn.rope.type = RopeType::kYarn;
  yarn.rope.factor = 4.0;
  yarn.rope.original_max_positions = 32768;
  const std::vector<float> before = inverse_frequencies(plain);
  const std::vector<float> after = inverse_frequencies(yarn);
  EXPECT_EQ(after.front(), before.front());
  EXPECT_EQ(after.back(), before.back() / 4.0f);
}

}  // namespace
}  // namespace tensorfold
