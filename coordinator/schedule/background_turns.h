// When background work that waits counts as foreground: one sequence at most every interval, however much foreground
// work there is. So a batch goes on slowly under any load, and a load notices one request of it an interval.
//
// No clock inside. One owner, not thread-safe. docs/scheduling.md tells users the same.
#pragma once

#include <chrono>
#include <optional>

namespace tensorfold {

class BackgroundTurns {
 public:
  using Clock = std::chrono::steady_clock;

  /// `interval` 0: never.
  explicit BackgroundTurns(std::chrono::milliseconds interval) : interval_(interval) {}

  /// Asked every round. `waits`: a background sequence has no lane, or has one and no rows of its prompt were read.
  /// True: the one that came first among those has its turn now, and the next interval begins.
  bool due(Clock::time_point now, bool waits) {
    if (!waits || interval_.count() == 0) {
      since_.reset();
      return false;
    }
    if (!since_.has_value()) since_ = now;
    if (now - *since_ < interval_) return false;
    since_ = now;
    return true;
  }

 private:
  const std::chrono::milliseconds interval_;
  std::optional<Clock::time_point> since_;  // something has waited ever since
};

}  // namespace tensorfold
