// The slot table: what a plan may do to a slot, and what a slot keeps.
#include "worker/state/slots.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/cpu/cpu_ops.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;

ModelShape small_shape(bool has_mtp) {
  ModelShape shape;
  shape.hidden = 32;
  shape.vocab = 64;
  shape.has_mtp = has_mtp;
  DeltaNetShape linear;
  linear.k_heads = 1;
  linear.v_heads = 2;
  linear.dk = 16;
  linear.dv = 16;
  linear.k_head_of = {0, 0};
  shape.recurrent = {linear, linear};
  return shape;
}

SequencePlan fresh_plan(uint32_t slot, size_t tokens, std::vector<int32_t> pages) {
  SequencePlan plan;
  plan.slot = slot;
  plan.fresh = true;
  plan.certain = static_cast<uint32_t>(tokens);
  plan.tokens.assign(tokens, 1);
  plan.new_pages = std::move(pages);
  return plan;
}

class SlotTableTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string error;
    ops_ = make_cpu_ops({.threads = 1, .isa = "portable", .pool = nullptr}, &error);
    ASSERT_NE(ops_, nullptr) << error;
    table_ = std::make_unique<SlotTable>(shape_, *ops_, 3, 8);
  }

  const ModelShape shape_ = small_shape(true);
  std::unique_ptr<Ops> ops_;
  std::unique_ptr<SlotTable> table_;
};

// Protects: a fresh slot is empty whatever was in it: position, pages, kept rows; its states are reused, not made anew.
TEST_F(SlotTableTest, AFreshSlotIsEmpty) {
  const auto first = table_->open(fresh_plan(1, 100, {3, 4}));
  ASSERT_TRUE(first.ok()) << first.status();
  Slot& slot = **first;
  EXPECT_EQ(slot.pages, (std::vector<int32_t>{3, 4}));
  ASSERT_EQ(slot.recurrent.size(), 2u);
  const RecurrentState* const state = slot.recurrent[0].get();
  const float* const kept = slot.kept_hidden.data;
  EXPECT_NE(kept, nullptr);
  slot.committed = 100;
  slot.tentative = 3;
  slot.kept_rows = 4;
  slot.kept_tokens = {1, 2, 3};
  const auto again = table_->open(fresh_plan(1, 5, {7}));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*again, &slot);
  EXPECT_EQ(slot.committed, 0);
  EXPECT_EQ(slot.tentative, 0);
  EXPECT_EQ(slot.pages, (std::vector<int32_t>{7}));
  EXPECT_EQ(slot.kept_rows, 0);
  EXPECT_TRUE(slot.kept_tokens.empty());
  EXPECT_EQ(slot.recurrent[0].get(), state);
  EXPECT_EQ(slot.kept_hidden.data, kept);
}

// Protects: serving takes no memory for states: those of all slots are there at the start, and use adds nothing.
TEST_F(SlotTableTest, StatesAreTakenAtTheStart) {
  const int64_t all = table_->state_bytes();
  ASSERT_TRUE(table_->open(fresh_plan(0, 1, {0})).ok());
  const Slot& slot = *table_->find(0);
  ASSERT_EQ(slot.recurrent.size(), 2u);
  EXPECT_EQ(all, 3 * (slot.recurrent[0]->bytes() + slot.recurrent[1]->bytes()));
  EXPECT_EQ(table_->state_bytes(), all);
}

// Protects: the next position is the committed one plus what was accepted, and nothing else.
TEST_F(SlotTableTest, PositionsFollowFromCommits) {
  const auto opened = table_->open(fresh_plan(0, 10, {0, 1}));
  ASSERT_TRUE(opened.ok()) << opened.status();
  (*opened)->committed = 10;
  (*opened)->tentative = 4;
  for (uint32_t accepted = 0; accepted < 8; ++accepted) {
    for (uint64_t position = 8; position < 20; ++position) {
      SequencePlan plan;
      plan.first_position = position;
      plan.accepted = accepted;
      plan.certain = 1;
      plan.tokens = {1};
      EXPECT_EQ(table_->open(plan).ok(), accepted <= 4 && position == 10 + accepted) << accepted << " at " << position;
    }
  }
}

// Protects: a freed slot is only taken again as a fresh one, and freeing what does not exist does nothing.
TEST_F(SlotTableTest, FreedSlotsMustStartAnew) {
  ASSERT_TRUE(table_->open(fresh_plan(0, 10, {0, 1})).ok());
  table_->release(0);
  table_->release(0);
  table_->release(3);
  table_->release(0xFFFFFFFFu);
  SequencePlan plan;
  plan.certain = 1;
  plan.tokens = {1};
  const auto refused = table_->open(plan);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("slot 0, which is free here"));
  EXPECT_TRUE(table_->open(fresh_plan(0, 10, {0})).ok());
}

// Protects: drafted rows need pages as well.
TEST_F(SlotTableTest, DraftedRowsNeedPages) {
  SequencePlan plan = fresh_plan(0, 60, {0});
  plan.use_mtp = true;
  plan.mtp_steps = 4;
  EXPECT_TRUE(table_->open(plan).ok());
  plan.mtp_steps = 5;
  const auto refused = table_->open(plan);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("to position 65, its 1 pages end at 64"));
}

}  // namespace
}  // namespace tensorfold
