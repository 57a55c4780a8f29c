#include "coordinator/sampling/identity.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace tensorfold {
namespace {

// Protects token_sha's definition (contract, section 6); values from Python's hashlib.
TEST(TokenSha, MatchesTheContract) {
  EXPECT_EQ(token_sha(std::vector<uint32_t>{1, 22, 333}), "891551674528");
  EXPECT_EQ(token_sha({}), "e3b0c44298fc");
  EXPECT_NE(token_sha(std::vector<uint32_t>{12, 2}), token_sha(std::vector<uint32_t>{1, 22}));
}

// Protects replies of requests without a seed: a changed definition would change them all. Value from Python.
TEST(DefaultSeed, IsPinned) {
  const std::vector<uint32_t> prompt = {1, 22, 333};
  EXPECT_EQ(default_seed(prompt, -3), 0xffd3fd41ed3f5cbbull);
  EXPECT_NE(default_seed(prompt, -2), default_seed(prompt, -3));
  EXPECT_NE(default_seed(std::vector<uint32_t>{1, 22}, -3), default_seed(prompt, -3));
}

// Protects n > 1: choice 0 is the reply to n = 1, and the others differ from it and from one another.
TEST(ChoiceSeed, KeysEachChoice) {
  EXPECT_EQ(choice_seed(5, 0), 5u);
  EXPECT_EQ(choice_seed(5, 2), 0x4bb92605ba2225f6ull);
  std::set<uint64_t> seeds;
  for (uint64_t seed = 0; seed < 64; ++seed) {
    for (uint32_t index = 0; index < 16; ++index) seeds.insert(choice_seed(seed, index));
  }
  EXPECT_EQ(seeds.size(), 64u * 16u);
}

}  // namespace
}  // namespace tensorfold
