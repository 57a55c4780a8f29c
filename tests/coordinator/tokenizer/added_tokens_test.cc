#include "coordinator/tokenizer/added_tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tensorfold {
namespace {

using ::testing::ElementsAre;

AddedToken token(int32_t id, std::string content) {
  AddedToken out;
  out.id = id;
  out.content = std::move(content);
  return out;
}

std::vector<std::string> find(const AddedTokenMatcher& matcher, std::string_view text,
                              AddedTokens mode = AddedTokens::kAll, const UntrustedRanges& untrusted = {}) {
  RegexScratch scratch(text.size());
  std::vector<TextSpan> spans;
  const absl::Status status = matcher.find(text, untrusted, mode, scratch, spans);
  EXPECT_TRUE(status.ok()) << status;
  std::vector<std::string> out;
  for (const TextSpan& span : spans) {
    out.push_back((span.id < 0 ? "" : std::to_string(span.id) + "=") +
                  std::string(text.substr(span.begin, span.end - span.begin)));
  }
  return out;
}

// Protects leftmost, then longest, and that matches do not overlap.
TEST(AddedTokenMatcherTest, LeftmostLongest) {
  AddedTokenMatcher matcher;
  ASSERT_TRUE(matcher.add(token(1, "ab"), "ab").ok());
  ASSERT_TRUE(matcher.add(token(2, "abcd"), "abcd").ok());
  ASSERT_TRUE(matcher.add(token(3, "bcde"), "bcde").ok());
  EXPECT_THAT(find(matcher, "xabcde"), ElementsAre("x", "2=abcd", "e"));
  EXPECT_THAT(find(matcher, "abcabab"), ElementsAre("1=ab", "c", "1=ab", "1=ab"));
  EXPECT_THAT(find(matcher, ""), ElementsAre());
  EXPECT_FALSE(matcher.add(token(9, "ab"), "ab").ok());
}

// Protects the flags single_word, lstrip and rstrip.
TEST(AddedTokenMatcherTest, Flags) {
  AddedTokenMatcher matcher;
  AddedToken word = token(1, "alone"), mask = token(2, "<m>"), pad = token(3, "<p>");
  word.single_word = mask.lstrip = pad.rstrip = true;
  ASSERT_TRUE(matcher.add(word, "alone").ok());
  ASSERT_TRUE(matcher.add(mask, "<m>").ok());
  ASSERT_TRUE(matcher.add(pad, "<p>").ok());
  EXPECT_THAT(find(matcher, "alone alones éalone -alone"), ElementsAre("1=alone", " alones éalone -", "1=alone"));
  EXPECT_THAT(find(matcher, "a \n\u3000<m> b"), ElementsAre("a", "2= \n\u3000<m>", " b"));
  EXPECT_THAT(find(matcher, "a <p> \tb"), ElementsAre("a ", "3=<p> \t", "b"));
  EXPECT_THAT(find(matcher, "<p>  <m>"), ElementsAre("3=<p>  ", "2=<m>"));
}

// Protects the rule that nothing a user wrote becomes part of a match, from either side.
TEST(AddedTokenMatcherTest, NoMatchReachesIntoUntrustedText) {
  AddedTokenMatcher matcher;
  AddedToken mask = token(2, "<mm>");
  mask.lstrip = mask.rstrip = true;
  ASSERT_TRUE(matcher.add(token(1, "<m"), "<m").ok());
  ASSERT_TRUE(matcher.add(mask, "<mm>").ok());
  const std::string text = " <mm> <mm>";
  const auto with = [&](size_t begin, size_t end) {
    UntrustedRanges untrusted;
    untrusted.append(begin, end);
    return find(matcher, text, AddedTokens::kAll, untrusted);
  };
  EXPECT_THAT(with(0, 10), ElementsAre(text));
  EXPECT_THAT(with(3, 4), ElementsAre(" ", "1=<m", "m>", "2= <mm>"));  // the longest that is still trusted
  EXPECT_THAT(with(1, 2), ElementsAre(" <mm>", "2= <mm>"));
  EXPECT_THAT(with(0, 1), ElementsAre(" ", "2=<mm> ", "2=<mm>"));  // the user's blank is not taken along
  EXPECT_THAT(with(5, 6), ElementsAre("2= <mm>", " ", "2=<mm>"));
}

// Protects the modes: special tokens alone can be shut out; a match that is shut out is still consumed, as in the
// library.
TEST(AddedTokenMatcherTest, Modes) {
  AddedTokenMatcher matcher;
  AddedToken special = token(1, "<s>");
  special.special = true;
  ASSERT_TRUE(matcher.add(special, "<s>").ok());
  ASSERT_TRUE(matcher.add(token(2, "s>x"), "s>x").ok());
  EXPECT_THAT(find(matcher, "<s>s>x"), ElementsAre("1=<s>", "2=s>x"));
  EXPECT_THAT(find(matcher, "<s>xs>x", AddedTokens::kNonSpecial), ElementsAre("<s>x", "2=s>x"));
  EXPECT_THAT(find(matcher, "<s>s>x", AddedTokens::kNone), ElementsAre("<s>s>x"));
}

}  // namespace
}  // namespace tensorfold
