#include "coordinator/tokenizer/utf8.h"

#include <gtest/gtest.h>

#include <string>

namespace tensorfold {
namespace {

// Protects the policy for malformed bytes: Python's bytes.decode('utf-8', 'replace'), sequence by sequence.
TEST(Utf8, SanitizeReplacesMaximalSubparts) {
  const std::string r = "\xEF\xBF\xBD";
  EXPECT_EQ(sanitize_utf8("plain é 中 😀"), "plain é 中 😀");
  EXPECT_EQ(sanitize_utf8("a\x80z"), "a" + r + "z");
  EXPECT_EQ(sanitize_utf8("\xC3("), r + "(");
  EXPECT_EQ(sanitize_utf8("\xC0\xAF"), r + r);  // overlong
  EXPECT_EQ(sanitize_utf8("\xE2\x82"), r);      // cut short: one
  EXPECT_EQ(sanitize_utf8("\xE2\x82(\xF0\x9F\x98"), r + "(" + r);
  EXPECT_EQ(sanitize_utf8("\xED\xA0\x80"), r + r + r);          // surrogate
  EXPECT_EQ(sanitize_utf8("\xF4\x90\x80\x80"), r + r + r + r);  // past U+10FFFF
  EXPECT_EQ(sanitize_utf8("\xFF\xFE"), r + r);
  EXPECT_EQ(sanitize_utf8(""), "");
}

// Protects that every scalar value survives writing and reading.
TEST(Utf8, RoundTripOfEveryCodePoint) {
  std::string bytes;
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    bytes.clear();
    append_utf8(c, bytes);
    const Utf8Step step = utf8_step(bytes);
    ASSERT_TRUE(step.valid && step.code_point == c && step.length == bytes.size()) << static_cast<uint32_t>(c);
    ASSERT_TRUE(is_valid_utf8(bytes));
  }
}

// Protects the stream decoder's rule for what may still become a character.
TEST(Utf8, IncompleteOnlyWhereMoreBytesCouldHelp) {
  EXPECT_TRUE(utf8_step("\xF0\x9F\x98").incomplete);
  EXPECT_TRUE(utf8_step("\xE2").incomplete);
  EXPECT_FALSE(utf8_step("\xE2(").incomplete);
  EXPECT_FALSE(utf8_step("\xED\xA0").incomplete);
  EXPECT_FALSE(utf8_step("\x80").incomplete);
}

}  // namespace
}  // namespace tensorfold
