// A few threads for work that must hold up neither the scheduler nor the threads that serve sockets: parsing bodies,
// rendering templates, tokenising long prompts. Thread-safe.
//
// The queue has no limit of its own: a front end has at most one task for each connection or call, and limits those.
#pragma once

#include <condition_variable>
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

  /// Never waits. Tasks must not throw.
  void post(std::function<void()> task);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tensorfold
