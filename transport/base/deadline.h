// The point in time at which a wait gives up. Every wait of the transport takes one: there is no endless wait.
#pragma once

#include <algorithm>
#include <chrono>

namespace tensorfold {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // Longer waits are shortened to this: a caller that idles asks again.
  static constexpr Clock::duration kLongest = std::chrono::hours(1);

  static Deadline after(Clock::duration wait) {
    return Deadline(Clock::now() + std::clamp(wait, Clock::duration::zero(), kLongest));
  }
  static Deadline at(Clock::time_point time) { return Deadline(std::min(time, Clock::now() + kLongest)); }

  Clock::time_point time() const { return time_; }
  bool passed(Clock::time_point now = Clock::now()) const { return now >= time_; }
  // Zero once passed.
  Clock::duration left() const { return std::max(time_ - Clock::now(), Clock::duration::zero()); }

 private:
  explicit Deadline(Clock::time_point time) : time_(time) {}

  Clock::time_point time_;
};

}  // namespace tensorfold
