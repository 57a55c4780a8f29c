#include "coordinator/tokenizer/pre_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace tensorfold {
namespace {

using ::testing::ElementsAre;
using Pieces = std::vector<std::pair<size_t, size_t>>;

Pieces behave(SplitBehavior behavior) {
  // "the-final--countdown" cut at '-': the library's own example.
  const std::vector<RegexPiece> pieces = {{0, 3, false}, {3, 4, true},   {4, 9, false},
                                          {9, 10, true}, {10, 11, true}, {11, 20, false}};
  Pieces out;
  apply_behavior(behavior, pieces, 100, out);
  for (auto& piece : out) piece = {piece.first - 100, piece.second - 100};
  return out;
}

// Protects what each behaviour of Split does with its matches.
TEST(PreTokenizerTest, Behaviors) {
  using P = std::pair<size_t, size_t>;
  EXPECT_THAT(behave(SplitBehavior::kRemoved), ElementsAre(P(0, 3), P(4, 9), P(11, 20)));
  EXPECT_THAT(behave(SplitBehavior::kIsolated), ElementsAre(P(0, 3), P(3, 4), P(4, 9), P(9, 10), P(10, 11), P(11, 20)));
  EXPECT_THAT(behave(SplitBehavior::kMergedWithPrevious), ElementsAre(P(0, 4), P(4, 10), P(10, 11), P(11, 20)));
  EXPECT_THAT(behave(SplitBehavior::kMergedWithNext), ElementsAre(P(0, 3), P(3, 9), P(9, 10), P(10, 20)));
  EXPECT_THAT(behave(SplitBehavior::kContiguous), ElementsAre(P(0, 3), P(3, 4), P(4, 9), P(9, 11), P(11, 20)));
}

// Protects the marks of untrusted bytes when add_prefix_space moves the text.
TEST(PreTokenizerTest, PrefixSpaceMovesTheMarks) {
  std::vector<PreTokenizerStep> steps(1);
  steps[0].add_prefix_space = true;
  const PreTokenizer pre_tokenizer(std::move(steps));
  PreTokenizedText text;
  text.text = "abc";
  text.untrusted.append(1, 2);
  RegexScratch scratch(3);
  ASSERT_TRUE(pre_tokenizer.run(text, scratch).ok());
  EXPECT_EQ(text.text, " abc");
  EXPECT_THAT(text.pieces, ElementsAre(std::pair<size_t, size_t>(0, 4)));
  EXPECT_FALSE(text.untrusted.overlaps(0, 2));
  EXPECT_TRUE(text.untrusted.overlaps(2, 3));
  EXPECT_FALSE(text.untrusted.overlaps(3, 4));
}

}  // namespace
}  // namespace tensorfold
