#include "coordinator/tokenizer/tokenizer_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/coordinator/tokenizer/test_tokenizers.h"

namespace tensorfold {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string refusal(const std::string& json) {
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::parse(json);
  EXPECT_FALSE(tokenizer.ok()) << json.substr(0, 300);
  return tokenizer.ok() ? "" : std::string(tokenizer.status().message());
}

std::string refusal(const TokenizerParts& parts) { return refusal(parts.json()); }

// Protects both ways to write merges.
TEST(TokenizerJson, MergesAsTextOrPairs) {
  for (const char* merges : {R"("a b","ab c")", R"(["a","b"],["ab","c"])"}) {
    TokenizerParts parts;
    parts.extra_vocabulary = R"(,"ab":256,"abc":257)";
    parts.merges = merges;
    absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::parse(parts.json());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    EXPECT_EQ(*(*tokenizer)->encode("abcab"), (Ids{257, 256}));
  }
}

// Protects that each thing that is not read is named, with its place, and what is read instead.
TEST(TokenizerJson, NamesWhatItRefuses) {
  TokenizerParts p;
  p.normalizer = R"({"type":"NFKC"})";
  EXPECT_THAT(refusal(p),
              AllOf(HasSubstr("normalizer: found"), HasSubstr("'NFKC'"), HasSubstr("NFC and Sequence are read")));
  p = {};
  p.normalizer = R"({"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Lowercase"}]})";
  EXPECT_THAT(refusal(p), AllOf(HasSubstr("normalizer.normalizers[1]"), HasSubstr("'Lowercase'")));
  p = {};
  p.pre_tokenizer = R"({"type":"Metaspace"})";
  EXPECT_THAT(refusal(p), AllOf(HasSubstr("pre_tokenizer: found"), HasSubstr("'Metaspace'")));
  p.pre_tokenizer = "null";
  EXPECT_THAT(refusal(p), AllOf(HasSubstr("pre_tokenizer: found nothing"), HasSubstr("ByteLevel")));
  p.pre_tokenizer = R"({"type":"Sequence","pretokenizers":[{"type":"ByteLevel"},{"type":"Digits"}]})";
  EXPECT_THAT(refusal(p), AllOf(HasSubstr("pretokenizers[1]"), HasSubstr("after ByteLevel")));
  p.pre_tokenizer = R"({"type":"Split","pattern":{"Regex":"a"},"behavior":"Sideways","invert":false})";
  EXPECT_THAT(refusal(p), AllOf(HasSubstr("pre_tokenizer.behavior: found 'Sideways'"), HasSubstr("Isolated")));
  p.pre_tokenizer = R"({"type":"Split","pattern":{"Regex":"(a"},"behavior":"Isolated","invert":false})";
  EXPECT_THAT(refusal(p), AllOf(HasSubstr("pre_tokenizer.pattern.Regex"), HasSubstr("never closed")));
  p = {};
  p.post_processor = R"({"type":"BertProcessing"})";
  EXPECT_THAT(refusal(p), AllOf(HasSubstr("post_processor: found"), HasSubstr("TemplateProcessing")));
  p = {};
  p.decoder = "null";
  EXPECT_THAT(refusal(p), HasSubstr("decoder: found nothing"));
  p.decoder = R"({"type":"Sequence","decoders":[{"type":"ByteFallback"},{"type":"Fuse"}]})";
  EXPECT_THAT(refusal(p), HasSubstr("decoder: found an object of type 'Sequence'; ByteLevel is read"));
  p = {};
  p.model_options = R"(,"byte_fallback":true)";
  EXPECT_THAT(refusal(p), AllOf(HasSubstr("model.byte_fallback: found true"), HasSubstr("SentencePiece")));
  p.model_options = R"(,"dropout":0.1)";
  EXPECT_THAT(refusal(p), HasSubstr("model.dropout: found"));
  p.model_options = R"(,"end_of_word_suffix":"</w>")";
  EXPECT_THAT(refusal(p), HasSubstr("model.end_of_word_suffix: found '</w>'"));
}

// Protects against ids and merges that contradict each other.
TEST(TokenizerJson, ChecksIdsAndMerges) {
  TokenizerParts p;
  p.added_tokens = added_token(300, "<x>");
  EXPECT_THAT(refusal(p), AllOf(HasSubstr("added_tokens[0].id: found 300"), HasSubstr("256")));
  p.added_tokens = added_token(5, "a");
  EXPECT_THAT(refusal(p), HasSubstr("added_tokens[0].id: found 5"));
  p.added_tokens = R"({"id":256,"content":"<x>"})";
  EXPECT_THAT(refusal(p), HasSubstr("added_tokens[0].single_word: found nothing"));
  p = {};
  p.extra_vocabulary = R"(,"ab":7)";
  EXPECT_THAT(refusal(p), HasSubstr("id 7 belongs to both"));
  p.extra_vocabulary = R"(,"ab":-1)";
  EXPECT_THAT(refusal(p), HasSubstr("model.vocab['ab']: found -1"));
  p.extra_vocabulary = R"(,"ab":99999999999)";
  EXPECT_THAT(refusal(p), HasSubstr("model.vocab['ab']: found 99999999999"));
  p = {};
  p.merges = R"("a b")";
  EXPECT_THAT(refusal(p), AllOf(HasSubstr("model.merges[0]"), HasSubstr("'ab' is not in model.vocab")));
  p.merges = R"("a b c")";
  EXPECT_THAT(refusal(p), HasSubstr("model.merges[0]: found 'a b c'"));
  p = {};
  p.post_processor =
      R"({"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"x","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],)"
      R"("pair":[],"special_tokens":{"x":{"id":"x","ids":[999],"tokens":["x"]}}})";
  EXPECT_THAT(refusal(p), HasSubstr("post_processor: token 999"));
}

// Protects that a vocabulary without a rare control byte loads, as in the library (SmolLM2 lacks some), and drops it
// alone.
TEST(TokenizerJson, RareBytesMayLackAToken) {
  std::string json = TokenizerParts().json();
  const std::string entry = "\"\u0104\":4,";
  const size_t at = json.find(entry);
  ASSERT_NE(at, std::string::npos);
  json.erase(at, entry.size());
  const absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::parse(json);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->missing_bytes(), 1);
  EXPECT_EQ(*(*tokenizer)->encode(std::string("a\x04z")), *(*tokenizer)->encode("az"));
}

// Protects that a vocabulary which would lose ordinary text silently is refused.
TEST(TokenizerJson, EveryOrdinaryByteNeedsAToken) {
  std::string json = TokenizerParts().json();
  const size_t at = json.find("\"z\":122,");
  ASSERT_NE(at, std::string::npos);
  json.erase(at, 8);
  EXPECT_THAT(refusal(json), HasSubstr("no token for byte 0x7a"));
}

// Protects against JSON that is broken, deep, or of the wrong shape.
TEST(TokenizerJson, BrokenFiles) {
  EXPECT_THAT(refusal(std::string("")), HasSubstr("not JSON"));
  EXPECT_THAT(refusal(std::string("{")), HasSubstr("not JSON"));
  EXPECT_THAT(refusal(std::string(100000, '[')), HasSubstr("not JSON"));
  EXPECT_THAT(refusal(std::string("\"\xff\"")), HasSubstr("not JSON"));
  EXPECT_THAT(refusal(std::string("[]")), HasSubstr("found an array"));
  EXPECT_THAT(refusal(std::string("{}")), HasSubstr("model: found nothing"));
  EXPECT_THAT(refusal(std::string(R"({"version":"2.0"})")), HasSubstr("version: found '2.0'"));
  EXPECT_THAT(refusal(std::string(R"({"model":{"type":"Unigram"}})")), HasSubstr("model.type: found 'Unigram'; 'BPE'"));
}

// Protects that a user sees which file is wrong.
TEST(TokenizerJson, LoadNamesTheFile) {
  absl::StatusOr<std::unique_ptr<Tokenizer>> missing = Tokenizer::load("/no/such/tokenizer.json");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("/no/such/tokenizer.json"));
  absl::StatusOr<std::unique_ptr<Tokenizer>> wrong = Tokenizer::load(data_path("corpus"));
  EXPECT_THAT(std::string(wrong.status().message()),
              AllOf(HasSubstr("corpus.json"), HasSubstr("model: found nothing")));
}

}  // namespace
}  // namespace tensorfold
