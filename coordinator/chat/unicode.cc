#include "coordinator/chat/unicode.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace tensorfold {
namespace {

// The code points first, first + stride, … last map to themselves plus delta.
struct CaseRange {
  uint32_t first, last;
  uint32_t stride;
  int32_t delta;
};

struct CaseSpecial {
  uint32_t code;
  uint32_t to[3];  // zero-padded
};

#include "coordinator/chat/case_tables.inc"

template <size_t R, size_t S>
void append_case(std::string* out, char32_t c, const CaseRange (&ranges)[R], const CaseSpecial (&specials)[S]) {
  const auto range = std::upper_bound(std::begin(ranges), std::end(ranges), c,
                                      [](char32_t v, const CaseRange& r) { return v <= r.last; });
  if (range != std::end(ranges) && c >= range->first && (c - range->first) % range->stride == 0) {
    append_utf8(out, static_cast<char32_t>(static_cast<int64_t>(c) + range->delta));
    return;
  }
  const auto special = std::lower_bound(std::begin(specials), std::end(specials), c,
                                        [](const CaseSpecial& s, char32_t v) { return s.code < v; });
  if (special != std::end(specials) && special->code == c) {
    for (uint32_t to : special->to) {
      if (to != 0) append_utf8(out, to);
    }
    return;
  }
  append_utf8(out, c);
}

// Length of the sequence that begins with `lead`; 0 for a byte that begins none.
size_t sequence_length(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead < 0xE0) return 2;
  if (lead >= 0xE0 && lead < 0xF0) return 3;
  if (lead >= 0xF0 && lead < 0xF5) return 4;
  return 0;
}

}  // namespace

bool is_whole_utf8(std::string_view s) {
  size_t i = 0;
  while (i < s.size()) {
    const auto lead = static_cast<unsigned char>(s[i]);
    const size_t n = sequence_length(lead);
    if (n == 0 || n > s.size() - i) return false;
    for (size_t k = 1; k < n; ++k) {
      if ((static_cast<unsigned char>(s[i + k]) & 0xC0) != 0x80) return false;
    }
    if (n > 2) {
      const auto second = static_cast<unsigned char>(s[i + 1]);
      if (lead == 0xE0 && second < 0xA0) return false;   // overlong
      if (lead == 0xED && second >= 0xA0) return false;  // surrogate
      if (lead == 0xF0 && second < 0x90) return false;   // overlong
      if (lead == 0xF4 && second >= 0x90) return false;  // beyond U+10FFFF
    }
    i += n;
  }
  return true;
}

char32_t next_code_point(std::string_view s, size_t* pos) {
  const auto lead = static_cast<unsigned char>(s[*pos]);
  const size_t n = std::max<size_t>(1, sequence_length(lead));
  char32_t c = n == 1 ? lead : lead & (0x7Fu >> n);
  for (size_t k = 1; k < n && *pos + k < s.size(); ++k) c = c << 6 | (static_cast<unsigned char>(s[*pos + k]) & 0x3F);
  *pos = std::min(s.size(), *pos + n);
  return c;
}

size_t previous_boundary(std::string_view s, size_t pos) {
  --pos;
  while (pos > 0 && (static_cast<unsigned char>(s[pos]) & 0xC0) == 0x80) --pos;
  return pos;
}

size_t count_code_points(std::string_view s) {
  return static_cast<size_t>(
      std::count_if(s.begin(), s.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

size_t byte_offset(std::string_view s, size_t index) {
  size_t pos = 0;
  while (pos < s.size()) {
    if ((static_cast<unsigned char>(s[pos]) & 0xC0) != 0x80) {
      if (index == 0) return pos;
      --index;
    }
    ++pos;
  }
  return s.size();
}

void append_utf8(std::string* out, char32_t c) {
  if (c < 0x80) {
    out->push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    out->push_back(static_cast<char>(0xC0 | c >> 6));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else if (c < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | c >> 12));
    out->push_back(static_cast<char>(0x80 | (c >> 6 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | c >> 18));
    out->push_back(static_cast<char>(0x80 | (c >> 12 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c >> 6 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  }
}

bool is_python_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

std::string_view strip_left(std::string_view s) {
  size_t pos = 0;
  while (pos < s.size()) {
    size_t next = pos;
    if (!is_python_space(next_code_point(s, &next))) break;
    pos = next;
  }
  return s.substr(pos);
}

std::string_view strip_right(std::string_view s) {
  size_t end = s.size();
  while (end > 0) {
    const size_t begin = previous_boundary(s, end);
    size_t pos = begin;
    if (!is_python_space(next_code_point(s, &pos))) break;
    end = begin;
  }
  return s.substr(0, end);
}

void append_upper(std::string* out, char32_t c) {
  if (c < 0x80) {
    out->push_back(static_cast<char>(c >= 'a' && c <= 'z' ? c - 32 : c));
  } else {
    append_case(out, c, kUpperRanges, kUpperSpecials);
  }
}

void append_lower(std::string* out, char32_t c) {
  if (c < 0x80) {
    out->push_back(static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c));
  } else {
    append_case(out, c, kLowerRanges, kLowerSpecials);
  }
}

bool is_cased(char32_t c) {
  std::string self, other;
  append_utf8(&self, c);
  append_upper(&other, c);
  if (other != self) return true;
  other.clear();
  append_lower(&other, c);
  return other != self;
}

std::string to_upper(std::string_view s) {
  std::string out;
  for (size_t pos = 0; pos < s.size();) append_upper(&out, next_code_point(s, &pos));
  return out;
}

std::string to_lower(std::string_view s) {
  std::string out;
  for (size_t pos = 0; pos < s.size();) append_lower(&out, next_code_point(s, &pos));
  return out;
}

}  // namespace tensorfold
