// Joining: orders of start, refusals, the shared token, deadlines, readiness.
#include <future>
#include <thread>

#include "tests/coordinator/cluster/cluster_fixture.h"

namespace tensorfold {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

absl::StatusOr<Roster> join_in(TestMember& member, int ms = 20000) { return member->join(within(ms)); }

// The whole way of a healthy cluster: everybody gets the same roster, nobody goes before all are ready.
TEST(ClusterJoin, ThreeRanksJoinLoadAndGo) {
  TestCoordinator coordinator(3, "secret");
  TestMember one(coordinator->address(), identity(1, 3), "secret");
  TestMember two(coordinator->address(), identity(2, 3), "secret");
  auto joined_one = std::async(std::launch::async, [&] { return join_in(one); });
  auto joined_two = std::async(std::launch::async, [&] { return join_in(two); });
  const absl::StatusOr<Roster> roster = coordinator->wait_for_all(within(20000));
  ASSERT_TRUE(roster.ok()) << roster.status();
  EXPECT_EQ(roster->epoch, 1u);
  ASSERT_EQ(roster->ranks.size(), 3u);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(roster->ranks[rank].address, bytes("address-" + std::to_string(rank)));
    EXPECT_EQ(roster->ranks[rank].host, "host-" + std::to_string(rank));
    EXPECT_EQ(roster->ranks[rank].pid, 1000 + rank);
  }
  const absl::StatusOr<Roster> roster_one = joined_one.get();
  const absl::StatusOr<Roster> roster_two = joined_two.get();
  ASSERT_TRUE(roster_one.ok() && roster_two.ok()) << roster_one.status() << roster_two.status();
  EXPECT_EQ(*roster_one, *roster);
  EXPECT_EQ(*roster_two, *roster);

