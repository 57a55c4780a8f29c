// Tokens that are looked for in the text itself, before anything else happens to it.
//
// Source: tokenizers' added_vocabulary. Two passes: tokens with normalized=false are found in the raw text, the others
// in the normalized text between them. Leftmost wins, then longest; a match that single_word or the mode rejects is
// consumed all the same.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "coordinator/tokenizer/split_regex.h"
#include "coordinator/tokenizer/token_types.h"
#include "coordinator/tokenizer/untrusted_ranges.h"

namespace tensorfold {

// A stretch [begin, end) of a text; `id` < 0: ordinary text.
struct TextSpan {
  size_t begin, end;
  int32_t id;
};

// Immutable after build; thread-safe.
class AddedTokenMatcher {
 public:
  // `pattern` is what to look for (normalized already where that applies). An error if two tokens have one pattern.
  absl::Status add(const AddedToken& token, std::string_view pattern);

  bool empty() const { return tokens_.empty(); }

  // Cuts `text` into ordinary stretches and added tokens. No match, and no white space taken along, reaches into an
  // untrusted byte. An error only if single_word needs the regex and it fails.
  absl::Status find(std::string_view text, const UntrustedRanges& untrusted, AddedTokens mode, RegexScratch& scratch,
                    std::vector<TextSpan>& out) const;

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  // The longest pattern that starts at `at` and ends by `limit`; kNone if none does.
  uint32_t longest(std::string_view text, size_t at, size_t limit) const;
  absl::Status stands_alone(std::string_view text, size_t begin, size_t end, RegexScratch& scratch, bool& alone) const;

  struct Entry {
    AddedToken token;
    size_t pattern_size;
  };
  std::vector<Entry> tokens_;
  std::array<bool, 256> first_byte_{};
  // The trie: (node << 8 | byte) → node, and what ends at a node. Node 0 is the root.
  absl::flat_hash_map<uint64_t, uint32_t> edges_;
  std::vector<uint32_t> ends_{kNone};
  std::unique_ptr<SplitRegex> word_;  // one word character; only if a token has single_word
};

}  // namespace tensorfold
