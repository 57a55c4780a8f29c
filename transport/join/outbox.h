// One writer thread for one stream: sends queued messages in order, and a heartbeat whenever the interval has passed.
// gRPC allows one writer at a time; this is it. Slow or dead peers block this thread and nobody else.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "transport/base/deadline.h"

namespace tensorfold {

/// Thread-safety: all members may be called from any thread, close() from any but the writer's own.
template <typename Message>
class Outbox {
 public:
  /// A peer that does not read gets no more than this queued; then the stream counts as dead.
  static constexpr size_t kMaxQueued = 256;

  /// `write` sends one message and returns false when the stream is dead; it is called by the writer thread, as is
  /// `heartbeat`, which returns nothing while there is none to send. Both are called without any lock of this class.
  Outbox(std::function<bool(const Message&)> write, std::function<std::optional<Message>()> heartbeat,
         std::chrono::milliseconds interval)
      : write_(std::move(write)), heartbeat_(std::move(heartbeat)), interval_(interval), thread_([this] { run(); }) {}

  ~Outbox() { close(); }
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  /// False when the stream is dead or closed: the message is dropped.
  bool post(Message message) {
    {
      const std::lock_guard lock(mutex_);
      if (closed_) return false;
      if (queue_.size() >= kMaxQueued) {
        closed_ = true;
      } else {
        queue_.push_back(std::move(message));
      }
    }
    changed_.notify_all();
    return true;
  }

  /// Waits until everything posted was written or the stream is dead. False at the deadline.
  bool flush(Deadline deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline.time(), [this] { return closed_ || (queue_.empty() && !writing_); });
  }

  /// Drops what is queued and ends the thread. The caller has the stream cancelled first, so that a write in progress
  /// returns. Further calls do nothing.
  void close() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    const std::lock_guard lock(join_mutex_);
    if (thread_.joinable()) thread_.join();
  }

 private:
  void run() {
    Deadline::Clock::time_point next_heartbeat = Deadline::Clock::now() + interval_;
    std::unique_lock lock(mutex_);
    while (!closed_) {
      std::optional<Message> message;
      if (!queue_.empty()) {
        message = std::move(queue_.front());
        queue_.pop_front();
      } else if (Deadline::Clock::now() < next_heartbeat) {
        changed_.wait_until(lock, next_heartbeat);
        continue;
      }
      writing_ = true;
      lock.unlock();
      const bool alive = send(std::move(message), next_heartbeat);
      lock.lock();
      writing_ = false;
      if (!alive) closed_ = true;
      changed_.notify_all();
    }
  }

  // Sends `message`, and a heartbeat if one is due.
  bool send(std::optional<Message> message, Deadline::Clock::time_point& next_heartbeat) {
    if (message && !write_(*message)) return false;
    if (Deadline::Clock::now() < next_heartbeat) return true;
    next_heartbeat = Deadline::Clock::now() + interval_;
    const std::optional<Message> heartbeat = heartbeat_();
    return !heartbeat || write_(*heartbeat);
  }

  const std::function<bool(const Message&)> write_;
  const std::function<std::optional<Message>()> heartbeat_;
  const std::chrono::milliseconds interval_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Message> queue_;  // by mutex_
  bool writing_ = false;       // by mutex_
  bool closed_ = false;        // by mutex_
  std::mutex join_mutex_;      // two closers
  std::thread thread_;         // last: it uses everything above
};

}  // namespace tensorfold
