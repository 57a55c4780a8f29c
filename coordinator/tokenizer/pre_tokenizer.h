// Cuts a text into pre-tokens, inside which byte pairs merge.
//
// Source: tokenizers' pre_tokenizers Split, Digits and ByteLevel. A Sequence of them is a list of steps here.
// ByteLevel's rewriting of bytes as printable characters does not happen: bytes stay bytes (see bpe.h).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "coordinator/tokenizer/split_regex.h"
#include "coordinator/tokenizer/untrusted_ranges.h"

namespace tensorfold {

// What becomes of the matches of a Split.
enum class SplitBehavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };

struct PreTokenizerStep {
  bool add_prefix_space = false;      // first put a blank before each piece that has none
  std::unique_ptr<SplitRegex> regex;  // null: no cut
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  // what lies between the matches counts as the matches
};

// A text and the pre-tokens [begin, end) in it, in order; marks of untrusted bytes.
struct PreTokenizedText {
  std::string text;
  UntrustedRanges untrusted;
  std::vector<std::pair<size_t, size_t>> pieces;
};

// Immutable after construction; thread-safe.
class PreTokenizer {
 public:
  explicit PreTokenizer(std::vector<PreTokenizerStep> steps) : steps_(std::move(steps)) {}

  // Takes one stretch of text between added tokens and fills `pieces`; `text` and the marks change where a step adds a
  // blank. Errors: see SplitRegex::split.
  absl::Status run(PreTokenizedText& text, RegexScratch& scratch) const;

 private:
  std::vector<PreTokenizerStep> steps_;
};

// Joins or drops pieces of one text as `behavior` says and appends what is left to `out`, moved by `offset`. Exposed
// for tests.
void apply_behavior(SplitBehavior behavior, const std::vector<RegexPiece>& pieces, size_t offset,
                    std::vector<std::pair<size_t, size_t>>& out);

}  // namespace tensorfold
