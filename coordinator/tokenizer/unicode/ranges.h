// Sorted ranges of code points, as the generated tables beside this file hold them.
#pragma once

#include <algorithm>
#include <span>
#include <string_view>

namespace tensorfold {

struct CodeRange {
  char32_t first, last;  // both inside
};

struct NamedRanges {
  std::string_view name;
  std::span<const CodeRange> ranges;
};

inline bool in_ranges(std::span<const CodeRange> ranges, char32_t c) {
  const auto it = std::upper_bound(ranges.begin(), ranges.end(), c,
                                   [](char32_t at, const CodeRange& range) { return at < range.first; });
  return it != ranges.begin() && c <= (it - 1)->last;
}

}  // namespace tensorfold
