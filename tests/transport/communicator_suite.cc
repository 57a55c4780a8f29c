#include "tests/transport/communicator_suite.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/transport/operations_check.h"
#include "transport/base/link_measure.h"

namespace tensorfold {

std::vector<absl::Status> on_all_ranks(Ranks& ranks, const std::function<absl::Status(Communicator&)>& body) {
  std::vector<absl::Status> results(ranks.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] { results[r] = body(*ranks[r]); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;
using Bytes = std::vector<std::byte>;

Deadline in(Deadline::Clock::duration wait) { return Deadline::after(wait); }

std::string message(const absl::Status& status) { return std::string(status.message()); }

// Every operation delivers every byte, in every legal world, with empty, small and rendezvous-sized pieces.
TEST_P(CommunicatorSuite, AllOperationsInAllWorlds) {
  for (int world : {1, 2, 3, 4, 8}) {
    Ranks ranks = GetParam().make(world);
    ASSERT_EQ(ranks.size(), world);
    const size_t large = world > 4 ? size_t{300} << 10 : size_t{5} << 20;
    for (const absl::Status& status : on_all_ranks(ranks, [&](Communicator& rank) {
           return check_all_operations(rank, 7 + world, world > 4 ? 5 : 20, large);
         })) {
      EXPECT_TRUE(status.ok()) << world << " ranks: " << status;
    }
  }
}

// A missing peer ends the wait at the deadline and is named with rank, host and time, and only it.
TEST_P(CommunicatorSuite, DeadlineNamesTheMissingPeer) {
  Ranks ranks = GetParam().make(3);
  ASSERT_EQ(ranks.size(), 3);
  std::atomic<bool> done{false};
  std::thread present([&] {
    const std::vector<size_t> sizes(3, 8);
    Bytes out(24);
    ranks[1]->all_gather(Bytes(8), sizes, out, in(seconds(2))).IgnoreError();
    done = true;
  });
  const std::vector<size_t> sizes(3, 8);
  Bytes out(24);
  const auto start = Deadline::Clock::now();
  absl::Status status = ranks[0]->all_gather(Bytes(8), sizes, out, in(milliseconds(300)));
  EXPECT_LT(Deadline::Clock::now() - start, seconds(2));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(message(status), AllOf(HasSubstr("all_gather: waited 0.3"), HasSubstr("rank 2 (" + ranks[0]->label(2))));
  EXPECT_THAT(message(status), testing::Not(HasSubstr("rank 1 (")));
  present.join();
}

// After a failure half-way the ranks are out of step: later operations say so instead of mixing messages up.
TEST_P(CommunicatorSuite, FailureIsFinal) {
  Ranks ranks = GetParam().make(2);
  ASSERT_EQ(ranks.size(), 2);
  absl::Status first = ranks[0]->barrier(in(milliseconds(50)));
  EXPECT_TRUE(absl::IsDeadlineExceeded(first)) << first;
  Bytes plan(10);
  absl::Status second = ranks[0]->broadcast(0, plan, 100, in(seconds(5)));
  EXPECT_EQ(second.code(), first.code());
  EXPECT_THAT(message(second), AllOf(HasSubstr("broadcast not begun"), HasSubstr(message(first))));
}

// A worker that idles asks again and again; a plan that comes between or after its waits is not lost.
TEST_P(CommunicatorSuite, LateBroadcastIsNotLost) {
  for (size_t bytes : {size_t{0}, size_t{300}, size_t{3} << 20}) {
    Ranks ranks = GetParam().make(2);
    ASSERT_EQ(ranks.size(), 2);
    Bytes received;
    for (int i = 0; i < 3; ++i) {
      absl::Status status = ranks[1]->broadcast(0, received, 4 << 20, in(milliseconds(20)));
      ASSERT_TRUE(absl::IsDeadlineExceeded(status)) << status;
      EXPECT_THAT(message(status), AllOf(HasSubstr("broadcast"), HasSubstr("rank 0 (")));
    }
    std::thread root([&] {
      Bytes plan(bytes, std::byte{42});
      absl::Status status = ranks[0]->broadcast(0, plan, 4 << 20, in(seconds(10)));
      EXPECT_TRUE(status.ok()) << status;
    });
    std::this_thread::sleep_for(milliseconds(30));
    absl::Status status = ranks[1]->broadcast(0, received, 4 << 20, in(seconds(10)));
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(received, Bytes(bytes, std::byte{42}));
    root.join();
  }
}

// abort() wakes a sleeping wait at once with the given status, and no later wait begins.
TEST_P(CommunicatorSuite, AbortWakesWaits) {
  Ranks ranks = GetParam().make(2);
  ASSERT_EQ(ranks.size(), 2);
  const absl::Status why = absl::UnavailableError("rank 0 (spark-a) left the cluster");
  std::thread killer([&] {
    std::this_thread::sleep_for(milliseconds(300));
    ranks[1]->abort(why);
    ranks[1]->abort(absl::InternalError("a later reason"));
  });
  Bytes plan;
  const auto start = Deadline::Clock::now();
  EXPECT_EQ(ranks[1]->broadcast(0, plan, 100, in(seconds(60))), why);
  EXPECT_LT(Deadline::Clock::now() - start, seconds(3));
  killer.join();
  EXPECT_EQ(ranks[1]->barrier(in(seconds(60))), why);
  EXPECT_EQ(ranks[1]->broadcast(0, plan, 100, in(seconds(60))), why);
}

// A message longer than the receiver allows is refused by its announced length; both lengths are named.
TEST_P(CommunicatorSuite, OversizeMessagesAreRefused) {
  for (size_t bytes : {size_t{301}, size_t{2} << 20}) {
    Ranks ranks = GetParam().make(2);
    ASSERT_EQ(ranks.size(), 2);
    std::thread root([&] {
      Bytes plan(bytes);
      ranks[0]->broadcast(0, plan, 4 << 20, in(milliseconds(500))).IgnoreError();
    });
    Bytes plan;
    absl::Status status = ranks[1]->broadcast(0, plan, 300, in(seconds(10)));
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(message(status),
                AllOf(HasSubstr(fmt::format("sent {} bytes", bytes)), HasSubstr("at most 300"), HasSubstr("rank 0 (")));
    EXPECT_TRUE(plan.empty());
    root.join();
  }
  Ranks ranks = GetParam().make(2);
  ASSERT_EQ(ranks.size(), 2);
  std::vector<absl::Status> results = on_all_ranks(ranks, [](Communicator& rank) {
    std::vector<Bytes> all;
    return rank.gather(0, Bytes(rank.rank() == 1 ? 500 : 3), &all, rank.rank() == 1 ? 1000 : 400, in(seconds(5)));
  });
  EXPECT_TRUE(absl::IsResourceExhausted(results[0])) << results[0];
  EXPECT_THAT(message(results[0]), AllOf(HasSubstr("gather"), HasSubstr("500"), HasSubstr("400")));
}

// Ranks that disagree about a size get an error with both sizes, whether the message is too long or too short.
TEST_P(CommunicatorSuite, WrongSizesAreRefused) {
  for (size_t sent : {size_t{4}, size_t{16}, size_t{1} << 20}) {
    Ranks ranks = GetParam().make(2);
    ASSERT_EQ(ranks.size(), 2);
    std::vector<absl::Status> results = on_all_ranks(ranks, [&](Communicator& rank) {
      const std::vector<size_t> sizes = {8, rank.rank() == 0 ? size_t{8} : sent};
      Bytes out(sizes[0] + sizes[1]);
      if (rank.rank() == 0) std::this_thread::sleep_for(milliseconds(50));
      return rank.all_gather(Bytes(sizes[rank.rank()]), sizes, out, in(seconds(3)));
    });
    EXPECT_TRUE(absl::IsDataLoss(results[0])) << results[0];
    EXPECT_THAT(message(results[0]), AllOf(HasSubstr(fmt::format("sent {} bytes", sent)), HasSubstr("8 were expected"),
                                           HasSubstr("rank 1 (")));
  }
}

// The same where the receive was posted before the message came: the transport may then not know the longer length.
TEST_P(CommunicatorSuite, WrongSizesAreRefusedWhenTheReceiverWasFirst) {
  Ranks ranks = GetParam().make(2);
  ASSERT_EQ(ranks.size(), 2);
  std::vector<absl::Status> results = on_all_ranks(ranks, [&](Communicator& rank) {
    const std::vector<size_t> sizes = {8, rank.rank() == 0 ? size_t{8} : size_t{64}};
    Bytes out(sizes[0] + sizes[1]);
    if (rank.rank() == 1) std::this_thread::sleep_for(milliseconds(50));
    return rank.all_gather(Bytes(sizes[rank.rank()]), sizes, out, in(seconds(3)));
  });
  EXPECT_TRUE(absl::IsDataLoss(results[0])) << results[0];
  EXPECT_THAT(message(results[0]), AllOf(HasSubstr("8 were expected"), HasSubstr("rank 1 (")));
}

// Ranks in different operations are out of step: both operations are named, no byte is taken for the other's.
TEST_P(CommunicatorSuite, OtherOperationIsRefused) {
  Ranks ranks = GetParam().make(2);
  ASSERT_EQ(ranks.size(), 2);
  std::vector<absl::Status> results = on_all_ranks(ranks, [](Communicator& rank) {
    if (rank.rank() == 0) return rank.barrier(in(seconds(3)));
    Bytes empty;
    std::vector<size_t> sizes(2, 0);
    return rank.all_gather(empty, sizes, empty, in(seconds(3)));
  });
  EXPECT_TRUE(absl::IsDataLoss(results[0]) || absl::IsDataLoss(results[1])) << results[0] << results[1];
  for (const absl::Status& status : results) {
    EXPECT_FALSE(status.ok());
    if (!absl::IsDataLoss(status)) continue;
    EXPECT_THAT(message(status), AllOf(HasSubstr("barrier"), HasSubstr("all_gather"), HasSubstr("out of step")));
  }
}

// A caller's own mistakes are named and leave the communicator usable.
TEST_P(CommunicatorSuite, WrongArgumentsAreNotFinal) {
  Ranks ranks = GetParam().make(2);
  ASSERT_EQ(ranks.size(), 2);
  Communicator& rank = *ranks[0];
  Bytes out(16), big(101);
  const std::vector<size_t> sizes = {8, 8}, one_size = {16}, huge = {SIZE_MAX, 17};
  EXPECT_TRUE(absl::IsInvalidArgument(rank.all_gather(Bytes(7), sizes, out, in(seconds(1)))));
  EXPECT_TRUE(absl::IsInvalidArgument(rank.all_gather(Bytes(8), one_size, out, in(seconds(1)))));
  EXPECT_TRUE(absl::IsInvalidArgument(rank.all_gather(Bytes(8), huge, out, in(seconds(1)))));
  EXPECT_TRUE(absl::IsInvalidArgument(rank.all_to_all(out, sizes, out, one_size, in(seconds(1)))));
  EXPECT_TRUE(absl::IsInvalidArgument(rank.broadcast(2, out, 100, in(seconds(1)))));
  EXPECT_TRUE(absl::IsInvalidArgument(rank.broadcast(0, big, 100, in(seconds(1)))));
  EXPECT_TRUE(absl::IsInvalidArgument(rank.gather(0, out, nullptr, 100, in(seconds(1)))));
  EXPECT_TRUE(absl::IsInvalidArgument(rank.gather(-1, out, nullptr, 100, in(seconds(1)))));
  EXPECT_TRUE(absl::IsInvalidArgument(rank.gather(1, big, nullptr, 100, in(seconds(1)))));
  for (const absl::Status& status :
       on_all_ranks(ranks, [](Communicator& each) { return check_all_operations(each, 1, 1, 100); })) {
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Every link of a world can be measured and described.
TEST_P(CommunicatorSuite, LinksAreMeasured) {
  Ranks ranks = GetParam().make(3);
  ASSERT_EQ(ranks.size(), 3);
  for (const absl::Status& status : on_all_ranks(ranks, [](Communicator& rank) -> absl::Status {
         absl::StatusOr<std::vector<PeerLink>> links = measure_links(rank, in(seconds(30)));
         if (!links.ok()) return links.status();
         if (links->size() != 2) return absl::InternalError("not two links");
         for (const PeerLink& link : *links) {
           const LinkMeasure& m = link.measure;
           if (m.latency_us <= 0 || m.latency_64k_us <= 0 || m.bandwidth_gb_s <= 0) return absl::InternalError("zero");
         }
         return rank.describe().empty() ? absl::InternalError("no description") : absl::OkStatus();
       })) {
    EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(ranks[0]->measure(0, in(seconds(1))).status()));
}

// A communicator whose peer never takes a long message is destroyed in bounded time, and the buffer is free by then.
TEST_P(CommunicatorSuite, DestructionDoesNotHang) {
  Ranks ranks = GetParam().make(2);
  ASSERT_EQ(ranks.size(), 2);
  Bytes plan(size_t{5} << 20);
  EXPECT_FALSE(ranks[0]->broadcast(0, plan, plan.size(), in(milliseconds(100))).ok());
  plan = Bytes();
  const auto start = Deadline::Clock::now();
  ranks[0].reset();
  ranks[1].reset();
  EXPECT_LT(Deadline::Clock::now() - start, seconds(5));
}

}  // namespace
}  // namespace tensorfold
