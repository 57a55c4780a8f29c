#include "coordinator/schedule/prompt_progress.h"

namespace tensorfold {

std::optional<ProgressEvent> PromptProgress::after_pass(Clock::time_point now, uint64_t read, uint64_t total) {
  const bool starts = !begun_ || read <= last_read_;
  const double seconds = std::chrono::duration<double>(now - last_).count();
  if (!starts && (now - last_ < interval_ || seconds <= 0)) return std::nullopt;
  std::optional<ProgressEvent> event;
  if (!starts) {
    event.emplace();
    event->read = read;
    event->total = total;
    event->tokens_per_s = static_cast<double>(read - last_read_) / seconds;
    event->seconds_left = static_cast<double>(total > read ? total - read : 0) / event->tokens_per_s;
  }
  begun_ = true;
  last_ = now;
  last_read_ = read;
  return event;
}

}  // namespace tensorfold
