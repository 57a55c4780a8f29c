#include "coordinator/chat/text.h"

#include <algorithm>

namespace tensorfold {
namespace {

// The first run that ends after `pos`.
std::vector<Text::Run>::const_iterator run_at(const std::vector<Text::Run>& runs, size_t pos) {
  return std::upper_bound(runs.begin(), runs.end(), pos, [](size_t p, const Text::Run& run) { return p < run.end; });
}

}  // namespace

void Text::append(std::string_view bytes, bool trusted) {
  if (bytes.empty()) return;
  bytes_.append(bytes);
  if (!runs_.empty() && runs_.back().trusted == trusted) {
    runs_.back().end = bytes_.size();
  } else {
    runs_.push_back({bytes_.size(), trusted});
  }
}

void Text::append(const Text& other, size_t from, size_t to) {
  to = std::min(to, other.size());
  while (from < to) {
    const auto run = run_at(other.runs_, from);
    const size_t end = std::min(run->end, to);
    append(std::string_view(other.bytes_).substr(from, end - from), run->trusted);
    from = end;
  }
}

Text Text::sub(size_t from, size_t to) const {
  Text out;
  out.append(*this, from, to);
  return out;
}

bool Text::trusted_at(size_t pos) const {
  const auto run = run_at(runs_, pos);
  return run != runs_.end() && run->trusted;
}

}  // namespace tensorfold
