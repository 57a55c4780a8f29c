// Classes of tokens by their folded texts, against the tokenizers library (make_expected.py).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/vocabulary/compressed_vocabulary.h"
#include "worker/vocabulary/folding.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;

#include "tests/worker/vocabulary/expected.inc"

uint64_t fnv(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x100000001b3u; }
constexpr uint64_t kStart = 0xcbf29ce484222325u;

// Protects: what every single code point becomes.
TEST(Folding, EveryCodePointAsTheLibrary) {
  uint64_t hash = kStart;
  for (char32_t code = 0; code < 0x110000; ++code) {
    if (code >= 0xD800 && code < 0xE000) continue;
    hash = fnv(hash, code);
    for (const char32_t c : folded(std::u32string_view(&code, 1))) hash = fnv(hash, c);
  }
  EXPECT_EQ(hash, kFoldings);
}

// Protects: UTF-8 is read and written whole, and what is no UTF-8 is told from it.
TEST(Folding, CodePoints) {
  const std::u32string all = {0x0, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF};
  std::string text;
  for (const char32_t c : all) append_code_point(c, text);
  EXPECT_EQ(code_points(text), all);
  for (const char* bad :
       {"\xC3", "\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\x80", "\xF0\x9F\x98"}) {
    EXPECT_FALSE(code_points(bad).has_value());
  }
}

// Protects: blanks, accents, widths, parts of characters and added tokens fall into the library's classes.
TEST(CompressedVocabulary, AwkwardTokens) {
  const auto found = compress_vocabulary(kTokenizer, "tokenizer.json");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->class_of, std::vector<int32_t>(std::begin(kClassOf), std::end(kClassOf)));
  EXPECT_EQ(found->classes, kClasses);
}

// Protects: the same of a whole trained vocabulary.
TEST(CompressedVocabulary, Sprout) {
  const auto found = read_compressed_vocabulary(std::string(TENSORFOLD_SOURCE_DIR) + "/deploy/models/sprout");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->class_of.size(), kSproutTokens);
  EXPECT_EQ(found->classes, kSproutClasses);
  uint64_t hash = kStart;
  for (const int32_t id : found->class_of) hash = fnv(hash, static_cast<uint64_t>(id));
  EXPECT_EQ(hash, kSproutHash);
}

// Protects: a file that does not say what its tokens are is refused by the key.
TEST(CompressedVocabulary, Refusals) {
  const auto message = [](const std::string& text) {
    const auto found = compress_vocabulary(text, "t.json");
    return found.ok() ? std::string("read") : std::string(found.status().message());
  };
  EXPECT_THAT(message("[]"), HasSubstr("t.json"));
  EXPECT_THAT(message("{}"), HasSubstr("decoder is not ByteLevel"));
  const std::string decoder = R"("decoder":{"type":"Sequence","decoders":[{"type":"ByteLevel"}]})";
  EXPECT_THAT(message("{" + decoder + "}"), HasSubstr("model.vocab"));
  const auto with = [&](const std::string& vocab, const std::string& more = "") {
    return message("{" + decoder + R"(,"model":{"vocab":)" + vocab + "}" + more + "}");
  };
  EXPECT_EQ(with(R"({"a":0})"), "read");
  EXPECT_THAT(with(R"({"a":-1})"), HasSubstr("has id -1"));
  EXPECT_THAT(with(R"({"a":99999999999})"), HasSubstr("allowed: 0 to"));
  EXPECT_THAT(with(R"({"a":0,"b":0})"), HasSubstr("is also that of"));
  EXPECT_THAT(with(R"({"a":0,"b":2})"), HasSubstr("no token has id 1"));
  EXPECT_THAT(with(R"({"a":0})", R"(,"added_tokens":[{"id":1}])"), HasSubstr("added_tokens holds"));
  EXPECT_THAT(with(R"({"a":0})", R"(,"added_tokens":{})"), HasSubstr("added_tokens is no list"));
}

}  // namespace
}  // namespace tensorfold
