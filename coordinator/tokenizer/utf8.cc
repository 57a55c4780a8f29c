#include "coordinator/tokenizer/utf8.h"

#include <cstdint>
#include <cstring>

namespace tensorfold {
namespace {

constexpr char32_t kReplacement = 0xFFFD;

// The length of the longest prefix of `bytes` that is ASCII, in steps of eight bytes.
size_t ascii_prefix(std::string_view bytes) {
  size_t i = 0;
  while (i + 8 <= bytes.size()) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + i, 8);
    if (word & 0x8080808080808080u) break;
    i += 8;
  }
  return i;
}

}  // namespace

Utf8Step utf8_step(std::string_view bytes) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {lead, 1, true, false};
  size_t length = 0;
  char32_t code_point = 0;
  // The second byte's range excludes overlong forms, surrogates and what lies past U+10FFFF.
  unsigned low = 0x80, high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
    code_point = lead & 0x1F;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    code_point = lead & 0x0F;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    code_point = lead & 0x07;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {kReplacement, 1, false, false};
  }
  for (size_t i = 1; i < length; ++i) {
    if (i == bytes.size()) return {kReplacement, i, false, true};
    if (byte(i) < low || byte(i) > high) return {kReplacement, i, false, false};
    code_point = code_point << 6 | (byte(i) & 0x3F);
    low = 0x80;
    high = 0xBF;
  }
  return {code_point, length, true, false};
}

void append_utf8(char32_t c, std::string& out) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xC0 | c >> 6);
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xE0 | c >> 12);
    out += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | c >> 18);
    out += static_cast<char>(0x80 | (c >> 12 & 0x3F));
    out += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  }
}

bool is_valid_utf8(std::string_view bytes) {
  while (!bytes.empty()) {
    if (const size_t ascii = ascii_prefix(bytes); ascii > 0) {
      bytes.remove_prefix(ascii);
      continue;
    }
    const Utf8Step step = utf8_step(bytes);
    if (!step.valid) return false;
    bytes.remove_prefix(step.length);
  }
  return true;
}

std::string sanitize_utf8(std::string_view bytes) {
  if (is_valid_utf8(bytes)) return std::string(bytes);
  std::string out;
  out.reserve(bytes.size());
  while (!bytes.empty()) {
    const Utf8Step step = utf8_step(bytes);
    if (step.valid) {
      out.append(bytes.substr(0, step.length));
    } else {
      append_utf8(kReplacement, out);
    }
    bytes.remove_prefix(step.length);
  }
  return out;
}

}  // namespace tensorfold
