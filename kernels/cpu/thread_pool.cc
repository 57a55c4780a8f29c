#include "kernels/cpu/thread_pool.h"

#include <algorithm>
#include <chrono>

#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr auto kSpinTime = std::chrono::microseconds(20);
constexpr int kYields = 4;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  kernel_check(threads >= 1 && threads < static_cast<int>(kJoinedMask), "thread pool: thread count out of range");
  shares_ = std::make_unique<Share[]>(static_cast<size_t>(threads));
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { worker_main(i); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(const Job& job) {
  if (job.count <= 0) return;
  if (workers_.empty() || job.count <= job.grain || !busy_.try_lock()) {
    for (int64_t at = 0; at < job.count; at += job.grain) {
      job.call(job.body, at, std::min(at + job.grain, job.count), 0);
    }
    return;
  }
  job_ = job;
  const int64_t runs = (job.count + job.grain - 1) / job.grain, workers = threads();
  for (int64_t w = 0; w < workers; ++w) {
    shares_[static_cast<size_t>(w)].next.store(runs * w / workers, std::memory_order_relaxed);
    shares_[static_cast<size_t>(w)].end = runs * (w + 1) / workers;
  }
  const uint64_t epoch = (state_.load(std::memory_order_relaxed) >> 16) + 1;
  state_.store(epoch << 16 | kOpen);
  // A worker counts itself asleep before it looks at state_ a last time, so one of the two sees the other.
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  take_runs(0);
  state_.fetch_and(~kOpen);
  for (int spins = 0; (state_.load(std::memory_order_acquire) & kJoinedMask) != 0; ++spins) {
    if (spins < 2000) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
  busy_.unlock();
}

void ThreadPool::take_runs(int worker) {
  const Job job = job_;
  const int workers = threads();
  for (int i = 0; i < workers; ++i) {
    Share& share = shares_[static_cast<size_t>((worker + i) % workers)];
    while (share.next.load(std::memory_order_relaxed) < share.end) {
      const int64_t run = share.next.fetch_add(1, std::memory_order_relaxed);
      if (run >= share.end) break;
      job.call(job.body, run * job.grain, std::min((run + 1) * job.grain, job.count), worker);
    }
  }
}

bool ThreadPool::try_join(uint64_t* seen) {
  uint64_t state = state_.load(std::memory_order_acquire);
  while (state >> 16 != *seen) {
    if ((state & kOpen) == 0) {
      *seen = state >> 16;  // came too late for this one
      return false;
    }
    if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
      *seen = state >> 16;
      return true;
    }
  }
  return false;
}

bool ThreadPool::wait_for_job(uint64_t seen) {
  const auto changed = [&] { return state_.load() >> 16 != seen || stop_.load(); };
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < 32; ++i) {
      if (changed()) return !stop_.load();
      pause();
    }
  } while (std::chrono::steady_clock::now() - start < kSpinTime);
  for (int i = 0; i < kYields; ++i) {
    std::this_thread::yield();
    if (changed()) return !stop_.load();
  }
  sleepers_.fetch_add(1);
  {
    std::unique_lock<std::mutex> lock(sleep_);
    wake_.wait(lock, changed);
  }
  sleepers_.fetch_sub(1);
  return !stop_.load();
}

void ThreadPool::worker_main(int worker) {
  uint64_t seen = 0;
  while (wait_for_job(seen)) {
    if (!try_join(&seen)) continue;
    take_runs(worker);
    state_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace tensorfold
