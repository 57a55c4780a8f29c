#include "coordinator/tokenizer/pattern_translator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "coordinator/tokenizer/split_regex.h"
#include "coordinator/tokenizer/utf8.h"

namespace tensorfold {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::unique_ptr<SplitRegex> compile(std::string_view pattern) {
  absl::StatusOr<std::string> translated = translate_pattern(pattern);
  EXPECT_TRUE(translated.ok()) << translated.status();
  absl::StatusOr<std::unique_ptr<SplitRegex>> regex = SplitRegex::compile(*translated, std::string(pattern));
  EXPECT_TRUE(regex.ok()) << regex.status();
  return *std::move(regex);
}

// All pieces of `text`, as the Isolated behaviour cuts it; empty ones left out.
std::vector<std::string> pieces(std::string_view pattern, std::string_view text) {
  RegexScratch scratch(text.size());
  std::vector<RegexPiece> found;
  const absl::Status status = compile(pattern)->split(text, scratch, found);
  EXPECT_TRUE(status.ok()) << status;
  std::vector<std::string> out;
  for (const RegexPiece& piece : found) {
    if (piece.begin != piece.end) out.emplace_back(text.substr(piece.begin, piece.end - piece.begin));
  }
  return out;
}

std::string refusal(std::string_view pattern) {
  absl::StatusOr<std::string> translated = translate_pattern(pattern);
  EXPECT_FALSE(translated.ok()) << pattern;
  return translated.ok() ? "" : std::string(translated.status().message());
}

// Protects Ruby's meanings where Perl's differ; each expectation was read off the tokenizers library.
TEST(PatternTranslator, RubySyntax) {
  EXPECT_THAT(pieces("a{,2}", "aaab"), ElementsAre("aa", "a", "b"));
  EXPECT_THAT(pieces("a{2}?", "aaab"), ElementsAre("aa", "a", "b"));
  EXPECT_THAT(pieces("\\p{N}{1,3}+", "12345678"), ElementsAre("12345678"));  // repeats, is not possessive
  EXPECT_THAT(pieces("a++b", "aab"), ElementsAre("aab"));
  EXPECT_THAT(pieces("^b", "a\nb\n"), ElementsAre("a\n", "b", "\n"));
  EXPECT_THAT(pieces("a$", "a\na"), ElementsAre("a", "\n", "a"));
  EXPECT_THAT(pieces(".+", "a\nb"), ElementsAre("a", "\n", "b"));
  EXPECT_THAT(pieces("(?m:.+)", "a\nb"), ElementsAre("a\nb"));
  EXPECT_THAT(pieces("\\h+", "zab1"), ElementsAre("z", "ab1"));
  EXPECT_THAT(pieces("\\v", "a\vb"), ElementsAre("a", "\v", "b"));
  EXPECT_THAT(pieces("\\u0041", "xAx"), ElementsAre("x", "A", "x"));
  EXPECT_THAT(pieces("(?=b)", "ab b"), ElementsAre("a", "b ", "b"));
  EXPECT_THAT(pieces("x*", "axxb"), ElementsAre("a", "xx", "b"));
  EXPECT_THAT(pieces("a{", "a{"), ElementsAre("a{"));
  EXPECT_THAT(pieces("]", "a]b"), ElementsAre("a", "]", "b"));
  EXPECT_THAT(pieces("[]a]+", "x]a"), ElementsAre("x", "]a"));
  EXPECT_THAT(pieces("[^\\S\\n]+", "a \n b"), ElementsAre("a", " ", "\n", " ", "b"));
}

// Protects the classes: Unicode 16.0, White_Space for \s, scripts and not script extensions.
TEST(PatternTranslator, Classes) {
  EXPECT_THAT(pieces("\\s+", "a\u0085\u2028\u3000b"), ElementsAre("a", "\u0085\u2028\u3000", "b"));
  EXPECT_THAT(pieces("\\s+", "a\u180eb"), ElementsAre("a\u180eb"));  // no White_Space since Unicode 6.3
  EXPECT_THAT(pieces("\\p{L}+", "1\U000323AF1"), ElementsAre("1", "\U000323AF", "1"));  // Unicode 15
  EXPECT_THAT(pieces("[^\\p{L}]+", "1\u1C8A1"), ElementsAre("1", "\u1C8A", "1"));       // Unicode 16
  EXPECT_THAT(pieces("\\p{Han}", "\u3001中"), ElementsAre("\u3001", "中"));  // the comma has Han as an extension only
  EXPECT_THAT(pieces("(?i:'s)", "a'ſb"), ElementsAre("a", "'ſ", "b"));       // long s folds to s
  EXPECT_THAT(pieces("\\p{^L}+", "ab12"), ElementsAre("ab", "12"));
  EXPECT_THAT(pieces("\\bb\\w*", "ab bc"), ElementsAre("ab ", "bc"));
}

// Protects that whatever could mean something else is refused by name, not guessed.
TEST(PatternTranslator, Refusals) {
  EXPECT_THAT(refusal("a\\Gb"), HasSubstr("the escape '\\G'"));
  EXPECT_THAT(refusal("(a)\\1"), HasSubstr("the escape '\\1'"));
  EXPECT_THAT(refusal("\\p{Foo}"), HasSubstr("the property 'Foo'"));
  EXPECT_THAT(refusal("\\p{Cn}"), HasSubstr("the property 'Cn'"));
  EXPECT_THAT(refusal("[a[bc]]"), HasSubstr("'[' inside a class"));
  EXPECT_THAT(refusal("[a&&b]"), HasSubstr("'&&'"));
  EXPECT_THAT(refusal("(?<name>a)"), HasSubstr("the group"));
  EXPECT_THAT(refusal("(?x:a)"), HasSubstr("the group"));
  EXPECT_THAT(refusal("(?i:stop)"), HasSubstr("case folding joins"));
  EXPECT_THAT(refusal("(?i:é)"), HasSubstr("beyond ASCII"));
  EXPECT_THAT(refusal("(?i:\\p{Lu})"), HasSubstr("where case is ignored"));
  EXPECT_THAT(refusal("a(?i)b"), HasSubstr("start of its group"));
  EXPECT_THAT(refusal("*a"), HasSubstr("nothing to repeat"));
  EXPECT_THAT(refusal("a**"), HasSubstr("nothing to repeat"));
  EXPECT_THAT(refusal("a{2000}"), HasSubstr("repeat count"));
  EXPECT_THAT(refusal("a{3,1}"), HasSubstr("repeat count"));
  EXPECT_THAT(refusal("(a"), HasSubstr("never closed"));
  EXPECT_THAT(refusal("a)"), HasSubstr("without '('"));
  EXPECT_THAT(refusal("[a"), HasSubstr("never closed"));
  EXPECT_THAT(refusal("[\\P{L}]"), HasSubstr("negated property"));
  EXPECT_THAT(refusal("[z-a]"), HasSubstr("range"));
  EXPECT_THAT(refusal("\\"), HasSubstr("backslash"));
  EXPECT_THAT(refusal("\\x{110000}"), HasSubstr("\\x escape"));
  EXPECT_THAT(refusal("\\xff"), HasSubstr("names a byte"));
  EXPECT_THAT(refusal(std::string(kMaxPatternBytes + 1, 'a')), HasSubstr("the limit is"));
  EXPECT_THAT(refusal("\xff"), HasSubstr("not UTF-8"));
}

// Protects against a small pattern that grows without end when its classes are written out.
TEST(PatternTranslator, GrowthIsBounded) {
  std::string pattern, inside = "[";
  for (int i = 0; i < 8000; ++i) {
    pattern += "\\w";
    inside += "\\w";
  }
  EXPECT_THAT(refusal(pattern), HasSubstr("bytes of classes"));
  EXPECT_THAT(refusal(inside + "]"), HasSubstr("bytes of classes"));
}

// Protects the server from text that makes a careless regex backtrack: an error that names the limit, and soon.
TEST(SplitRegex, HostileTextGivesAnErrorThatNamesTheLimit) {
  for (const char* pattern : {"(?:a*)*[bd]", "(?:a|a)*[bd]", "(?:a+)+(?=[bd])", "(a?){30}a{30}[bd]"}) {
    const std::string text(2000, 'a');
    RegexScratch scratch(text.size());
    std::vector<RegexPiece> found;
    const absl::Status status = compile(pattern)->split(text, scratch, found);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << pattern << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("limit"));
  }
}

