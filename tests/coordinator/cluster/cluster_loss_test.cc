// Losses: dead and silent ranks, regrouping, a lost coordinator, shutdown.
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <thread>

#include "tests/coordinator/cluster/cluster_fixture.h"

extern char** environ;

namespace tensorfold {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kChildVariable = "TENSORFOLD_CLUSTER_CHILD";

double seconds_since(Deadline::Clock::time_point begun) {
  return std::chrono::duration<double>(Deadline::Clock::now() - begun).count();
}

/// A cluster in service, with `ranks` as members.
void serve(TestCoordinator& coordinator, const std::vector<TestMember*>& ranks) {
  std::vector<std::future<absl::StatusOr<Roster>>> joined;
  for (TestMember* rank : ranks) {
    joined.push_back(std::async(std::launch::async, [rank] { return (*rank)->join(within(10000)); }));
  }
  const absl::StatusOr<Roster> roster = coordinator->wait_for_all(within(10000));
  ASSERT_TRUE(roster.ok()) << roster.status();
  for (auto& future : joined) {
    const absl::StatusOr<Roster> own = future.get();
    ASSERT_TRUE(own.ok()) << own.status();
    EXPECT_EQ(*own, *roster);
  }
  for (TestMember* rank : ranks) (*rank)->ready(roster->epoch);
  ASSERT_TRUE(coordinator->wait_ready(within(20000)).ok());
  for (TestMember* rank : ranks) ASSERT_TRUE((*rank)->wait_go(roster->epoch, within(20000)).ok());
}

// A broken stream is noticed in well under a second, by rank 0 and by the survivors, with rank, host and cause.
TEST(ClusterLoss, BrokenStreamIsNoticedAtOnce) {
  TestCoordinator coordinator(3);
  TestMember one(coordinator->address(), identity(1, 3));
  auto joined = std::async(std::launch::async, [&] { return one->join(within(10000)); });
  RawMember two(coordinator->address());
  ASSERT_TRUE(two.join(identity(2, 3)).has_accepted());
  ASSERT_TRUE(coordinator->wait_for_all(within(20000)).ok());
  ASSERT_TRUE(joined.get().ok());
  one->ready(1);
  const auto begun = Deadline::Clock::now();
  two.context.TryCancel();
  EXPECT_EQ(coordinator.lost.wait_for("rank 2"), "rank 2 (host host-2, pid 1002) was lost: its connection broke");
  EXPECT_LT(seconds_since(begun), 0.9);
  EXPECT_THAT(coordinator.over.wait_for("epoch 1"), HasSubstr("rank 2 (host host-2, pid 1002) was lost"));
  EXPECT_THAT(one.events.wait_for("over 1"), HasSubstr("rank 2 (host host-2, pid 1002) was lost"));
  const absl::Status ready = coordinator->wait_ready(within(20000));
  EXPECT_EQ(ready.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(message_of(ready), HasSubstr("epoch 1 is over: rank 2 (host host-2, pid 1002) was lost"));
  const absl::Status go = one->wait_go(1, within(20000));
  EXPECT_EQ(go.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(message_of(go), HasSubstr("rank 2"));
  const std::vector<RankStatus> status = coordinator->rank_status();
  EXPECT_EQ(status[2].state, RankState::kLost);
  EXPECT_EQ(status[2].cause, "its connection broke");
}

// A rank that keeps its connection but falls silent is lost after the heartbeat timeout.
TEST(ClusterLoss, SilenceIsNoticed) {
  TestCoordinator coordinator(2, "", ClusterTimings{});
  RawMember one(coordinator->address());
  const auto begun = Deadline::Clock::now();
  ASSERT_TRUE(one.join(identity(1, 2)).has_accepted());
  ASSERT_TRUE(coordinator->wait_for_all(within(20000)).ok());
  EXPECT_THAT(coordinator.lost.wait_for("rank 1"), HasSubstr("was lost: no heartbeat for 1."));
  EXPECT_GT(seconds_since(begun), 0.9);
  EXPECT_LT(seconds_since(begun), 2.0);
}

// A restarted process takes its rank back at once, even when its predecessor died without a word.
TEST(ClusterLoss, SuccessorOfASilentRankMayJoin) {
  TestCoordinator coordinator(2, "", patient(2000));
  RawMember dead(coordinator->address());
  ASSERT_TRUE(dead.join(identity(1, 2)).has_accepted());
  TestMember successor(coordinator->address(), identity(1, 2));
  auto joined = std::async(std::launch::async, [&] { return successor->join(within(10000)); });
  EXPECT_THAT(coordinator.notices.wait_for("was lost"), HasSubstr("rank 1"));
  EXPECT_TRUE(coordinator->wait_for_all(within(10000)).ok());
  EXPECT_TRUE(joined.get().ok());
}

// The whole recovery: a rank is lost and joins again, survivors keep their stream, everybody gets the next epoch with
// the new addresses, and it becomes ready as the first did.
TEST(ClusterLoss, RejoinBeginsTheNextEpoch) {
  TestCoordinator coordinator(3, "secret");
  TestMember one(coordinator->address(), identity(1, 3), "secret");
  auto two = std::make_unique<TestMember>(coordinator->address(), identity(2, 3), "secret");
  serve(coordinator, {&one, two.get()});
  (*two)->leave("restart");
  EXPECT_THAT(coordinator.lost.wait_for("rank 2"), HasSubstr("it left: restart"));
  EXPECT_NE(one.events.wait_for("over 1"), "");

  // The survivor's endpoint is spent: the next epoch waits for a new one.
  coordinator->set_address(bytes("new-0"));
  RankIdentity again = identity(2, 3);
  again.address = bytes("new-2");
  again.pid = 2002;
  TestMember successor(coordinator->address(), again, "secret");
  auto joined = std::async(std::launch::async, [&] { return successor->join(within(10000)); });
  wait_until_state(*coordinator, 2, RankState::kJoined);
  const absl::Status spent = coordinator->wait_for_all(within(100)).status();
  EXPECT_THAT(message_of(spent), HasSubstr("rank 1 (host host-1, pid 1001) (opens a new transport endpoint)"));
  one->renew_address(bytes("new-1"));
  auto regrouped = std::async(std::launch::async, [&] { return one->wait_regroup(1, within(10000)); });
  const absl::StatusOr<Roster> roster = coordinator->wait_for_all(within(10000));
  ASSERT_TRUE(roster.ok()) << roster.status();
  EXPECT_EQ(roster->epoch, 2u);
  EXPECT_EQ(coordinator->epoch(), 2u);
  for (uint32_t rank = 0; rank < 3; ++rank)
    EXPECT_EQ(roster->ranks[rank].address, bytes("new-" + std::to_string(rank)));
  EXPECT_EQ(roster->ranks[2].pid, 2002);
  const absl::StatusOr<Roster> of_one = regrouped.get();
  const absl::StatusOr<Roster> of_two = joined.get();
  ASSERT_TRUE(of_one.ok() && of_two.ok()) << of_one.status() << of_two.status();
  EXPECT_EQ(*of_one, *roster);
  EXPECT_EQ(*of_two, *roster);
  EXPECT_NE(one.events.wait_for("regroup 2"), "");
  EXPECT_EQ(one->wait_go(1, within(20000)).code(), absl::StatusCode::kAborted);
  one->ready(1);  // of the old epoch: does not count
  EXPECT_EQ(coordinator->wait_ready(within(100)).code(), absl::StatusCode::kDeadlineExceeded);
  one->ready(2);
  successor->ready(2);
  EXPECT_TRUE(coordinator->wait_ready(within(20000)).ok());
  EXPECT_TRUE(one->wait_go(2, within(20000)).ok());
  EXPECT_TRUE(successor->wait_go(2, within(20000)).ok());
  EXPECT_EQ(one.events.count("lost"), 1u) << "only in the cause of the epoch's end";
}

// A transport can fail while every process lives: a member or rank 0 ends the epoch and all go on in the next.
TEST(ClusterLoss, FailedTransportRegroupsWithoutALoss) {
  TestCoordinator coordinator(2);
  TestMember one(coordinator->address(), identity(1, 2));
  serve(coordinator, {&one});
  one->fail_epoch(1, "link reset");
  EXPECT_THAT(coordinator.over.wait_for("epoch 1"),
              HasSubstr("the transport of rank 1 (host host-1, pid 1001) failed: link reset"));
  EXPECT_NE(one.events.wait_for("over 1"), "");
  one->renew_address(bytes("second"));
  EXPECT_EQ(coordinator->wait_for_all(within(20000))->epoch, 2u);
  EXPECT_EQ(one->wait_regroup(1, within(20000))->ranks[1].address, bytes("second"));
  coordinator->end_epoch("rank 0 wants to");
  EXPECT_THAT(one.events.wait_for("over 2"), HasSubstr("rank 0 wants to"));
  one->renew_address(bytes("third"));
  EXPECT_EQ(coordinator->wait_for_all(within(20000))->epoch, 3u);
  EXPECT_EQ(one->wait_regroup(2, within(20000))->epoch, 3u);
  EXPECT_EQ(coordinator.lost.count(""), 0u);
}

// A coordinator that dies is noticed, its successor is joined by the same member, and epochs go on from where they
// were.
TEST(ClusterLoss, CoordinatorRestarts) {
  auto coordinator = std::make_unique<TestCoordinator>(2);
  const std::string address = (*coordinator)->address();
  TestMember one(address, identity(1, 2));
  serve(*coordinator, {&one});
  (*coordinator)->end_epoch("once more");
  one->renew_address(bytes("b"));
  ASSERT_TRUE((*coordinator)->wait_for_all(within(20000)).ok());
  ASSERT_EQ(one->wait_regroup(1, within(20000))->epoch, 2u);
  coordinator.reset();  // the member is told
  EXPECT_NE(one.events.wait_for("shutdown"), "");
  EXPECT_EQ(one->wait_regroup(2, within(20000)).status().code(), absl::StatusCode::kCancelled);
  TestCoordinator successor(2, "", patient(), address);
  one->renew_address(bytes("c"));
  auto joined = std::async(std::launch::async, [&] { return one->join(within(10000)); });
  const absl::StatusOr<Roster> roster = successor->wait_for_all(within(10000));
  ASSERT_TRUE(roster.ok()) << roster.status();
  EXPECT_EQ(roster->epoch, 3u);
  EXPECT_TRUE(joined.get().ok());
}

// Shutdown reaches the members, waits for them no longer than its grace, and loses nobody.
TEST(ClusterLoss, Shutdown) {
  TestCoordinator coordinator(3);
  TestMember one(coordinator->address(), identity(1, 3));
  TestMember two(coordinator->address(), identity(2, 3));
  one.leave_on_shutdown = two.leave_on_shutdown = true;
  serve(coordinator, {&one, &two});
  const auto begun = Deadline::Clock::now();
  coordinator->shutdown("end of test", true, milliseconds(5000));
  EXPECT_LT(seconds_since(begun), 3.0) << "members that leave are not waited for";
  EXPECT_EQ(one.events.wait_for("shutdown"), "shutdown end of test drain");
  EXPECT_EQ(two.events.wait_for("shutdown"), "shutdown end of test drain");
  EXPECT_EQ(coordinator.lost.count(""), 0u);
  EXPECT_EQ(one.events.count("lost"), 0u);
  EXPECT_EQ(coordinator->wait_for_all(within(20000)).status().code(), absl::StatusCode::kCancelled);

  TestCoordinator stubborn(2);
  TestMember stays(stubborn->address(), identity(1, 2));
  serve(stubborn, {&stays});
  const auto begun_again = Deadline::Clock::now();
  stubborn->shutdown("end of test", false, milliseconds(200));
  EXPECT_LT(seconds_since(begun_again), 2.0) << "members that stay are not waited for longer than the grace";
}

// A member's own destructor is bounded, also while the coordinator is there.
TEST(ClusterLoss, DestructorsDoNotHang) {
  const auto begun = Deadline::Clock::now();
  {
    TestCoordinator coordinator(2);
    TestMember one(coordinator->address(), identity(1, 2));
    serve(coordinator, {&one});
  }
  EXPECT_LT(seconds_since(begun), 5.0);
}

// Not a test of its own: the process that the tests below kill and stop.
TEST(ClusterChild, Member) {
  const char* address = getenv(kChildVariable);
  if (address == nullptr) GTEST_SKIP() << "runs as a child of the tests beside it";
  RankIdentity own = identity(1, 2);
  own.pid = getpid();
  TestMember one(address, own);
  const absl::StatusOr<Roster> roster = one->join(within(20000));
  ASSERT_TRUE(roster.ok()) << roster.status();
  one->ready(roster->epoch);
  ASSERT_TRUE(one->wait_go(roster->epoch, within(20000)).ok());
  while (one.events.count("lost") == 0 && one.events.count("shutdown") == 0)
    std::this_thread::sleep_for(milliseconds(20));
}

// Not a test of its own either: a coordinator in another process.
TEST(ClusterChild, Coordinator) {
  const char* address = getenv(kChildVariable);
  if (address == nullptr) GTEST_SKIP() << "runs as a child of the tests beside it";
  TestCoordinator coordinator(2, "", patient(), address);
  ASSERT_TRUE(coordinator->wait_for_all(within(20000)).ok());
  std::this_thread::sleep_for(std::chrono::seconds(20));
}

/// One of the two above as a process of its own.
class ChildProcess {
 public:
  explicit ChildProcess(const std::string& coordinator, const std::string& which = "Member") {
    std::string self(4096, '\0');
    self.resize(static_cast<size_t>(std::max<ssize_t>(0, readlink("/proc/self/exe", self.data(), self.size()))));
    std::string filter = "--gtest_filter=ClusterChild." + which;
    char* arguments[] = {self.data(), filter.data(), nullptr};
    setenv(kChildVariable, coordinator.c_str(), 1);
    EXPECT_EQ(posix_spawn(&pid_, self.c_str(), nullptr, nullptr, arguments, environ), 0);
    unsetenv(kChildVariable);
  }
  ~ChildProcess() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  void signal(int number) { kill(pid_, number); }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
};

// A process killed with SIGKILL is named within a second, and its successor brings the cluster back.
TEST(ClusterLoss, KilledProcess) {
  TestCoordinator coordinator(2);
  auto child = std::make_unique<ChildProcess>(coordinator->address());
  ASSERT_TRUE(coordinator->wait_for_all(within(20000)).ok());
  ASSERT_TRUE(coordinator->wait_ready(within(20000)).ok());
  const auto begun = Deadline::Clock::now();
  child->signal(SIGKILL);
  EXPECT_THAT(coordinator.lost.wait_for("rank 1"),
              AllOf(HasSubstr(std::to_string(child->pid())), HasSubstr("connection broke")));
  EXPECT_LT(seconds_since(begun), 1.0);
  child = std::make_unique<ChildProcess>(coordinator->address());
  EXPECT_EQ(coordinator->wait_for_all(within(20000))->epoch, 2u);
  EXPECT_TRUE(coordinator->wait_ready(within(20000)).ok());
}

// A process that is stopped keeps its connection; its silence tells. When it goes on it finds that it was given up.
TEST(ClusterLoss, StoppedProcess) {
  TestCoordinator coordinator(2, "", patient(2000));
  ChildProcess child(coordinator->address());
  ASSERT_TRUE(coordinator->wait_for_all(within(20000)).ok());
  ASSERT_TRUE(coordinator->wait_ready(within(20000)).ok());
  const auto begun = Deadline::Clock::now();
  child.signal(SIGSTOP);
  EXPECT_THAT(coordinator.lost.wait_for("rank 1"), HasSubstr("no heartbeat for 2."));
  EXPECT_LT(seconds_since(begun), 3.0);
  child.signal(SIGCONT);
}

// A coordinator that dies or freezes is named soon, and the member joins its successor, whose first
// epoch is later than any the member has seen.
TEST(ClusterLoss, KilledAndStoppedCoordinator) {
  std::string address;
  {
    TestCoordinator first(2);
    address = first->address();
  }
  TestMember one(address, identity(1, 2), "", patient(2000));
  auto child = std::make_unique<ChildProcess>(address, "Coordinator");
  EXPECT_EQ(one->join(within(20000))->epoch, 1u);
  auto begun = Deadline::Clock::now();
  child->signal(SIGKILL);
  EXPECT_EQ(one.events.wait_for("lost"), "lost the coordinator at " + address + " is lost: its connection broke");
  EXPECT_LT(seconds_since(begun), 1.0);
  EXPECT_EQ(one->wait_go(1, within(20000)).code(), absl::StatusCode::kUnavailable);

  child = std::make_unique<ChildProcess>(address, "Coordinator");
  one->renew_address(bytes("second"));
  EXPECT_EQ(one->join(within(20000))->epoch, 2u);
  begun = Deadline::Clock::now();
  child->signal(SIGSTOP);
  EXPECT_THAT(one.events.wait_for("no heartbeat"), HasSubstr("no heartbeat for 2."));
  EXPECT_LT(seconds_since(begun), 3.0);
  EXPECT_EQ(one->wait_regroup(2, within(20000)).status().code(), absl::StatusCode::kUnavailable);
  // Frozen, it still has the port: a join meets its deadline and names it.
  EXPECT_THAT(message_of(one->join(within(300)).status()), HasSubstr("for the coordinator at " + address));
}

}  // namespace
}  // namespace tensorfold
