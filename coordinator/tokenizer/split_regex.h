// A compiled regex of a pre-tokenizer, run by PCRE2 with bounded work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tensorfold {

// A stretch [begin, end) of a text and whether the regex matched it.
struct RegexPiece {
  size_t begin, end;
  bool is_match;
};

// The scratch memory and the work allowance of one encode call. Belongs to one thread at a time.
class RegexScratch {
 public:
  // Allows work in proportion to a text of `text_bytes` bytes.
  explicit RegexScratch(size_t text_bytes);
  ~RegexScratch();
  RegexScratch(const RegexScratch&) = delete;
  RegexScratch& operator=(const RegexScratch&) = delete;

 private:
  friend class SplitRegex;
  struct State;
  std::unique_ptr<State> state_;
};

// Immutable after compile; any number of threads may call split, each with its own scratch.
class SplitRegex {
 public:
  // `pcre_pattern` comes from pattern_translator.h; `shown` is what error messages call it.
  static absl::StatusOr<std::unique_ptr<SplitRegex>> compile(const std::string& pcre_pattern, std::string shown);
  ~SplitRegex();
  SplitRegex(const SplitRegex&) = delete;
  SplitRegex& operator=(const SplitRegex&) = delete;

  // Cuts `text` (valid UTF-8) into matches and what lies between; the pieces cover it. ResourceExhausted names the
  // limit if the regex backtracks more than the scratch allows: hostile text costs an error, not time.
  absl::Status split(std::string_view text, RegexScratch& scratch, std::vector<RegexPiece>& out) const;

 private:
  struct Compiled;
  SplitRegex();

  // Finds the first match at or after `from`; `found` says whether there is one.
  absl::Status find(std::string_view text, size_t from, RegexScratch& scratch, bool& found, RegexPiece& match) const;
  absl::Status find_slowly(std::string_view text, size_t from, RegexScratch& scratch, bool& found,
                           RegexPiece& match) const;
  int run(std::string_view text, size_t from, uint32_t options, uint32_t match_limit, RegexScratch& scratch) const;
  absl::Status failure(int code, size_t at) const;

  std::unique_ptr<Compiled> compiled_;
  std::string shown_;
};

}  // namespace tensorfold
