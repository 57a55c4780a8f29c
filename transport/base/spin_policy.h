// How long a wait spins before it sleeps. Spinning answers in a microsecond but burns a core; sleeping costs nothing
// but some tens of microseconds at the wake-up. The window grows while spinning pays and shrinks while it does not, so
// a rank that idles soon spins least.
#pragma once

#include <algorithm>
#include <chrono>

namespace tensorfold {

class SpinPolicy {
 public:
  using Duration = std::chrono::steady_clock::duration;

  SpinPolicy(Duration shortest, Duration longest) : shortest_(shortest), longest_(longest), window_(longest) {}

  Duration window() const { return window_; }
  void spinning_paid() { window_ = std::min(window_ * 2, longest_); }
  void had_to_sleep() { window_ = std::max(window_ / 2, shortest_); }

 private:
  Duration shortest_;
  Duration longest_;
  Duration window_;
};

}  // namespace tensorfold
