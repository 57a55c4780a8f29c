#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "transport/base/collective_checks.h"
#include "transport/base/communicator.h"
#include "transport/base/message_tag.h"
#include "transport/base/spin_policy.h"

namespace tensorfold {
namespace {

using std::chrono::microseconds;
using testing::AllOf;
using testing::HasSubstr;

// The header's fields do not run into each other at their extremes.
TEST(MessageTagTest, PacksAndUnpacks) {
  for (uint32_t epoch : {0u, 1u, 0x80000001u, UINT32_MAX}) {
    for (uint32_t sequence : {0u, 1u, MessageTag::kSequenceMask}) {
      for (int source : {0, 7}) {
        const MessageTag tag{MessageKind::kMeasure, source, epoch, sequence};
        const MessageTag back = MessageTag::unpack(tag.pack());
        EXPECT_EQ(back.kind, tag.kind);
        EXPECT_EQ(back.source, source);
        EXPECT_EQ(back.epoch, epoch);
        EXPECT_EQ(back.sequence, sequence);
        EXPECT_EQ(tag.pack() & MessageTag::kSourceMask, MessageTag::source_bits(source));
      }
    }
  }
}

// A stale or misplaced message is an error with both values, whichever field differs.
TEST(MessageTagTest, NamesBothValues) {
  const MessageTag expected{MessageKind::kBroadcast, 1, 5, 100};
  EXPECT_TRUE(check_message_tag(expected, expected, "rank 1").ok());
  MessageTag other = expected;
  other.epoch = 4;
  absl::Status status = check_message_tag(expected, other, "rank 1 (spark-b)");
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("rank 1 (spark-b)"), HasSubstr("epoch 4"), HasSubstr("ours is 5")));
  other = expected;
  other.sequence = 99;
  status = check_message_tag(expected, other, "rank 1 (spark-b)");
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("message 100"), HasSubstr("message 99")));
  other = expected;
  other.kind = static_cast<MessageKind>(12);
  status = check_message_tag(expected, other, "rank 1");
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("broadcast"), HasSubstr("operation 12")));
}

// The sequence number in the header wraps; the count behind it does not have to.
TEST(MessageTagTest, SequenceWraps) {
  const MessageTag expected{MessageKind::kBarrier, 2, 1, MessageTag::kSequenceMask + 1};
  EXPECT_TRUE(check_message_tag(expected, MessageTag::unpack(expected.pack()), "rank 2").ok());
}

// Sizes that do not fit their buffer, or overflow when added, are refused before anything is sent.
TEST(CollectiveChecksTest, Pieces) {
  const std::vector<size_t> sizes = {3, 0, 5};
  EXPECT_TRUE(check_pieces("all_gather", "out", sizes, 3, 8).ok());
  EXPECT_FALSE(check_pieces("all_gather", "out", sizes, 3, 9).ok());
  EXPECT_FALSE(check_pieces("all_gather", "out", sizes, 3, 7).ok());
  EXPECT_FALSE(check_pieces("all_gather", "out", sizes, 2, 8).ok());
  const std::vector<size_t> overflow = {SIZE_MAX, 9};
  EXPECT_FALSE(check_pieces("all_gather", "out", overflow, 2, 8).ok());
}

// Worlds outside 1..8, and ranks outside their world, are refused by name.
TEST(CollectiveChecksTest, WorldMembership) {
  EXPECT_TRUE(check_membership(0, 1, {"a"}).ok());
  EXPECT_FALSE(check_membership(0, 0, {}).ok());
  EXPECT_FALSE(check_membership(0, 9, std::vector<std::string>(9, "a")).ok());
  EXPECT_FALSE(check_membership(2, 2, {"a", "b"}).ok());
  EXPECT_FALSE(check_membership(0, 2, {"a"}).ok());
}

// No wait is endless, and one that is over before it begins is not negative.
TEST(DeadlineTest, Bounds) {
  EXPECT_LE(Deadline::after(Deadline::Clock::duration::max()).left(), Deadline::kLongest);
  EXPECT_LE(Deadline::at(Deadline::Clock::time_point::max()).left(), Deadline::kLongest);
  EXPECT_TRUE(Deadline::after(std::chrono::seconds(-1)).passed());
  EXPECT_EQ(Deadline::after(std::chrono::seconds(-1)).left().count(), 0);
  EXPECT_FALSE(Deadline::after(std::chrono::minutes(1)).passed());
}

// A rank that idles soon spins least; one whose waits are short spins through them.
TEST(SpinPolicyTest, Adapts) {
  SpinPolicy spin(microseconds(50), microseconds(200));
  for (int i = 0; i < 5; ++i) spin.had_to_sleep();
  EXPECT_EQ(spin.window(), microseconds(50));
  for (int i = 0; i < 5; ++i) spin.spinning_paid();
  EXPECT_EQ(spin.window(), microseconds(200));
}

}  // namespace
}  // namespace tensorfold
