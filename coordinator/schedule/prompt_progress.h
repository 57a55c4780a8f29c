// How far a long prompt has been read, in what pace, and how long it will still take. Plain arithmetic, one owner.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "coordinator/api/generation.h"

namespace tensorfold {

class PromptProgress {
 public:
  using Clock = std::chrono::steady_clock;

  explicit PromptProgress(std::chrono::milliseconds interval) : interval_(interval) {}

  /// After a pass that left `read` of `total` tokens computed. An event when the last one, or the reading's start, is
  /// at least the interval ago. The pace is that since then: it falls along a long prompt, so that of the whole would
  /// promise too much. A first call only notes where reading starts (what a cache had is not read), as does one with
  /// fewer tokens than before (all is read again after a rank was lost).
  std::optional<ProgressEvent> after_pass(Clock::time_point now, uint64_t read, uint64_t total);

 private:
  std::chrono::milliseconds interval_;
  bool begun_ = false;
  Clock::time_point last_;
  uint64_t last_read_ = 0;
};

}  // namespace tensorfold
