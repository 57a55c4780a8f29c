// Threads for the inside of one operation.
//
// parallel_for costs 1-2 us when the workers are awake: they spin for a few tens of microseconds after their last job
// (operations of a pass follow one another closely) and then block, so that ranks that share cores do not starve each
// other. A worker that wakes late is not waited for: the caller does the work itself.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tensorfold {

class ThreadPool {
 public:
  /// `threads` >= 1, the caller of parallel_for included.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls body(begin, end, worker) for disjoint runs that cover [0, count), each run starting at a multiple of `grain`
  /// and at most `grain` long; worker is 0..threads()-1 and unique among concurrent calls. Returns when all are done.
  /// Worker w begins with the w-th of threads() equal shares of the runs, so that calls over the same data meet it in
  /// the same caches, and then helps the others; a body must not let the worker reach the result. Thread-safe; when the
  /// pool is already busy for another thread, the whole range runs on the caller (worker 0). Not reentrant from a body.
  template <typename Body>
  void parallel_for(int64_t count, int64_t grain, const Body& body) {
    run({count, grain, &body, [](const void* b, int64_t begin, int64_t end, int worker) {
           (*static_cast<const Body*>(b))(begin, end, worker);
         }});
  }

 private:
  struct Job {
    int64_t count = 0;
    int64_t grain = 1;
    const void* body = nullptr;
    void (*call)(const void*, int64_t, int64_t, int) = nullptr;
  };

  // The runs that one worker begins with; others take of them once theirs are done.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  void run(const Job& job);
  void take_runs(int worker);
  void worker_main(int worker);
  bool wait_for_job(uint64_t seen);
  bool try_join(uint64_t* seen);

  // state_: epoch << 16 | open << 15 | joined workers. The job below may be read by a worker that has joined, and
  // written by run() while the job is closed and nobody is joined.
  static constexpr uint64_t kOpen = 1u << 15;
  static constexpr uint64_t kJoinedMask = kOpen - 1;
  alignas(64) std::atomic<uint64_t> state_{0};
  Job job_;  // beside state_: whoever joins reads both
  std::unique_ptr<Share[]> shares_;
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex busy_;   // held by run()
  std::mutex sleep_;  // guards the condition variable only
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace tensorfold
