// Sequences that start from snapshots and from other sequences' pages: the same bits as those that computed everything.
#include "worker/state/snapshots.h"

#include <cstring>

#include "tests/worker/runtime/runtime_testing.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPrompt = 100;  // one full page and 36 tokens

// Prompt and a window of five tentative rows in slot 0, on pages 0..3, MTP layer kept up to date where there is one.
PassPlan window_after(const std::vector<int32_t>& tokens, bool use_mtp) {
  PassPlan plan = window_plan(kPrompt, tokens[kPrompt], {tokens.begin() + kPrompt + 1, tokens.begin() + kPrompt + 6});
  plan.sequences[0].use_mtp = use_mtp;
  return plan;
}

PassPlan prompt_of(const std::vector<int32_t>& tokens, bool use_mtp) {
  PassPlan plan = prompt_plan({tokens.begin(), tokens.begin() + kPrompt});
  plan.sequences[0].use_mtp = use_mtp;
  return plan;
}

// Four rows from `position` on, in `slot`, and two that the MTP layer drafts.
PassPlan go_on(const std::vector<int32_t>& tokens, int64_t position, uint32_t accepted, uint32_t slot, bool use_mtp) {
  PassPlan plan;
  SequencePlan& sequence = plan.sequences.emplace_back();
  sequence.slot = slot;
  sequence.first_position = static_cast<uint64_t>(position);
  sequence.accepted = accepted;
  sequence.certain = 4;
  sequence.use_mtp = use_mtp;
  sequence.tokens.assign(tokens.begin() + position, tokens.begin() + position + 4);
  for (uint32_t row = 0; row < 4; ++row) sequence.wants.push_back({row, kFullRow});
  return plan;
}

PassPlan one_more(const std::vector<int32_t>& tokens, int64_t position, uint32_t slot, bool use_mtp) {
  PassPlan plan = window_plan(static_cast<uint64_t>(position), tokens[static_cast<size_t>(position)], {}, 0, slot);
  SequencePlan& sequence = plan.sequences[0];
  sequence.use_mtp = use_mtp;
  sequence.mtp_steps = use_mtp ? 2 : 0;
  return plan;
}

PassResult must(absl::StatusOr<PassResult> result) {
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? *std::move(result) : PassResult{};
}

struct SnapshotCase {
  const char* fixture;
  bool use_mtp;
  int world;
};

class SnapshotsTest : public ::testing::TestWithParam<SnapshotCase> {};

TestCluster open(const SnapshotCase& which) { return TestCluster(which.fixture, which.world, 4, 32, "local", 6); }

