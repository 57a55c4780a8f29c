// The copy drafter: finds the longest earlier occurrence of the history's end and guesses that what followed it then
// follows now
// ("prompt lookup"; code edits, quotes and tables repeat themselves).
//
// Index: for each of a few lengths, a hash of the last so many tokens -> the latest position where they ended, and from
// there a chain to earlier ones. A history only grows, so nothing is ever removed. A step costs a few hash look-ups and
// at most `max_chain` comparisons a length, whatever the history's length: microseconds at 100k tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "coordinator/draft/drafter.h"

namespace tensorfold {

class CopyDrafter final : public Drafter {
 public:
  explicit CopyDrafter(CopyOptions options = {});

  DraftKind kind() const override { return DraftKind::kCopy; }
  void observe(std::span<const uint32_t> history) override;
  // The longest match wins, among equals the latest. Where the match ends near the history's end, the guess goes on
  // with its own first tokens: a history that repeats with a period is guessed at any length.
  Draft propose(std::span<const uint32_t> history, size_t max_ids) override;

 private:
  // Occurrences of one length: ends_[hash] is the latest end, earlier_[end] the one before with the same hash (0 =
  // none).
  struct Level {
    uint32_t length = 0;
    absl::flat_hash_map<uint64_t, uint32_t> ends;
    std::vector<uint32_t> earlier;
  };
  struct Match {
    uint32_t end = 0;  // the match is history[end - length, end)
    uint32_t length = 0;
  };

  Match longest(std::span<const uint32_t> history) const;

  CopyOptions options_;
  std::vector<Level> levels_;  // longest first
  size_t indexed_ = 0;         // ends up to here are in the index
};

}  // namespace tensorfold
