// UTF-8, read and written the way Python's strings do, because that is what reaches the Hugging Face tokenizer.
// All functions are pure and thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tensorfold {

// One step through bytes that may be malformed.
struct Utf8Step {
  char32_t code_point;  // U+FFFD where the bytes are malformed
  size_t length;        // bytes consumed, at least 1
  bool valid;
  bool incomplete;  // not valid, and only because the text ends inside a character that began well
};

// The character at the start of `bytes`, which must not be empty. A malformed sequence is consumed up to the longest
// prefix that could have begun a character (Unicode 3.9 "maximal subpart", as Python's errors="replace" and Rust's
// from_utf8_lossy do).
Utf8Step utf8_step(std::string_view bytes);

// Appends `code_point` (a Unicode scalar value) to `out`.
void append_utf8(char32_t code_point, std::string& out);

// Whether all of `bytes` is well-formed UTF-8.
bool is_valid_utf8(std::string_view bytes);

// `bytes` with each malformed sequence replaced by U+FFFD: Python's bytes.decode('utf-8', 'replace').
std::string sanitize_utf8(std::string_view bytes);

}  // namespace tensorfold