// Protects long runs that are no attack: a megabyte of blanks needs a million steps once, and gets them.
TEST(SplitRegex, LongRunsPass) {
  const std::string blanks(1 << 20, ' ');
  EXPECT_THAT(pieces("\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+|\\S", blanks + "x").size(), 3u);
}

// Protects single_word and Digits, which are Rust's classes and not Oniguruma's.
TEST(PatternTranslator, RustClasses) {
  const auto matches = [](const std::string& pattern, std::string_view text) {
    absl::StatusOr<std::unique_ptr<SplitRegex>> regex = SplitRegex::compile(pattern, "test");
    EXPECT_TRUE(regex.ok()) << regex.status();
    RegexScratch scratch(text.size());
    std::vector<RegexPiece> found;
    EXPECT_TRUE((*regex)->split(text, scratch, found).ok());
    return found.front().is_match;
  };
  EXPECT_FALSE(matches(word_pattern(), "²"));
  EXPECT_TRUE(matches(word_pattern(), "\u200d"));
  EXPECT_TRUE(matches(word_pattern(), "é"));
  EXPECT_TRUE(matches(numeric_pattern(), "½"));
  EXPECT_TRUE(matches(numeric_pattern(), "\U00011DE0"));
  EXPECT_TRUE(matches(literal_pattern("a.b]"), "a.b]"));
  EXPECT_FALSE(matches(literal_pattern("a.b]"), "axb]"));
}

}  // namespace
}  // namespace tensorfold
