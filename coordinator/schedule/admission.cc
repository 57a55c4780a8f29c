#include "coordinator/schedule/admission.h"

namespace tensorfold {
namespace {

constexpr int kRetryAfterSeconds = 1;

}  // namespace

std::optional<ApiError> Admission::refuse(int count, int64_t tokens, int free_lanes) const {
  const bool too_many = waiting_ + count > limits_.count + free_lanes;
  const bool too_long = limits_.tokens > 0 && waiting_ > 0 && waiting_tokens_ + tokens > limits_.tokens;
  if (!too_many && !too_long) return std::nullopt;
  return queue_full_error(static_cast<uint64_t>(waiting_), static_cast<uint64_t>(limits_.count), kRetryAfterSeconds);
}

}  // namespace tensorfold
