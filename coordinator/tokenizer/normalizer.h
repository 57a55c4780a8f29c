// Unicode normalization form C, as the Hugging Face tokenizers library applies it.
//
// Source: Unicode Standard Annex 15. The tables are Unicode 9.0, which is what the normalization crate inside
// tokenizers 0.23 carries (unicode/make_tables.py checks each code point against the library); newer combining marks
// are therefore left where they stand, as the library leaves them.
#pragma once

#include <string>
#include <string_view>

#include "coordinator/tokenizer/untrusted_ranges.h"

namespace tensorfold {

// Whether normalize_nfc would leave `text` alone. May say no for a text that turns out to be normal already.
bool is_quickly_nfc(std::string_view text);

// `text` (valid UTF-8) in form C. `ranges` marks untrusted bytes of `text` and is replaced by the marks of the result:
// a character composed from trusted and untrusted ones is untrusted. Thread-safe; linear but for runs of combining
// marks, which are sorted.
std::string normalize_nfc(std::string_view text, UntrustedRanges& ranges);

// The same without marks.
std::string normalize_nfc(std::string_view text);

}  // namespace tensorfold
