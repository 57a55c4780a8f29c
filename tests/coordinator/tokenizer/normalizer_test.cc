#include "coordinator/tokenizer/normalizer.h"

#include <gtest/gtest.h>

#include <string>

#include "coordinator/tokenizer/untrusted_ranges.h"
#include "coordinator/tokenizer/utf8.h"

namespace tensorfold {
namespace {

std::string utf8(std::u32string_view text) {
  std::string out;
  for (const char32_t c : text) append_utf8(c, out);
  return out;
}

// Protects composition, ordering, blocking, exclusions and Hangul arithmetic against the rules of UAX 15.
TEST(Normalizer, Nfc) {
  EXPECT_EQ(normalize_nfc(utf8(U"cafe\u0301!")), utf8(U"caf\u00e9!"));
  EXPECT_EQ(normalize_nfc(utf8(U"a\u0323\u0302")), utf8(U"\u1ead"));
  EXPECT_EQ(normalize_nfc(utf8(U"a\u0302\u0323")), utf8(U"\u1ead"));                    // reordered first
  EXPECT_EQ(normalize_nfc(utf8(U"a\u0304\u0301\u0301")), utf8(U"\u0101\u0301\u0301"));  // an equal class blocks
  EXPECT_EQ(normalize_nfc(utf8(U"\u2126\u212b")), utf8(U"\u03a9\u00c5"));               // singletons
  EXPECT_EQ(normalize_nfc(utf8(U"\u0958")), utf8(U"\u0915\u093c"));                     // composition exclusion
  EXPECT_EQ(normalize_nfc(utf8(U"\u0344")), utf8(U"\u0308\u0301"));
  EXPECT_EQ(normalize_nfc(utf8(U"\u1112\u1161\u11ab")), utf8(U"\ud55c"));
  EXPECT_EQ(normalize_nfc(utf8(U"\uac00\u11a8")), utf8(U"\uac01"));
  EXPECT_EQ(normalize_nfc(utf8(U"\uac01\u11a8")), utf8(U"\uac01\u11a8"));
  EXPECT_EQ(normalize_nfc(utf8(U"\u0301a")), utf8(U"\u0301a"));
  EXPECT_EQ(normalize_nfc(""), "");
}

// Protects that the library's Unicode 9.0 is kept: marks from later versions stay where they stand.
TEST(Normalizer, NewerMarksDoNotMove) {
  const std::string text = utf8(U"a\u1df9\u0334");  // U+1DF9 came with Unicode 10
  EXPECT_EQ(normalize_nfc(text), text);
}

// Protects that the quick check never passes text that normalization would change.
TEST(Normalizer, QuickCheckIsSafe) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    append_utf8(c, text);
    const std::string normal = normalize_nfc(text);
    ASSERT_TRUE(normal == text || !is_quickly_nfc(text)) << static_cast<uint32_t>(c);
    ASSERT_EQ(normalize_nfc(normal), normal) << static_cast<uint32_t>(c);
  }
  EXPECT_FALSE(is_quickly_nfc(utf8(U"e\u0301")));
  EXPECT_TRUE(is_quickly_nfc("plain text, 中文, 한국어, Ünï"));
}

// Protects that a user's combining mark taints the character it joins, and nothing else.
TEST(Normalizer, MarksFollowTheText) {
  const std::string text = utf8(U"xe\u0301q\u0344z");
  UntrustedRanges ranges;
  ranges.append(2, 4);  // U+0301
  EXPECT_EQ(normalize_nfc(text, ranges), utf8(U"x\u00e9q\u0308\u0301z"));
  EXPECT_FALSE(ranges.overlaps(0, 1));
  EXPECT_TRUE(ranges.overlaps(1, 3));
  EXPECT_FALSE(ranges.overlaps(3, 9));
}

// Protects the answers that matching depends on: where trust begins and ends.
TEST(UntrustedRangesTest, Answers) {
  UntrustedRanges ranges;
  ranges.append(2, 4);
  ranges.append(4, 5);  // joins
  ranges.append(5, 5);  // nothing
  ranges.append(8, 9);
  EXPECT_FALSE(ranges.overlaps(0, 2));
  EXPECT_TRUE(ranges.overlaps(0, 3));
  EXPECT_TRUE(ranges.overlaps(4, 6));
  EXPECT_FALSE(ranges.overlaps(5, 8));
  EXPECT_EQ(ranges.trusted_end(0, 10), 2u);
  EXPECT_EQ(ranges.trusted_end(3, 10), 3u);
  EXPECT_EQ(ranges.trusted_end(5, 10), 8u);
  EXPECT_EQ(ranges.trusted_end(9, 10), 10u);
  EXPECT_EQ(ranges.trusted_begin(2), 0u);
  EXPECT_EQ(ranges.trusted_begin(4), 4u);
  EXPECT_EQ(ranges.trusted_begin(7), 5u);
  const UntrustedRanges part = ranges.slice(3, 9);
  EXPECT_TRUE(part.overlaps(0, 2));
  EXPECT_FALSE(part.overlaps(2, 5));
  EXPECT_TRUE(part.overlaps(5, 6));
}

}  // namespace
}  // namespace tensorfold
