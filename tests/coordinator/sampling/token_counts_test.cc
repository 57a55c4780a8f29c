#include "coordinator/sampling/token_counts.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace tensorfold {
namespace {

// Protects "penalty state leaks between drafted rows": any pushes and pops leave exactly the counts of the history.
TEST(TokenCounts, PushAndPopAreInverse) {
  std::mt19937 rng(1);
  const std::vector<uint32_t> prompt = {4, 4, 9};
  TokenCounts counts(prompt);
  std::vector<uint32_t> reply;
  for (int i = 0; i < 2000; ++i) {
    if (rng() % 3 != 0) {
      reply.push_back(rng() % 12);
      counts.push(reply.back());
    } else {
      if (!reply.empty()) reply.pop_back();
      counts.pop();
    }
    ASSERT_EQ(counts.reply_size(), reply.size());
    size_t seen = 0;
    for (uint32_t id = 0; id < 12; ++id) {
      uint32_t in_reply = 0;
      for (uint32_t r : reply) in_reply += r == id;
      const uint32_t in_prompt = id == 4 ? 2 : id == 9 ? 1 : 0;
      ASSERT_EQ(counts.of(id).reply, in_reply);
      ASSERT_EQ(counts.of(id).total, in_reply + in_prompt);
      seen += in_reply + in_prompt > 0;
    }
    ASSERT_EQ(counts.counts().size(), seen);
  }
}

// Protects chunked prompts and the bottom of the stack.
TEST(TokenCounts, PromptStays) {
  TokenCounts counts;
  counts.add_prompt(std::vector<uint32_t>{1});
  counts.add_prompt(std::vector<uint32_t>{1, 2});
  counts.pop();
  EXPECT_EQ(counts.of(1).total, 2u);
  counts.push(1);
  counts.push(2);
  counts.pop_to(0);
  EXPECT_EQ(counts.of(1).total, 2u);
  EXPECT_EQ(counts.of(1).reply, 0u);
  EXPECT_EQ(counts.of(7).total, 0u);
}

}  // namespace
}  // namespace tensorfold
