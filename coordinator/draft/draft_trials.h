// Whether many streams together draft at all, found out by doing both in turn. The width policy estimates what a pass
// of so many rows takes; it cannot see what a draft costs later (states that are copied before it and computed again
// when it was kept) or elsewhere. So among four streams and more, rounds with the policy's windows are compared with
// rounds without drafts, and whichever keeps more tokens a millisecond of the clock on the wall is done until the next
// trial. Rates are taken against the estimate of a plain pass of as many streams, so that those of more and of fewer
// can be compared. A decision can never change a reply's bytes.
//
// Rounds go by in phases of a few that are all of one kind, because what a draft costs later falls into the next round.
// No clock inside. One owner, not thread-safe.
#pragma once

#include <array>
#include <cstddef>

namespace tensorfold {

class DraftTrials {
 public:
  static constexpr size_t kFewStreams = 3;  // up to here windows are the width policy's

  /// Whether the next round of `streams` decoding sequences may draft.
  bool may_draft(size_t streams) const;
  /// A round of so many sequences without prompt rows, as may_draft() said, kept `tokens` in `ms` from the end of the
  /// round before to its own. `drafted`: it had drafts. `plain_ms`: the estimate of a pass without them.
  void record(size_t streams, bool drafted, size_t tokens, double ms, double plain_ms);

 private:
  static constexpr size_t kSizes = 12;  // powers of two
  struct Arm {
    double rate = 0;  // plain passes' worth of tokens in the time of one, average of its phases; 0: not measured
    void record(double measured);
  };
  struct Size {
    Arm with;
    Arm without;
    bool drafting = true;  // the phase that runs
    int rounds = 0;        // of it, the first one not counted
    bool any_drafts = false;
    double plain_ms = 0;  // estimated, of plain passes that would have kept as many tokens
    double ms = 0;
    int phases = 0;    // since the other kind was tried
    int interval = 8;  // phases until it is tried again: the clearer it lost, the later
  };
  static size_t index(size_t streams);
  static void end_phase(Size& size);

  std::array<Size, kSizes> sizes_;
  size_t last_ = 0;  // the last round's index
};

}  // namespace tensorfold
