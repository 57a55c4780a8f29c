// transport/join: identities, the shared token, the outbox.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "transport/join/identity.h"
#include "transport/join/outbox.h"
#include "transport/join/roster.h"
#include "transport/join/token.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

RankIdentity make(uint32_t rank) {
  RankIdentity identity;
  identity.build = "b1";
  identity.fingerprint = "f1";
  identity.checkpoint = "c1";
  identity.profile = "p1";
  identity.slices = "s1";
  identity.rank = rank;
  identity.world = 4;
  identity.host = rank == 0 ? "spark-1" : "spark-2";
  identity.pid = 77;
  identity.transport = "ucx";
  return identity;
}

std::string refusal(const RankIdentity& joining) {
  const absl::Status status = check_join(make(0), joining);
  return std::string(status.message());
}

// Ranks that agree may join, whatever their host, pid and address.
TEST(CheckJoin, AcceptsWhatFits) {
  for (const uint32_t rank : {1u, 2u, 3u}) EXPECT_TRUE(check_join(make(0), make(rank)).ok());
}

// Every fact of the contract is compared, and a refusal shows both values: what a person needs to fix it.
TEST(CheckJoin, NamesEveryMismatchWithBothValues) {
  RankIdentity joining = make(1);
  joining.protocol = 9;
  EXPECT_THAT(refusal(joining), HasSubstr("protocol version: the coordinator has 1, rank 1 has 9"));
  const struct {
    std::string RankIdentity::*field;
    const char* name;
    const char* own;
  } fields[] = {{&RankIdentity::build, "build", "b1"},
                {&RankIdentity::fingerprint, "numeric fingerprint", "f1"},
                {&RankIdentity::checkpoint, "checkpoint hash", "c1"},
                {&RankIdentity::profile, "profile hash", "p1"},
                {&RankIdentity::slices, "slice plan", "s1"},
                {&RankIdentity::transport, "transport", "ucx"}};
  for (const auto& field : fields) {
    joining = make(1);
    joining.*field.field = "other";
    const std::string text = refusal(joining);
    EXPECT_THAT(text,
                HasSubstr(std::string(field.name) + ": the coordinator has '" + field.own + "', rank 1 has 'other'"));
    EXPECT_THAT(text, Not(HasSubstr(";"))) << "only the one mismatch";
    EXPECT_THAT(text, HasSubstr("rank 1 (host spark-2, pid 77)"));
  }
  joining = make(1);
  joining.world = 2;
  EXPECT_THAT(refusal(joining), HasSubstr("world: the coordinator has 4, rank 1 has 2"));
}

// All mismatches come at once: nobody should have to fix them one start at a time.
TEST(CheckJoin, ListsAllMismatchesInOneMessage) {
  RankIdentity joining = make(2);
  joining.build = "b2";
  joining.checkpoint = "";
  const std::string text = refusal(joining);
  EXPECT_THAT(text, HasSubstr("build: the coordinator has 'b1', rank 2 has 'b2'; checkpoint hash: the coordinator has "
                              "'c1', rank 2 has (none)"));
}

// Ranks that the world does not have.
TEST(CheckJoin, RefusesRanksOutsideTheWorld) {
  EXPECT_THAT(refusal(make(4)), HasSubstr("rank 4 is outside the coordinator's world of 4 (ranks 0 to 3)"));
  EXPECT_THAT(refusal(make(0)), HasSubstr("is the coordinator itself"));
}

// Text of another process may not carry control characters into a terminal or a log.
TEST(CheckJoin, ShowsHostileTextHarmlessly) {
  RankIdentity joining = make(1);
  joining.host = "a\x1b[2Jb\n";
  joining.build = std::string(4000, 'x');
  const std::string text = refusal(joining);
  EXPECT_THAT(text, HasSubstr("a\\x1b[2Jb\\x0a"));
  EXPECT_LT(text.size(), 1500u);
}

// Lengths are bounded before anything is compared or kept.
TEST(ValidateIdentity, BoundsEveryField) {
  EXPECT_TRUE(validate_identity(make(1)).ok());
  RankIdentity long_slices = make(1);
  long_slices.slices.assign(kMaxSliceText + 1, 's');
  EXPECT_THAT(std::string(validate_identity(long_slices).message()), HasSubstr("slice plan has 8193 bytes"));
  RankIdentity long_address = make(1);
  long_address.address.resize(kMaxTransportAddress + 1);
  EXPECT_FALSE(validate_identity(long_address).ok());
  for (const uint32_t world : {0u, 9u}) {
    RankIdentity identity = make(1);
    identity.world = world;
    EXPECT_FALSE(validate_identity(identity).ok());
  }
}

// A proof serves one token, one direction, one pair of nonces and one identity.
TEST(Token, ProofDependsOnEverythingInIt) {
  const std::string proof = token_proof("secret", Prover::kMember, "n0", "n1", make(1));
  EXPECT_EQ(proof.size(), kProofBytes);
  EXPECT_TRUE(proofs_equal(proof, token_proof("secret", Prover::kMember, "n0", "n1", make(1))));
  EXPECT_FALSE(proofs_equal(proof, token_proof("Secret", Prover::kMember, "n0", "n1", make(1))));
  EXPECT_FALSE(proofs_equal(proof, token_proof("secret", Prover::kCoordinator, "n0", "n1", make(1))));
  EXPECT_FALSE(proofs_equal(proof, token_proof("secret", Prover::kMember, "n", "0n1", make(1))));
  RankIdentity other = make(1);
  other.address = {std::byte{1}};
  EXPECT_FALSE(proofs_equal(proof, token_proof("secret", Prover::kMember, "n0", "n1", other)));
  EXPECT_EQ(token_proof("", Prover::kMember, "n0", "n1", make(1)), "");
  EXPECT_FALSE(proofs_equal(proof, ""));
}

// A nonce that repeats would let an old proof be used again.
TEST(Token, NoncesDiffer) {
  const absl::StatusOr<std::string> a = make_nonce();
  const absl::StatusOr<std::string> b = make_nonce();
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(a->size(), kNonceBytes);
  EXPECT_NE(*a, *b);
}

// Timings that would lose healthy ranks are refused.
TEST(Timings, Validate) {
  EXPECT_TRUE(ClusterTimings{}.validate().ok());
  ClusterTimings timings;
  timings.heartbeat_interval = std::chrono::milliseconds(600);
  EXPECT_FALSE(timings.validate().ok());
  timings.heartbeat_interval = std::chrono::milliseconds(0);
  EXPECT_FALSE(timings.validate().ok());
}

// Messages keep their order, heartbeats come by themselves, and a dead stream ends it.
TEST(Outbox, WritesInOrderAndBeats) {
  std::mutex mutex;
  std::vector<int> written;
  std::atomic<int> beats{0};
  Outbox<int> outbox(
      [&](const int& message) {
        const std::lock_guard lock(mutex);
        written.push_back(message);
        return message != 99;
      },
      [&]() -> std::optional<int> {
        ++beats;
        return std::nullopt;
      },
      std::chrono::milliseconds(5));
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(outbox.post(i));
  EXPECT_TRUE(outbox.flush(Deadline::after(std::chrono::seconds(5))));
  {
    const std::lock_guard lock(mutex);
    EXPECT_EQ(written, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  }
  const Deadline deadline = Deadline::after(std::chrono::seconds(5));
  while (beats < 3 && !deadline.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_GE(beats, 3);
  outbox.post(99);
  EXPECT_TRUE(outbox.flush(Deadline::after(std::chrono::seconds(5))));
  EXPECT_FALSE(outbox.post(5));
}

}  // namespace
}  // namespace tensorfold
