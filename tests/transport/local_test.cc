#include <gmock/gmock.h>

#include <chrono>
#include <thread>

#include "tests/transport/communicator_suite.h"
#include "transport/local/local_world.h"

namespace tensorfold {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;
using Bytes = std::vector<std::byte>;

Ranks make_local(int world) {
  auto ranks = LocalWorld::create(world);
  EXPECT_TRUE(ranks.ok()) << ranks.status();
  return ranks.ok() ? *std::move(ranks) : Ranks();
}

INSTANTIATE_TEST_SUITE_P(Local, CommunicatorSuite, testing::Values(TransportUnderTest{"Threads", make_local}),
                         transport_test_name);

// One rank's abort ends the waits of all others, with its reason and its name.
TEST(LocalWorldTest, AbortReachesEveryRank) {
  Ranks ranks = make_local(3);
  std::vector<absl::Status> results = on_all_ranks(ranks, [](Communicator& rank) {
    if (rank.rank() == 2) {
      std::this_thread::sleep_for(milliseconds(100));
      rank.abort(absl::InternalError("the card fell off the bus"));
    }
    return rank.barrier(Deadline::after(seconds(30)));
  });
  EXPECT_EQ(results[2], absl::InternalError("the card fell off the bus"));
  for (int rank : {0, 1}) {
    EXPECT_TRUE(absl::IsUnavailable(results[rank])) << results[rank];
    EXPECT_THAT(std::string(results[rank].message()),
                AllOf(HasSubstr("rank 2"), HasSubstr("the card fell off the bus")));
  }
}

// A rank that gives up at its deadline takes the others with it at once: they need not wait for their own.
TEST(LocalWorldTest, FailureReachesEveryRank) {
  Ranks ranks = make_local(3);
  const auto start = Deadline::Clock::now();
  std::vector<absl::Status> results = on_all_ranks(ranks, [](Communicator& rank) {
    if (rank.rank() == 2) return absl::OkStatus();  // never comes
    return rank.barrier(Deadline::after(rank.rank() == 0 ? milliseconds(100) : milliseconds(30000)));
  });
  EXPECT_LT(Deadline::Clock::now() - start, seconds(10));
  EXPECT_TRUE(absl::IsDeadlineExceeded(results[0])) << results[0];
  EXPECT_TRUE(absl::IsUnavailable(results[1])) << results[1];
  EXPECT_THAT(std::string(results[1].message()), AllOf(HasSubstr("rank 0 failed"), HasSubstr("rank 2 (thread 2)")));
}

// What a rank sent before it was destroyed still arrives; only then is it missed.
TEST(LocalWorldTest, LeavingRankIsNamedAfterItsMessages) {
  Ranks ranks = make_local(2);
  Bytes plan(300, std::byte{1}), received;
  ASSERT_TRUE(ranks[0]->broadcast(0, plan, 1000, Deadline::after(seconds(1))).ok());
  ranks[0].reset();
  ASSERT_TRUE(ranks[1]->broadcast(0, received, 1000, Deadline::after(seconds(1))).ok());
  EXPECT_EQ(received, plan);
  absl::Status status = ranks[1]->broadcast(0, received, 1000, Deadline::after(seconds(30)));
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 (thread 0)"));
}

// A long buffer lent to a receiver that is just reading it comes back only when the reading is over.
TEST(LocalWorldTest, LentBufferIsTakenBackSafely) {
  for (int i = 0; i < 20; ++i) {
    Ranks ranks = make_local(2);
    on_all_ranks(ranks, [&](Communicator& rank) {
      Bytes message(rank.rank() == 0 ? size_t{8} << 20 : 0, std::byte{1});
      absl::Status status = rank.broadcast(0, message, size_t{8} << 20, Deadline::after(milliseconds(1)));
      std::fill(message.begin(), message.end(), std::byte{0});
      return status;
    });
  }
}

// Worlds that cannot be are refused.
TEST(LocalWorldTest, RefusesImpossibleWorlds) {
  EXPECT_FALSE(LocalWorld::create(0).ok());
  EXPECT_FALSE(LocalWorld::create(9).ok());
  EXPECT_FALSE(LocalWorld::create(2, 1, {"only one"}).ok());
}

}  // namespace
}  // namespace tensorfold
