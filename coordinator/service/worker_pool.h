// A few threads for work that must hold up neither the scheduler nor the threads that serve sockets: parsing bodies,
// rendering templates, tokenising long prompts. Thread-safe.
//
// Of several threads one is kept free of long work, so that a short chat does not wait while megabytes are tokenised.
// The queue has no limit of its own: a front end has at most one task for each connection or call, and limits those.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tensorfold {

class WorkerPool {
 public:
  explicit WorkerPool(int threads);
  /// Runs what is queued, then ends.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  /// Never waits. Tasks must not throw. `bytes`: how much text the task has to do with; from kLongBytes on it counts as
  /// long work. Tasks of a kind begin in the order in which they came.
  void post(std::function<void()> task, size_t bytes = 0);
  static constexpr size_t kLongBytes = size_t{64} << 10;

 private:
  struct Task {
    std::function<void()> work;
    bool is_long = false;
  };
  void run();
  // The first that may begin now; the end when there is none.
  std::deque<Task>::iterator next();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Task> tasks_;
  size_t running_long_ = 0;
  size_t most_long_ = 1;  // at once
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tensorfold
