#include "coordinator/service/worker_pool.h"

#include <algorithm>
#include <utility>

namespace tensorfold {

WorkerPool::WorkerPool(int threads) {
  const int count = std::max(threads, 1);
  most_long_ = static_cast<size_t>(std::max(count - 1, 1));
  for (int i = 0; i < count; ++i) threads_.emplace_back([this] { run(); });
}

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::post(std::function<void()> task, size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back({std::move(task), bytes >= kLongBytes});
  }
  wake_.notify_one();
}

std::deque<WorkerPool::Task>::iterator WorkerPool::next() {
  return std::find_if(tasks_.begin(), tasks_.end(),
                      [this](const Task& task) { return !task.is_long || running_long_ < most_long_; });
}

void WorkerPool::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return next() != tasks_.end() || (stopping_ && tasks_.empty()); });
    const auto found = next();
    if (found == tasks_.end()) return;
    Task task = std::move(*found);
    tasks_.erase(found);
    if (task.is_long) ++running_long_;
    lock.unlock();
    task.work();
    task.work = nullptr;  // what it captured dies outside the lock
    lock.lock();
    if (!task.is_long) continue;
    --running_long_;
    wake_.notify_all();  // a long one may have waited for this, and when stopping everybody for the last
  }
}

}  // namespace tensorfold
