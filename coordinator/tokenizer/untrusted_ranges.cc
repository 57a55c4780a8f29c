#include "coordinator/tokenizer/untrusted_ranges.h"

#include <algorithm>

namespace tensorfold {

void UntrustedRanges::append(size_t begin, size_t end) {
  if (begin >= end) return;
  if (!ranges_.empty() && begin <= ranges_.back().second) {
    ranges_.back().second = std::max(ranges_.back().second, end);
    return;
  }
  ranges_.emplace_back(begin, end);
}

size_t UntrustedRanges::find(size_t position) const {
  const auto it = std::upper_bound(ranges_.begin(), ranges_.end(), position,
                                   [](size_t at, const auto& range) { return at < range.second; });
  return static_cast<size_t>(it - ranges_.begin());
}

bool UntrustedRanges::overlaps(size_t begin, size_t end) const {
  if (ranges_.empty()) return false;
  const size_t i = find(begin);
  return i < ranges_.size() && ranges_[i].first < end;
}

size_t UntrustedRanges::trusted_end(size_t position, size_t text_size) const {
  const size_t i = find(position);
  if (i == ranges_.size()) return text_size;
  return std::max(ranges_[i].first, position);
}

size_t UntrustedRanges::trusted_begin(size_t position) const {
  const auto it = std::lower_bound(ranges_.begin(), ranges_.end(), position,
                                   [](const auto& range, size_t at) { return range.first < at; });
  if (it == ranges_.begin()) return 0;
  return std::min(std::prev(it)->second, position);
}

UntrustedRanges UntrustedRanges::slice(size_t begin, size_t end) const {
  UntrustedRanges out;
  out.append_from(*this, begin, end, 0);
  return out;
}

void UntrustedRanges::append_from(const UntrustedRanges& from, size_t begin, size_t end, size_t at) {
  for (size_t i = from.find(begin); i < from.ranges_.size() && from.ranges_[i].first < end; ++i) {
    const size_t first = std::max(from.ranges_[i].first, begin);
    const size_t last = std::min(from.ranges_[i].second, end);
    append(first - begin + at, last - begin + at);
  }
}

}  // namespace tensorfold
