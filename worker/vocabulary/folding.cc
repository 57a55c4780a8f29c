#include "worker/vocabulary/folding.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>

namespace tensorfold {
namespace {

// Codes first, first + step … last; each moves by `delta`.
struct FoldRun {
  int32_t first, last, step, delta;
};

#include "worker/vocabulary/folding_tables.inc"

const FoldRun* find_run(std::span<const FoldRun> runs, int32_t code) {
  const auto after =
      std::upper_bound(runs.begin(), runs.end(), code, [](int32_t c, const FoldRun& run) { return c < run.first; });
  if (after == runs.begin()) return nullptr;
  const FoldRun& run = *std::prev(after);
  return code <= run.last && (code - run.first) % run.step == 0 ? &run : nullptr;
}

// What one character becomes where it is several.
std::span<const int32_t> find_several(int32_t code) {
  static const std::u32string starts = [] {
    std::u32string out;  // places of the entries, which vary in length
    for (size_t i = 0; i < std::size(kSeveral); i += 2 + static_cast<size_t>(kSeveral[i + 1])) {
      out.push_back(static_cast<char32_t>(i));
    }
    return out;
  }();
  const auto at = std::lower_bound(starts.begin(), starts.end(), code,
                                   [](char32_t start, int32_t c) { return kSeveral[start] < c; });
  if (at == starts.end() || kSeveral[*at] != code) return {};
  return {kSeveral + *at + 2, static_cast<size_t>(kSeveral[*at + 1])};
}

}  // namespace

std::optional<std::u32string> code_points(std::string_view text) {
  std::u32string out;
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t at) { return static_cast<uint8_t>(text[at]); };
    const uint8_t lead = byte(i);
    const size_t length = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (length == 0 || i + length > text.size()) return std::nullopt;
    char32_t code = length == 1 ? lead : lead & (0xFFu >> (length + 1));
    for (size_t k = 1; k < length; ++k) {
      if ((byte(i + k) & 0xC0) != 0x80) return std::nullopt;
      code = code << 6 | (byte(i + k) & 0x3Fu);
    }
    const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
    if (overlong || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return std::nullopt;
    out.push_back(code);
    i += length;
  }
  return out;
}

void append_code_point(char32_t code, std::string& out) {
  const auto put = [&](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
    return;
  }
  if (code < 0x800) {
    put(0xC0 | code >> 6);
  } else {
    if (code < 0x10000) {
      put(0xE0 | code >> 12);
    } else {
      put(0xF0 | code >> 18);
      put(0x80 | (code >> 12 & 0x3F));
    }
    put(0x80 | (code >> 6 & 0x3F));
  }
  put(0x80 | (code & 0x3F));
}

std::u32string folded(std::u32string_view text) {
  constexpr char32_t kSyllables = 0xAC00, kLeads = 0x1100, kVowels = 0x1161, kTails = 0x11A7;  // Hangul, by rule
  std::u32string out;
  for (const char32_t c : text) {
    const auto code = static_cast<int32_t>(c);
    if (c >= kSyllables && c < kSyllables + 11172) {
      const char32_t index = c - kSyllables;
      out.push_back(kLeads + index / 588);
      out.push_back(kVowels + index % 588 / 28);
      if (index % 28 != 0) out.push_back(kTails + index % 28);
      continue;
    }
    if (find_run(kRemoved, code) != nullptr) continue;
    if (const FoldRun* run = find_run(kMoved, code)) {
      out.push_back(static_cast<char32_t>(code + run->delta));
      continue;
    }
    const std::span<const int32_t> several = find_several(code);
    if (several.empty()) out.push_back(c);
    for (const int32_t part : several) out.push_back(static_cast<char32_t>(part));
  }
  return out;
}

}  // namespace tensorfold
