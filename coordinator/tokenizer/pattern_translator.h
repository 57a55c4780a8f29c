// Rewrites a regex of a tokenizer.json for PCRE2.
//
// The Hugging Face library compiles it with Oniguruma, Ruby syntax, Unicode 16.0. PCRE2 reads much of that text but
// means other things by it: another Unicode version, another \s, ^ and $ for the whole text, Script_Extensions for
// \p{Han}, {1,3}+ as possessive. The translator therefore reads the pattern itself and writes one that has a single
// meaning in every PCRE2 from Unicode 14.0 on. What it cannot write with the same meaning is an error that names the
// construct and its position. (One known difference is left: \p{Mn} and \p{Mc} alone disagree on U+1171E; \p{M} does
// not.)
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace tensorfold {

inline constexpr size_t kMaxPatternBytes = 16384;

// `pattern` (UTF-8, Oniguruma's Ruby syntax) for pcre2_compile with PCRE2_UTF | PCRE2_UCP.
absl::StatusOr<std::string> translate_pattern(std::string_view pattern);

// A PCRE2 pattern that matches `text` itself.
std::string literal_pattern(std::string_view text);

// A PCRE2 pattern for one character that Rust's char::is_numeric accepts (the Digits pre-tokenizer).
std::string numeric_pattern();

// A PCRE2 pattern for one word character as Rust's regex crate sees it (single_word of added tokens).
std::string word_pattern();

}  // namespace tensorfold
