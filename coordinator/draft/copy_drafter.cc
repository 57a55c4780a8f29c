#include "coordinator/draft/copy_drafter.h"

#include <algorithm>

namespace tensorfold {
namespace {

// A history longer than this is not indexed further: positions are 32 bits, and no model's context comes near.
constexpr size_t kMaxHistory = size_t{1} << 31;

uint64_t hash_ending(std::span<const uint32_t> history, size_t end, uint32_t length) {
  uint64_t h = 0x9E3779B97F4A7C15ull;
  for (size_t i = end - length; i < end; ++i) {
    h = (h ^ history[i]) * 0xBF58476D1CE4E5B9ull;
    h ^= h >> 29;
  }
  return h;
}

}  // namespace

CopyDrafter::CopyDrafter(CopyOptions options) : options_(options) {
  options_.min_match = std::max<uint32_t>(options_.min_match, 1);
  options_.max_match = std::max(options_.max_match, options_.min_match);
  // The long length finds a long match even where the short one has more occurrences than a chain is followed.
  const uint32_t longer = options_.min_match * 4;
  if (longer <= options_.max_match) levels_.push_back({longer, {}, {}});
  levels_.push_back({options_.min_match, {}, {}});
}

void CopyDrafter::observe(std::span<const uint32_t> history) {
  const size_t size = std::min(history.size(), kMaxHistory);
  for (Level& level : levels_) {
    level.earlier.resize(size + 1, 0);
    for (size_t end = std::max<size_t>(indexed_ + 1, level.length); end <= size; ++end) {
      uint32_t& latest = level.ends[hash_ending(history, end, level.length)];
      level.earlier[end] = latest;
      latest = static_cast<uint32_t>(end);
    }
  }
  indexed_ = std::max(indexed_, size);
}

CopyDrafter::Match CopyDrafter::longest(std::span<const uint32_t> history) const {
  const size_t size = history.size();
  for (const Level& level : levels_) {
    if (size < level.length) continue;
    Match best;
    uint32_t end = level.earlier[size];
    for (uint32_t tries = 0; end != 0 && tries < options_.max_chain; ++tries, end = level.earlier[end]) {
      const uint32_t most = std::min(options_.max_match, end);
      uint32_t length = 0;
      while (length < most && history[end - 1 - length] == history[size - 1 - length]) ++length;
      if (length >= level.length && length > best.length)
        best = {end, length};  // a shorter length: the hashes collided
      if (best.length == options_.max_match) break;
    }
    if (best.length > 0) return best;
  }
  return {};
}

Draft CopyDrafter::propose(std::span<const uint32_t> history, size_t max_ids) {
  observe(history);
  Draft draft;
  if (max_ids == 0 || history.size() > kMaxHistory) return draft;
  const Match match = longest(history);
  if (match.length < options_.min_match) return draft;
  draft.match = match.length;
  draft.ids.reserve(max_ids);
  for (size_t i = 0; i < max_ids; ++i) {
    const size_t from = match.end + i;
    draft.ids.push_back(from < history.size() ? history[from] : draft.ids[from - history.size()]);
  }
  return draft;
}

}  // namespace tensorfold
