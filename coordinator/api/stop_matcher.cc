#include "coordinator/api/stop_matcher.h"

#include <algorithm>
#include <utility>

namespace tensorfold {

StopMatcher::StopMatcher(std::span<const std::string> stops) {
  for (const std::string& text : stops) {
    if (text.empty()) continue;
    Stop stop{text, std::vector<uint32_t>(text.size(), 0), 0};
    uint32_t border = 0;
    for (size_t i = 1; i < text.size(); ++i) {
      while (border > 0 && text[i] != text[border]) border = stop.fallback[border - 1];
      if (text[i] == text[border]) ++border;
      stop.fallback[i] = border;
    }
    stops_.push_back(std::move(stop));
  }
}

void StopMatcher::advance(Stop& stop, char byte) {
  while (stop.matched > 0 && stop.text[stop.matched] != byte) stop.matched = stop.fallback[stop.matched - 1];
  if (stop.text[stop.matched] == byte) ++stop.matched;
}

std::string StopMatcher::take() {
  std::string text;
  text.swap(pending_);
  return text;
}

std::string StopMatcher::feed(std::string_view piece) {
  if (stopped_) return {};
  if (stops_.empty()) return std::string(piece);
  pending_.reserve(pending_.size() + piece.size());
  uint32_t longest = 0;
  for (char byte : piece) {
    pending_.push_back(byte);
    longest = 0;
    uint32_t cut = 0;
    for (size_t i = 0; i < stops_.size(); ++i) {
      advance(stops_[i], byte);
      const uint32_t matched = stops_[i].matched;
      longest = std::max(longest, matched);
      if (matched == stops_[i].text.size() && matched > cut) {
        cut = matched;
        found_ = i;
      }
    }
    if (cut > 0) {
      stopped_ = true;
      pending_.erase(pending_.size() - cut);
      return take();
    }
  }
  if (piece.empty()) return {};
  std::string text = take();
  pending_.assign(text, text.size() - longest, longest);
  text.erase(text.size() - longest);
  return text;
}

std::string StopMatcher::finish() {
  for (Stop& stop : stops_) stop.matched = 0;
  return take();
}

}  // namespace tensorfold
