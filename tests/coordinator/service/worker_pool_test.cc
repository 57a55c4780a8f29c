// The threads that parse and tokenise: nothing is lost, and long work leaves room for short.
#include "coordinator/service/worker_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

namespace tensorfold {
namespace {

constexpr std::chrono::seconds kPatience{20};

// Everything that was posted has run when the pool is gone, long and short mixed.
TEST(WorkerPool, RunsEverything) {
  for (const int threads : {0, 1, 2, 5}) {
    std::atomic<int> ran{0};
    {
      WorkerPool pool(threads);
      for (size_t i = 0; i < 300; ++i) pool.post([&ran] { ++ran; }, i % 3 == 0 ? WorkerPool::kLongBytes : i);
    }
    EXPECT_EQ(ran, 300) << threads;
  }
}

// While long texts keep all threads busy that they may have, and more of them wait, a short one is done.
TEST(WorkerPool, ShortWorkDoesNotWaitForLong) {
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  std::atomic<int> long_begun{0};
  std::promise<void> short_done;
  WorkerPool pool(3);
  for (int i = 0; i < 5; ++i) {
    pool.post(
        [&long_begun, released] {
          ++long_begun;
          released.wait();
        },
        WorkerPool::kLongBytes);
  }
  pool.post([&short_done] { short_done.set_value(); }, WorkerPool::kLongBytes - 1);
  EXPECT_EQ(short_done.get_future().wait_for(kPatience), std::future_status::ready);
  EXPECT_LE(long_begun, 2);
  release.set_value();
}

// A pool of one thread does long work too.
TEST(WorkerPool, OneThread) {
  std::promise<void> done;
  WorkerPool pool(1);
  pool.post([&done] { done.set_value(); }, WorkerPool::kLongBytes);
  EXPECT_EQ(done.get_future().wait_for(kPatience), std::future_status::ready);
}

}  // namespace
}  // namespace tensorfold
