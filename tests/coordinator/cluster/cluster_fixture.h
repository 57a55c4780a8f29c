// What the cluster tests share: identities that fit together, a recorder of notices and events, and a hand-made client
// that speaks cluster.proto without worker/member, to misbehave where Member would not.
#pragma once

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "coordinator/cluster/membership.h"
#include "tensorfold/v1/cluster.grpc.pb.h"
#include "transport/join/token.h"
#include "worker/member/member.h"
#include "worker/member/wire.h"

namespace tensorfold {

using std::chrono::milliseconds;

inline Deadline within(int ms) { return Deadline::after(milliseconds(ms)); }

/// A busy machine may keep a healthy thread waiting for a second: `timeout_ms` of silence lose a rank.
inline ClusterTimings patient(int timeout_ms = 8000) {
  ClusterTimings timings;
  timings.heartbeat_timeout = milliseconds(timeout_ms);
  timings.handshake_timeout = milliseconds(20000);
  return timings;
}

inline std::vector<std::byte> bytes(const std::string& text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

inline RankIdentity identity(uint32_t rank, uint32_t world) {
  RankIdentity identity;
  identity.build = "0.1.0-abc";
  identity.fingerprint = "0123456789abcdef";
  identity.checkpoint = "checkpoint-a";
  identity.profile = "profile-a";
  identity.slices = "heads 8";
  identity.rank = rank;
  identity.world = world;
  identity.host = "host-" + std::to_string(rank);
  identity.pid = 1000 + rank;
  identity.transport = "ucx";
  identity.address = bytes("address-" + std::to_string(rank));
  return identity;
}

/// Remembers lines, from any thread, and waits for one.
class Lines {
 public:
  void add(const std::string& line) {
    {
      const std::lock_guard lock(mutex_);
      lines_.push_back(line);
    }
    changed_.notify_all();
  }
  /// The first line that contains `part`; empty after 20 s.
  std::string wait_for(const std::string& part) {
    std::unique_lock lock(mutex_);
    std::string found;
    changed_.wait_until(lock, within(20000).time(), [&] {
      for (const std::string& line : lines_) {
        if (line.find(part) != std::string::npos) found = line;
        if (!found.empty()) return true;
      }
      return false;
    });
    return found;
  }
  size_t count(const std::string& part) const {
    const std::lock_guard lock(mutex_);
    size_t count = 0;
    for (const std::string& line : lines_) count += line.find(part) != std::string::npos;
    return count;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> lines_;
};

/// Rank 0 with its events.
class TestCoordinator {
 public:
  explicit TestCoordinator(uint32_t world, std::string token = "", ClusterTimings timings = patient(),
                           std::string listen = "127.0.0.1:0") {
    MembershipOptions options;
    options.listen = std::move(listen);
    options.identity = identity(0, world);
    options.token = std::move(token);
    options.timings = timings;
    options.on_notice = [this](const std::string& text) { notices.add(text); };
    options.on_lost = [this](const LostRank& rank) { lost.add(rank.text()); };
    options.on_epoch_over = [this](uint32_t epoch, const std::string& cause) {
      over.add("epoch " + std::to_string(epoch) + ": " + cause);
    };
    absl::StatusOr<std::unique_ptr<Membership>> started = Membership::start(options);
    EXPECT_TRUE(started.ok()) << started.status();
    if (started.ok()) membership = *std::move(started);
  }
  Membership& operator*() { return *membership; }
  Membership* operator->() { return membership.get(); }

  Lines notices, lost, over;
  std::unique_ptr<Membership> membership;
};

/// Another rank with its events.
class TestMember {
 public:
  TestMember(const std::string& coordinator, RankIdentity identity, std::string token = "",
             ClusterTimings timings = patient()) {
    MemberOptions options;
    options.coordinator = coordinator;
    options.identity = std::move(identity);
    options.token = std::move(token);
    options.timings = timings;
    options.on_notice = [this](const std::string& text) { notices.add(text); };
    options.on_shutdown = [this](const std::string& reason, bool drain) {
      events.add("shutdown " + reason + (drain ? " drain" : " now"));
      if (leave_on_shutdown) member->leave("as asked");
    };
    options.on_epoch_over = [this](uint32_t epoch, const std::string& cause) {
      events.add("over " + std::to_string(epoch) + " " + cause);
    };
    options.on_regroup = [this](const Roster& roster) { events.add("regroup " + std::to_string(roster.epoch)); };
    options.on_coordinator_lost = [this](const std::string& cause) { events.add("lost " + cause); };
    absl::StatusOr<std::unique_ptr<Member>> created = Member::create(std::move(options));
    EXPECT_TRUE(created.ok()) << created.status();
    if (created.ok()) member = *std::move(created);
  }
  Member* operator->() { return member.get(); }

  Lines notices, events;
  bool leave_on_shutdown = false;  // set before join()
  std::unique_ptr<Member> member;
};

/// Speaks the protocol by hand.
class RawMember {
 public:
  explicit RawMember(const std::string& coordinator)
      : stub(v1::Cluster::NewStub(grpc::CreateChannel(coordinator, grpc::InsecureChannelCredentials()))),
        stream(stub->Join(&context)) {}
  ~RawMember() {
    context.TryCancel();
    v1::CoordinatorMessage message;
    while (stream->Read(&message)) {
    }
    stream->Finish();
  }

  /// Reads the challenge and says hello; the next message is the verdict.
  v1::CoordinatorMessage join(const RankIdentity& identity, const std::string& token = "") {
    v1::CoordinatorMessage message;
    EXPECT_TRUE(stream->Read(&message));
    v1::MemberMessage hello;
    identity_to_wire(identity, hello.mutable_hello()->mutable_identity());
    hello.mutable_hello()->set_nonce(std::string(kNonceBytes, 'n'));
    hello.mutable_hello()->set_proof(
        token_proof(token, Prover::kMember, message.challenge().nonce(), hello.hello().nonce(), identity));
    stream->Write(hello);
    EXPECT_TRUE(stream->Read(&message));
    return message;
  }

  grpc::ClientContext context;
  std::unique_ptr<v1::Cluster::Stub> stub;
  std::unique_ptr<grpc::ClientReaderWriter<v1::MemberMessage, v1::CoordinatorMessage>> stream;
};

inline std::string message_of(const absl::Status& status) { return std::string(status.message()); }

inline void wait_until_state(Membership& membership, uint32_t rank, RankState state) {
  const Deadline deadline = within(20000);
  while (membership.rank_status()[rank].state != state && !deadline.passed()) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_STREQ(rank_state_name(membership.rank_status()[rank].state), rank_state_name(state));
}

}  // namespace tensorfold
