// Carries the engine's events to the thread that writes them to a client. The engine's side only appends and, when the
// queue was empty, calls `wake`, which must not block: it posts to an executor. After close() nothing is called any
// more, so that the receiver's executor may go away while the engine still knows the sink. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "coordinator/api/generation.h"

namespace tensorfold {

class EventQueue {
 public:
  struct Item {
    uint32_t part = 0;  // which of the engine requests that make up one reply
    GenerationEvent event;
  };

  explicit EventQueue(std::function<void()> wake) : wake_(std::move(wake)) {}

  void push(uint32_t part, GenerationEvent event) {
    const std::lock_guard lock(mutex_);
    if (!wake_) return;
    items_.push_back({part, std::move(event)});
    // Called under the lock, so that close() waits for a call that has begun.
    if (items_.size() == 1) wake_();
  }
  std::vector<Item> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(items_, {});
  }
  void close() {
    const std::lock_guard lock(mutex_);
    wake_ = nullptr;
    items_.clear();
  }

  /// A sink for one engine request; keeps `queue` alive.
  static GenerationSink sink(std::shared_ptr<EventQueue> queue, uint32_t part) {
    return [queue = std::move(queue), part](GenerationEvent event) { queue->push(part, std::move(event)); };
  }

 private:
  std::mutex mutex_;
  std::function<void()> wake_;
  std::vector<Item> items_;
};

}  // namespace tensorfold
