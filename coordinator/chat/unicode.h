#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tensorfold {

// The little of Unicode that Python's str methods need, for valid UTF-8.

bool is_whole_utf8(std::string_view s);
// The code point at `*pos`; moves `*pos` behind it. `s` must be valid UTF-8 and *pos < s.size().
char32_t next_code_point(std::string_view s, size_t* pos);
// The byte where the code point that ends at `pos` begins; pos > 0.
size_t previous_boundary(std::string_view s, size_t pos);
size_t count_code_points(std::string_view s);
// The byte offset of code point `index`, or s.size().
size_t byte_offset(std::string_view s, size_t index);
void append_utf8(std::string* out, char32_t c);
// str.isspace() of Python, which is also \s of its regular expressions.
bool is_python_space(char32_t c);
std::string_view strip_left(std::string_view s);
std::string_view strip_right(std::string_view s);
// Full case mapping (one character may become three); the final sigma is not told apart.
void append_upper(std::string* out, char32_t c);
void append_lower(std::string* out, char32_t c);
// Whether the character has another case.
bool is_cased(char32_t c);
std::string to_upper(std::string_view s);
std::string to_lower(std::string_view s);

}  // namespace tensorfold
