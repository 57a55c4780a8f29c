#include "coordinator/schedule/admission.h"

#include <algorithm>
#include <cmath>

namespace tensorfold {
namespace {

constexpr double kMemorySeconds = 60.0;  // of busy time: what is longer ago counts less than a third
constexpr int kLongestRetry = 600;

}  // namespace

std::optional<ApiError> Admission::refuse(int count, int64_t tokens, int free_lanes) const {
  // Who waits for pages while lanes are free waits beside the queue, not in it.
  const int holds = limits_.count + free_lanes;
  const int over = waiting_ + count - holds;
  if (over > 0) {
    return queue_full_error(static_cast<uint64_t>(waiting_), static_cast<uint64_t>(holds), seconds_until(over, 0));
  }
  // A request that is longer than the whole bound may wait alone, or it never could.
  const bool too_long = limits_.tokens > 0 && waiting_ > 0 && waiting_tokens_ + tokens > limits_.tokens;
  if (!too_long) return std::nullopt;
  const int64_t over_tokens = std::min(waiting_tokens_ + tokens - limits_.tokens, waiting_tokens_);
  return queue_tokens_full_error(static_cast<uint64_t>(waiting_tokens_), static_cast<uint64_t>(limits_.tokens),
                                 static_cast<uint64_t>(tokens), seconds_until(0, over_tokens));
}

void Admission::record_round(double seconds, int64_t prompt_tokens, int ended) {
  const double kept = std::exp(-seconds / kMemorySeconds);
  seconds_ = seconds_ * kept + seconds;
  prompt_tokens_ = prompt_tokens_ * kept + static_cast<double>(prompt_tokens);
  ended_ = ended_ * kept + ended;
}

int Admission::seconds_until(int sequences, int64_t tokens) const {
  double seconds = 1.0;
  // Nothing has ended yet: as long as it has been going on, at least.
  if (sequences > 0) seconds = std::max(seconds, sequences * seconds_ / std::max(ended_, 1.0));
  if (tokens > 0 && prompt_tokens_ > 0) {
    seconds = std::max(seconds, static_cast<double>(tokens) * seconds_ / prompt_tokens_);
  }
  return static_cast<int>(std::ceil(std::min<double>(seconds, kLongestRetry)));
}

}  // namespace tensorfold
