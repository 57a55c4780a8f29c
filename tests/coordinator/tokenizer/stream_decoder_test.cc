#include "coordinator/tokenizer/stream_decoder.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/coordinator/tokenizer/test_tokenizers.h"

namespace tensorfold {
namespace {

// Protects that a character split over tokens comes out whole, and only when it is whole.
TEST(StreamDecoderTest, HoldsBackUnfinishedCharacters) {
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::parse(TokenizerParts().json());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  StreamDecoder stream(**tokenizer);  // ids are bytes here
  EXPECT_EQ(stream.push('a'), "a");
  EXPECT_EQ(stream.push(0xF0), "");
  EXPECT_EQ(stream.push(0x9F), "");
  EXPECT_EQ(stream.push(0x98), "");
  EXPECT_EQ(stream.push(0x80), "😀");
  EXPECT_EQ(stream.push(0xE2), "");
  EXPECT_EQ(stream.push('b'), "\uFFFDb");  // it never became a character
  EXPECT_EQ(stream.push(0x80), "\uFFFD");
  EXPECT_EQ(stream.push(0xC3), "");
  EXPECT_EQ(stream.push(9999), "");  // no such token
  EXPECT_EQ(stream.flush(), "\uFFFD");
  EXPECT_EQ(stream.flush(), "");
}

// Protects the contract: pushes plus flush equal decode, for every pair and many triples of bytes.
TEST(StreamDecoderTest, EqualsDecodeForEveryBytePair) {
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::parse(TokenizerParts().json());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  for (int a = 0; a < 256; ++a) {
    for (int b = 0; b < 256; ++b) {
      for (const int c : {0x41, 0x80, 0x9F, 0xBF, 0xE0, 0xF4}) {
        const Ids ids = {a, b, c};
        StreamDecoder stream(**tokenizer);
        std::string text;
        for (const int32_t id : ids) text += stream.push(id);
        ASSERT_EQ(text + stream.flush(), (*tokenizer)->decode(ids)) << a << " " << b << " " << c;
      }
    }
  }
}

// Protects skip_special: a control token does not even break a character that stands around it.
TEST(StreamDecoderTest, SkipsSpecialTokens) {
  TokenizerParts parts;
  parts.added_tokens = added_token(256, "<|end|>", "special");
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::parse(parts.json());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  StreamDecoder hidden(**tokenizer, true), shown(**tokenizer);
  EXPECT_EQ(hidden.push(0xC3), "");
  EXPECT_EQ(hidden.push(256), "");
  EXPECT_EQ(hidden.push(0xA9), "é");
  EXPECT_EQ(shown.push(0xC3), "");
  EXPECT_EQ(shown.push(256), "\uFFFD<|end|>");
}

}  // namespace
}  // namespace tensorfold
