// What a pull tells while it runs: a bar on a terminal, else a line now and then.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>

namespace tensorfold {

/// "1.50 GiB".
std::string bytes_text(uint64_t bytes);

/// Thread-safety: any thread may call anything.
class PullProgress {
 public:
  /// Writes to `out`, which the caller owns; null: silent. `terminal`: a bar, drawn anew five times a second; else a
  /// line every ten seconds.
  PullProgress(std::FILE* out, bool terminal);
  ~PullProgress();
  PullProgress(const PullProgress&) = delete;
  PullProgress& operator=(const PullProgress&) = delete;

  /// A line of its own.
  void say(const std::string& line);
  /// Begins to count towards `total` bytes, of which none is there.
  void begin(uint64_t total);
  /// Bytes that came over the network.
  void received(uint64_t bytes) { done_ += static_cast<int64_t>(bytes), fresh_ += static_cast<int64_t>(bytes); }
  /// Bytes that were there from before; negative: that had to be given up.
  void found(int64_t bytes) { done_ += bytes; }
  /// Ends counting.
  void end();

  uint64_t received_bytes() const { return static_cast<uint64_t>(fresh_.load()); }

 private:
  void run();
  void draw();

  std::FILE* const out_;
  const bool terminal_;
  std::atomic<int64_t> done_{0};
  std::atomic<int64_t> fresh_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool counting_ = false;
  bool over_ = false;
  uint64_t total_ = 0;
  double rate_ = 0;  // bytes a second, smoothed
  int64_t last_fresh_ = 0;
  std::chrono::steady_clock::time_point last_time_;
  std::thread thread_;
};

}  // namespace tensorfold