  one->report_progress({"loading", 50, 200});
  two->ready(1);
  wait_until_state(*coordinator, 2, RankState::kReady);
  EXPECT_EQ(two->wait_go(1, within(100)).code(), absl::StatusCode::kDeadlineExceeded);
  const Deadline reported = within(20000);
  while (coordinator->rank_status()[1].progress.done != 50 && !reported.passed()) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  const absl::Status early = coordinator->wait_ready(within(100));
  EXPECT_EQ(early.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(message_of(early),
              AllOf(HasSubstr("rank 1 (host host-1, pid 1001) (loading, 25 %)"), Not(HasSubstr("rank 2"))));
  one->ready(1);
  EXPECT_TRUE(coordinator->wait_ready(within(20000)).ok());
  EXPECT_TRUE(one->wait_go(1, within(20000)).ok());
  EXPECT_TRUE(two->wait_go(1, within(20000)).ok());
  one->set_last_step(41);
  coordinator->set_last_step(42);
  const Deadline deadline = within(20000);
  while (coordinator->rank_status()[1].last_step != 41 && !deadline.passed())
    std::this_thread::sleep_for(milliseconds(5));
  const std::vector<RankStatus> status = coordinator->rank_status();
  EXPECT_EQ(status[0].last_step, 42u);
  EXPECT_EQ(status[1].last_step, 41u);
  EXPECT_LT(status[1].seconds_since_step, 20.0);
  EXPECT_GE(status[1].seconds_since_step, 0.0);
  EXPECT_EQ(status[2].seconds_since_step, -1);
  for (const RankStatus& rank : status) EXPECT_EQ(rank.state, RankState::kServing);
  EXPECT_LT(status[1].seconds_since_heartbeat, 8.0);
}

// Rank 1 before rank 0 is the custom: it says whom it waits for and joins when the coordinator comes up.
TEST(ClusterJoin, MemberStartsFirst) {
  // A free port: taken and given back.
  std::string address;
  {
    TestCoordinator first(2);
    address = first->address();
  }
  TestMember one(address, identity(1, 2));
  auto joined = std::async(std::launch::async, [&] { return join_in(one); });
  EXPECT_EQ(one.notices.wait_for("rank 1 waits for"), "rank 1 waits for the coordinator at " + address);
  TestCoordinator coordinator(2, "", patient(), address);
  EXPECT_TRUE(coordinator->wait_for_all(within(20000)).ok());
  EXPECT_TRUE(joined.get().ok());
}

// A world of one has nobody to wait for and opens no port.
TEST(ClusterJoin, WorldOfOne) {
  TestCoordinator coordinator(1, "", patient(), "");
  EXPECT_EQ(coordinator->address(), "");
  EXPECT_TRUE(coordinator->wait_for_all(within(0)).ok());
  EXPECT_TRUE(coordinator->wait_ready(within(0)).ok());
  EXPECT_EQ(coordinator->rank_status()[0].state, RankState::kServing);
}

// A deadline names the ranks that are missing, not those that are there; members learn the same.
TEST(ClusterJoin, TimeoutNamesTheMissing) {
  ClusterTimings timings = patient();
  timings.notice_interval = milliseconds(50);
  TestCoordinator coordinator(4, "", timings);
  TestMember two(coordinator->address(), identity(2, 4), "", timings);
  auto joined = std::async(std::launch::async, [&] { return join_in(two, 2000); });
  wait_until_state(*coordinator, 2, RankState::kJoined);
  const absl::Status status = coordinator->wait_for_all(within(300)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(message_of(status),
              AllOf(HasSubstr("for rank 1 (has not joined) and rank 3 (has not joined)"), Not(HasSubstr("rank 2"))));
  EXPECT_GE(coordinator.notices.count("rank 0 waits for rank 1 (has not joined) and rank 3"), 1u);
  const absl::Status of_member = joined.get().status();
  EXPECT_EQ(of_member.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(message_of(of_member),
              AllOf(HasSubstr("rank 2 waited 2.0 s"), HasSubstr("rank 1 (has not joined) and rank 3")));
}

// Nobody there: the deadline holds and names the coordinator.
TEST(ClusterJoin, NoCoordinator) {
  TestMember one("127.0.0.1:1", identity(1, 2));
  const absl::Status status = join_in(one, 300).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(message_of(status), HasSubstr("for the coordinator at 127.0.0.1:1"));
}

// Mismatches of every kind travel to the rank that is refused, with both values, at once and without a retry.
TEST(ClusterJoin, MismatchesAreRefusedByName) {
  TestCoordinator coordinator(2);
  const struct {
    std::string RankIdentity::*field;
    const char* expected;
  } cases[] = {
      {&RankIdentity::build, "build: the coordinator has '0.1.0-abc', rank 1 has 'other'"},
      {&RankIdentity::fingerprint, "numeric fingerprint: the coordinator has '0123456789abcdef', rank 1 has 'other'"},
      {&RankIdentity::checkpoint, "checkpoint hash: the coordinator has 'checkpoint-a', rank 1 has 'other'"},
      {&RankIdentity::profile, "profile hash: the coordinator has 'profile-a', rank 1 has 'other'"},
      {&RankIdentity::slices, "slice plan: the coordinator has 'heads 8', rank 1 has 'other'"},
      {&RankIdentity::transport, "transport: the coordinator has 'ucx', rank 1 has 'other'"},
  };
  const auto expect_refused = [&](const RankIdentity& joining, const std::string& expected) {
    TestMember member(coordinator->address(), joining);
    const absl::Status status = join_in(member).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(message_of(status), HasSubstr(expected));
    EXPECT_THAT(coordinator.notices.wait_for(expected), HasSubstr("refused a rank from"));
  };
  for (const auto& test : cases) {
    RankIdentity joining = identity(1, 2);
    joining.*test.field = "other";
    expect_refused(joining, test.expected);
  }
  RankIdentity protocol = identity(1, 2);
  protocol.protocol = 7;
  expect_refused(protocol, "protocol version: the coordinator has 1, rank 1 has 7");
  expect_refused(identity(1, 3), "world: the coordinator has 2, rank 1 has 3");
  expect_refused(identity(2, 2), "rank 2 is outside the coordinator's world of 2 (ranks 0 to 1)");
  EXPECT_EQ(coordinator->rank_status()[1].state, RankState::kMissing);
}

// A rank out of range, rank 0 and an over-long field, from a peer that does not check itself.
TEST(ClusterJoin, HostileHello) {
  TestCoordinator coordinator(2);
  EXPECT_THAT(RawMember(coordinator->address()).join(identity(4000000000u, 2)).refused().reason(),
              HasSubstr("outside"));
  EXPECT_THAT(RawMember(coordinator->address()).join(identity(0, 2)).refused().reason(),
              HasSubstr("the coordinator itself"));
  RankIdentity long_slices = identity(1, 2);
  long_slices.slices.assign(kMaxSliceText + 1, 's');
  EXPECT_THAT(RawMember(coordinator->address()).join(long_slices).refused().reason(),
              HasSubstr("slice plan has 8193 bytes"));
  {
    RawMember not_hello(coordinator->address());
    v1::CoordinatorMessage message;
    ASSERT_TRUE(not_hello.stream->Read(&message));
    v1::MemberMessage ready;
    ready.mutable_ready()->set_epoch(1);
    not_hello.stream->Write(ready);
    ASSERT_TRUE(not_hello.stream->Read(&message));
    EXPECT_THAT(message.refused().reason(), HasSubstr("Hello"));
  }
  {
    RawMember too_long(coordinator->address());
    v1::CoordinatorMessage message;
    ASSERT_TRUE(too_long.stream->Read(&message));
    v1::MemberMessage hello;
    hello.mutable_hello()->mutable_identity()->set_build(std::string(1 << 20, 'b'));
    too_long.stream->Write(hello);
    EXPECT_FALSE(too_long.stream->Read(&message)) << "a message of 1 MiB ends the stream";
  }
  // The cluster is unharmed.
  TestMember one(coordinator->address(), identity(1, 2));
  auto joined = std::async(std::launch::async, [&] { return join_in(one); });
  EXPECT_TRUE(coordinator->wait_for_all(within(20000)).ok());
  EXPECT_TRUE(joined.get().ok());
}

// A stream that never says who it is does not stay for ever.
TEST(ClusterJoin, SilentStreamIsClosed) {
  ClusterTimings timings;
  timings.heartbeat_interval = milliseconds(20);
  timings.heartbeat_timeout = milliseconds(60);
  timings.handshake_timeout = milliseconds(200);
  TestCoordinator coordinator(2, "", timings);
  RawMember silent(coordinator->address());
  v1::CoordinatorMessage message;
  EXPECT_TRUE(silent.stream->Read(&message));
  EXPECT_FALSE(silent.stream->Read(&message));
}

// The token: wrong, missing on either side, and right. Neither token is ever shown.
TEST(ClusterJoin, Token) {
  TestCoordinator with(2, "right-token");
  TestCoordinator without(2);
  const auto refusal = [](TestCoordinator& coordinator, const std::string& token) {
    TestMember member(coordinator->address(), identity(1, 2), token);
    const absl::Status status = join_in(member).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    return message_of(status);
  };
  EXPECT_THAT(refusal(with, "wrong-token"), AllOf(HasSubstr("shared token: rank 1 has another one"),
                                                  Not(HasSubstr("right-token")), Not(HasSubstr("wrong-token"))));
  EXPECT_THAT(refusal(with, ""), HasSubstr("shared token: the coordinator has one, rank 1 has none"));
  EXPECT_THAT(refusal(without, "right-token"), HasSubstr("shared token: the coordinator has none, rank 1 has one"));
  // Who does not know the token learns nothing of the cluster.
  RankIdentity curious = identity(1, 2);
  curious.checkpoint = "guess";
  EXPECT_THAT(RawMember(with->address()).join(curious, "wrong").refused().reason(), Not(HasSubstr("checkpoint-a")));
  TestMember member(with->address(), identity(1, 2), "right-token");
  auto joined = std::async(std::launch::async, [&] { return join_in(member); });
  EXPECT_TRUE(with->wait_for_all(within(20000)).ok());
  EXPECT_TRUE(joined.get().ok());
}

// Without a token the control plane is for this host alone; addresses that are none are refused.
TEST(ClusterJoin, ListenAddresses) {
  const auto start = [](const std::string& listen, const std::string& token) {
    MembershipOptions options;
    options.listen = listen;
    options.identity = identity(0, 2);
    options.token = token;
    options.on_notice = [](const std::string&) {};
    return Membership::start(options).status();
  };
  EXPECT_THAT(message_of(start("0.0.0.0:0", "")), HasSubstr("no shared token is configured"));
  EXPECT_EQ(start("192.0.2.1:7070", "").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(start("127.0.0.1:0", "").ok());
  EXPECT_TRUE(start("0.0.0.0:0", "token").ok());
  for (const char* bad : {"", "127.0.0.1", "127.0.0.1:", ":7070", "127.0.0.1:70000", "127.0.0.1:7x", "::1:7070"}) {
    EXPECT_EQ(start(bad, "token").code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

// A second coordinator on the same port is an error, not a half of the cluster.
TEST(ClusterJoin, PortInUse) {
  TestCoordinator first(2);
  MembershipOptions options;
  options.listen = first->address();
  options.identity = identity(0, 2);
  const absl::Status status = Membership::start(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(message_of(status), HasSubstr("cannot listen at " + first->address()));
}

// Two processes with the same rank: the second is refused and told who holds it; the first is undisturbed.
TEST(ClusterJoin, DuplicateRank) {
  TestCoordinator coordinator(2);
  TestMember first(coordinator->address(), identity(1, 2));
  auto joined = std::async(std::launch::async, [&] { return join_in(first); });
  wait_until_state(*coordinator, 1, RankState::kJoined);
  RankIdentity other = identity(1, 2);
  other.host = "elsewhere";
  other.pid = 5;
  TestMember second(coordinator->address(), other);
  const absl::Status status = join_in(second).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(message_of(status), AllOf(HasSubstr("rank 1 (host elsewhere, pid 5) may not join"),
                                        HasSubstr("held by another process, rank 1 (host host-1, pid 1001)")));
  EXPECT_TRUE(coordinator->wait_for_all(within(20000)).ok());
  EXPECT_TRUE(joined.get().ok());
}

/// A coordinator that is not to be trusted: accepts everybody with `proof`, then sends `next`.
class RogueCoordinator : public v1::Cluster::Service {
 public:
  RogueCoordinator(std::string proof, v1::CoordinatorMessage next) : proof_(std::move(proof)), next_(std::move(next)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~RogueCoordinator() override { server_->Shutdown(std::chrono::system_clock::now()); }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

  grpc::Status Join(grpc::ServerContext*,
                    grpc::ServerReaderWriter<v1::CoordinatorMessage, v1::MemberMessage>* stream) override {
    v1::CoordinatorMessage message;
    message.mutable_challenge()->set_nonce(std::string(kNonceBytes, 'c'));
    stream->Write(message);
    v1::MemberMessage hello;
    if (!stream->Read(&hello)) return grpc::Status::OK;
    message.mutable_accepted()->set_proof(proof_);
    stream->Write(message);
    stream->Write(next_);
    while (stream->Read(&hello)) {
    }
    return grpc::Status::OK;
  }

 private:
  const std::string proof_;
  const v1::CoordinatorMessage next_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

// The proof goes both ways: a process that took the coordinator's port does not get ranks that have a token.
TEST(ClusterJoin, CoordinatorHasToKnowTheToken) {
  for (const std::string& proof : {std::string(), std::string(kProofBytes, 'p')}) {
    RogueCoordinator rogue(proof, {});
    TestMember one(rogue.address(), identity(1, 2), "token");
    const absl::Status status = join_in(one).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(message_of(status), HasSubstr("did not prove that it knows the shared token"));
  }
}

// A roster with holes, too many ranks or no epoch is not believed; the member goes on trying until its deadline.
TEST(ClusterJoin, BadRosters) {
  v1::CoordinatorMessage hole;
  v1::Roster* roster = hole.mutable_welcome()->mutable_roster();
  roster->set_epoch(1);
  roster->set_world(2);
  roster->add_ranks()->set_rank(0);
  roster->add_ranks()->set_rank(0);
  v1::CoordinatorMessage empty;
  empty.mutable_welcome();
  for (const v1::CoordinatorMessage& next : {hole, empty, v1::CoordinatorMessage()}) {
    RogueCoordinator rogue("", next);
    TestMember one(rogue.address(), identity(1, 2));
    EXPECT_EQ(join_in(one, 300).status().code(), absl::StatusCode::kDeadlineExceeded);
  }
}

// leave() ends a join that waits, from another thread.
TEST(ClusterJoin, LeaveWhileJoining) {
  TestCoordinator coordinator(3);
  for (const std::string& address : {coordinator->address(), std::string("127.0.0.1:1")}) {
    TestMember one(address, identity(1, 3));
    auto joined = std::async(std::launch::async, [&] { return join_in(one, 20000); });
    one.notices.wait_for("rank 1 waits for");
    std::this_thread::sleep_for(milliseconds(50));
    one->leave("stopped");
    EXPECT_EQ(joined.get().status().code(), absl::StatusCode::kCancelled);
  }
}

}  // namespace
}  // namespace tensorfold
