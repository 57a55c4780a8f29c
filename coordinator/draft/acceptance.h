// How often drafts are kept, by depth: for each sequence, on top of a prior that all sequences share.
//
// Depth d (from 1) is *tried* when the d - 1 drafts before it were kept; its rate is the chance that it is kept then.
// Counts fade so that a sequence that changes its subject is believed soon. Pure arithmetic, one owner, not
// thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tensorfold {

inline constexpr size_t kMaxDraftDepth = 15;  // drafts in a window; deeper ones share the last counter

// Counters of one source of drafts.
class DepthRates {
 public:
  // A window drafted `drafted` tokens, of which the first `accepted` were kept.
  void record(size_t drafted, size_t accepted, double fade);
  // The rate at `depth` (from 1), where `prior` counts as `strength` tries.
  double rate(size_t depth, double prior, double strength) const;

 private:
  struct Counter {
    double tried = 0.0;
    double kept = 0.0;
  };
  std::array<Counter, kMaxDraftDepth> depths_{};
};

// Sources are told apart because they fail differently: copies by the length of the match.
enum class DraftSource : uint8_t { kMtp, kCopyShort, kCopyMedium, kCopyLong, kBlock };
inline constexpr size_t kDraftSources = 5;
// Copy sources: a match of fewer than 8, 8 to 19, and 20 or more tokens.
DraftSource copy_source(uint32_t match);

class Acceptance {
 public:
  void record(DraftSource source, size_t drafted, size_t accepted);
  // The chance that depth `depth` is kept once those before it were. `global` is the prior (null: a fixed first guess).
  double rate(DraftSource source, size_t depth, const Acceptance* global) const;

 private:
  std::array<DepthRates, kDraftSources> sources_{};
};

}  // namespace tensorfold