// Protects: a snapshot of a slot whose last window had tentative rows goes on with any number of them accepted, from
// shared pages and a copy of the partial one, to the same logits and the same drafts, on every rank. In one plan: the
// snapshot is taken before its slot is released, the page is copied before the sequence that lives on it starts, and
// the slot may be the very one.
TEST_P(SnapshotsTest, GoOnWithAnyNumberOfKeptRows) {
  const bool mtp = GetParam().use_mtp;
  const std::vector<int32_t> tokens = sample_tokens(120);
  TestCluster reference = open(GetParam());
  TestCluster cached = open(GetParam());
  ASSERT_NE(cached.cluster, nullptr);
  for (uint32_t accepted = 0; accepted <= 5; ++accepted) {
    SCOPED_TRACE(accepted);
    const int64_t at = kPrompt + 1 + accepted;
    must(reference.executor().execute(prompt_of(tokens, mtp)));
    must(reference.executor().execute(window_after(tokens, mtp)));
    const PassResult expected = must(reference.executor().execute(go_on(tokens, at, accepted, 0, mtp)));
    const PassResult expected_next = must(reference.executor().execute(one_more(tokens, at + 4, 0, mtp)));

    must(cached.executor().execute(prompt_of(tokens, mtp)));
    must(cached.executor().execute(window_after(tokens, mtp)));
    PassPlan plan = go_on(tokens, at, accepted, accepted % 2 == 0 ? 0 : 2, mtp);
    plan.orders.takes = {{0, 3}};
    plan.release = {0};
    plan.orders.copies = {{1, 9}};
    SequencePlan& sequence = plan.sequences[0];
    sequence.fresh = true;
    sequence.snapshot = 3;
    sequence.new_pages = {0, 9, 11};
    const PassResult found = must(cached.executor().execute(plan));
    for (uint32_t row = 0; row < 4; ++row) {
      EXPECT_TRUE(same_bits(row_of(found, row, sequence.slot), row_of(expected, row))) << row;
    }
    const PassResult next = must(cached.executor().execute(one_more(tokens, at + 4, sequence.slot, mtp)));
    EXPECT_TRUE(same_bits(row_of(next, 0, sequence.slot), row_of(expected_next, 0)));
    EXPECT_EQ(next.drafts, expected_next.drafts);
    // The snapshot is still there, for another sequence on another copy of the page: it was copied, not moved.
    plan.orders = {};
    plan.release = {sequence.slot};
    plan.orders.copies = {{1, 12}};
    sequence.new_pages = {0, 12, 13};
    sequence.slot = 1;
    EXPECT_TRUE(same_bits(row_of(must(cached.executor().execute(plan)), 3, 1), row_of(expected, 3)));
    PassPlan clean;
    clean.release = {1};
    must(cached.executor().execute(clean));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, SnapshotsTest,
                         ::testing::Values(SnapshotCase{"qwen3_5", true, 1}, SnapshotCase{"qwen3_5", true, 3},
                                           SnapshotCase{"qwen3_5", false, 2}, SnapshotCase{"qwen3_next", false, 2},
                                           SnapshotCase{"llama", false, 2}));

// Protects: a model whose pages hold everything goes on at any position, without a snapshot, on other sequences' pages.
TEST(PagesAlone, AreEnoughWhereNothingElseLasts) {
  const std::vector<int32_t> tokens = sample_tokens(150);
  TestCluster world("llama", 2);
  must(world.executor().execute(prompt_plan({tokens.begin(), tokens.begin() + 140})));
  for (const int64_t at : {1, 63, 64, 65, 100, 127, 128, 139}) {
    SCOPED_TRACE(at);
    PassPlan cold = prompt_plan({tokens.begin(), tokens.begin() + at + 4}, 4, 8, 1);
    cold.sequences[0].wants.clear();
    for (uint32_t row = 0; row < 4; ++row)
      cold.sequences[0].wants.push_back({static_cast<uint32_t>(at) + row, kFullRow});
    const PassResult expected = must(world.executor().execute(cold));
    PassPlan plan = go_on(tokens, at, 0, 2, false);
    SequencePlan& sequence = plan.sequences[0];
    sequence.fresh = true;
    const int32_t partial = static_cast<int32_t>(at / kPageTokens);
    for (int32_t page = 0; page < partial; ++page) sequence.new_pages.push_back(page);
    sequence.new_pages.push_back(20);
    sequence.new_pages.push_back(21);
    if (at % kPageTokens != 0) plan.orders.copies = {{partial, 20}};
    const PassResult found = must(world.executor().execute(plan));
    for (uint32_t row = 0; row < 4; ++row) {
      EXPECT_TRUE(same_bits(row_of(found, row, 2), row_of(expected, static_cast<uint32_t>(at) + row, 1))) << row;
    }
  }
}

// Protects: what a rank does not have is never taken for state: dropped, unknown or missing snapshots, free slots,
// pages and positions that the model cannot start at are refused by name.
TEST(SnapshotRefusals, NameWhatIsMissing) {
  const auto refused = [](const std::function<void(PassPlan&)>& change, const char* reason, const char* fixture) {
    TestCluster world(fixture, 1, 4, 32, "local", 2);
    must(world.executor().execute(prompt_plan(sample_tokens(10), 2)));
    PassPlan plan = go_on(sample_tokens(40), 10, 0, 1, false);
    plan.sequences[0].fresh = true;
    plan.sequences[0].new_pages = {0, 1};
    plan.orders.takes = {{0, 1}};
    plan.sequences[0].snapshot = 1;
    change(plan);
    const auto result = world.executor().execute(plan);
    ASSERT_FALSE(result.ok()) << reason;
    EXPECT_THAT(std::string(result.status().message()), HasSubstr(reason));
  };
  refused([](PassPlan& p) { p.orders.takes = {{3, 1}}; }, "snapshot 1 of a slot that is free", "qwen3_5");
  refused([](PassPlan& p) { p.orders.takes = {{4, 1}}; }, "snapshot of slot 4, this rank has 4", "qwen3_5");
  refused([](PassPlan& p) { p.orders.takes = {{0, 2}}; }, "snapshot 2, this rank has 2", "qwen3_5");
  refused([](PassPlan& p) { p.orders.takes = {{0, 0}}; }, "snapshot 1, which holds nothing", "qwen3_5");
  refused([](PassPlan& p) { p.orders.drops = {1}; }, "snapshot 1, which holds nothing", "qwen3_5");
  refused([](PassPlan& p) { p.orders.copies = {{0, 32}}; }, "orders page 32, this rank has 32", "qwen3_5");
  refused([](PassPlan& p) { p.sequences[0].snapshot = kNoSnapshot; }, "position 10 without a snapshot", "qwen3_5");
  refused([](PassPlan& p) { p.sequences[0].first_position = 11; }, "position 11 for slot 1, its state is at 10",
          "llama");
  refused([](PassPlan& p) { p.sequences[0].accepted = 1, p.sequences[0].first_position = 11; }, "accepts 1 rows",
          "qwen3_5");
}

// Protects: the bytes of a snapshot give the same snapshot back, and bytes that are cut, longer or changed in what can
// be checked are refused before anything is taken from them.
TEST(SnapshotBytes, ComeBackOrAreRefused) {
  const std::unique_ptr<Ops> ops = one_thread_ops();
  ModelShape shape;
  shape.hidden = 16;
  shape.has_mtp = true;
  DeltaNetShape linear;
  linear.k_heads = linear.v_heads = 1;
  linear.dk = linear.dv = 16;
  linear.k_head_of = {0};
  shape.recurrent = {linear, linear};
  SlotTable table(shape, *ops, 1, 4);
  SequencePlan plan;
  plan.fresh = true;
  plan.certain = 1;
  plan.tokens = {1};
  plan.new_pages = {0};
  Slot& slot = **table.open(plan);
  slot.committed = 9;
  slot.tentative = 2;
  slot.kept_tokens = {4, 5};
  slot.kept_rows = 3;
  slot.kept_position = 8;
  std::vector<float> hidden(3 * 16);
  for (size_t i = 0; i < hidden.size(); ++i) hidden[i] = static_cast<float>(i);
  ops->upload(hidden, slot.kept_hidden.row_range(0, 3));
  SnapshotStore store(shape, *ops, 3);
  // What the plan of memory says is there before the first snapshot is taken.
  EXPECT_EQ(store.bytes(),
            3 * (slot.recurrent[0]->bytes() + slot.recurrent[1]->bytes() + int64_t{kMaxWindow} * 16 * 4));
  ASSERT_TRUE(store.take(0, slot).ok());
  std::vector<std::byte> bytes;
  ASSERT_TRUE(store.save(0, &bytes).ok());
  // The states keep no rows, and the slot says two.
  EXPECT_FALSE(store.load(2, bytes).ok());
  for (const std::unique_ptr<RecurrentState>& state : slot.recurrent) {
    std::vector<std::byte> own(static_cast<size_t>(state->bytes()));
    state->save(own);
    const int64_t kept = slot.tentative;
    std::memcpy(own.data(), &kept, sizeof(kept));
    ASSERT_TRUE(state->load(own, kept));
  }
  ASSERT_TRUE(store.take(0, slot).ok());
  ASSERT_TRUE(store.save(0, &bytes).ok());
  ASSERT_TRUE(store.load(2, bytes).ok());
  std::vector<std::byte> again;
  ASSERT_TRUE(store.save(2, &again).ok());
  EXPECT_EQ(again, bytes);
  EXPECT_FALSE(store.save(1, &again).ok());
  for (size_t size = 0; size < bytes.size(); size += 37) {
    EXPECT_FALSE(store.load(1, std::span(bytes).first(size)).ok()) << size;
  }
  for (const size_t field : {0u, 8u, 16u, 24u, 32u}) {  // committed, tentative, kept rows, their position, kept tokens
    std::vector<std::byte> changed = bytes;
    changed[field + 1] = std::byte{0x7F};
    EXPECT_FALSE(store.load(1, changed).ok()) << field;
  }
  EXPECT_FALSE(store.restore(1, &slot).ok()) << "a refused snapshot must hold nothing";
}

}  // namespace
}  // namespace tensorfold
