// Real models in worlds of several ranks: rejected drafts leave no trace, ranks draft the same, long messages by rows.
#include <algorithm>
#include <chrono>
#include <map>
#include <thread>

#include "tests/worker/runtime/runtime_testing.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;

// A reply whose tokens are given: what each pass must compute does not depend on what was drafted beside it.
struct Reply {
  std::vector<std::vector<float>> rows;  // logits of the certain row of each step
  std::vector<int32_t> mtp_drafts;       // drafted at the end, with use_mtp
  std::vector<std::vector<float>> mtp_rows;
};

enum class Drafting { kNever, kRejected, kPartlyAccepted, kMtpRejected };

constexpr size_t kPrompt = 21;
constexpr size_t kSteps = 8;

std::vector<float> mtp_row(LocalCluster& cluster, uint32_t pair) {
  std::vector<float> row;
  for (int rank = 0; rank < cluster.world(); ++rank) {
    for (const RowReport& part : cluster.runner(rank).mtp_rows()) {
      if (part.row == pair) row.insert(row.end(), part.logits.begin(), part.logits.end());
    }
  }
  return row;
}

// Reads a prompt and then `kSteps` given tokens; `drafting` says what else is in the windows.
Reply run_reply(LocalCluster& cluster, Drafting drafting, bool use_mtp, const std::vector<int32_t>& tokens) {
  Reply reply;
  PassPlan prompt = prompt_plan({tokens.begin(), tokens.begin() + kPrompt}, 2);
  prompt.sequences[0].use_mtp = use_mtp;
  auto pass = cluster.executor().execute(prompt);
  EXPECT_TRUE(pass.ok()) << pass.status();
  if (!pass.ok()) return reply;
  reply.rows.push_back(row_of(*pass, kPrompt - 1));
  uint32_t accepted = 0;
  size_t at = kPrompt;
  const auto text = [&](size_t i) { return tokens[i]; };
  while (at < kPrompt + kSteps) {
    std::vector<int32_t> drafts;
    uint32_t right = 0;
    if (drafting == Drafting::kRejected) {
      for (size_t i = 0; i < 1 + (at * 7) % (kMaxWindow - 1); ++i) drafts.push_back(static_cast<int32_t>(at + i) % 480);
    } else if (drafting == Drafting::kPartlyAccepted) {
      right = static_cast<uint32_t>(std::min<size_t>(at % 3, kPrompt + kSteps - at - 1));
      for (uint32_t i = 1; i <= right; ++i) drafts.push_back(text(at + i));
      for (size_t i = 0; i < 3; ++i) drafts.push_back(static_cast<int32_t>(3 * at + i) % 480);
    }
    PassPlan window = window_plan(at, text(at), drafts, accepted);
    window.sequences[0].use_mtp = use_mtp;
    if (drafting == Drafting::kMtpRejected) window.sequences[0].mtp_steps = 1 + static_cast<uint32_t>(at % 4);
    pass = cluster.executor().execute(window);
    EXPECT_TRUE(pass.ok()) << pass.status();
    if (!pass.ok()) return reply;
    for (uint32_t row = 0; row <= right; ++row) reply.rows.push_back(row_of(*pass, row));
    accepted = right;
    at += 1 + right;
  }
  // One more pass, which drafts: its MTP layer has seen only the certain and the accepted tokens.
  PassPlan last = window_plan(at, text(at), {}, accepted);
  last.sequences[0].use_mtp = use_mtp;
  last.sequences[0].mtp_steps = use_mtp ? 4 : 0;
  for (int rank = 0; rank < cluster.world(); ++rank) cluster.runner(rank).keep_mtp_logits(use_mtp);
  pass = cluster.executor().execute(last);
  EXPECT_TRUE(pass.ok()) << pass.status();
  if (!pass.ok()) return reply;
  reply.rows.push_back(row_of(*pass, 0));
  if (use_mtp) {
    reply.mtp_drafts = pass->drafts[0];
    EXPECT_EQ(reply.mtp_drafts.size(), 4u);
    reply.mtp_rows.push_back(mtp_row(cluster, static_cast<uint32_t>(at - 1)));
  }
  for (int rank = 0; rank < cluster.world(); ++rank) cluster.runner(rank).keep_mtp_logits(false);
  EXPECT_TRUE(cluster.forget().ok());
  return reply;
}

void expect_same(const Reply& expected, const Reply& found) {
  ASSERT_EQ(found.rows.size(), expected.rows.size());
  for (size_t i = 0; i < expected.rows.size(); ++i) {
    EXPECT_TRUE(same_bits(expected.rows[i], found.rows[i])) << "row " << i;
  }
  EXPECT_EQ(found.mtp_drafts, expected.mtp_drafts);
  ASSERT_EQ(found.mtp_rows.size(), expected.mtp_rows.size());
  for (size_t i = 0; i < expected.mtp_rows.size(); ++i) {
    EXPECT_TRUE(same_bits(expected.mtp_rows[i], found.mtp_rows[i])) << "MTP row " << i;
  }
}

class RejectedDrafts : public ::testing::TestWithParam<const char*> {};

// Protects: rejected drafts leave no trace in keys, recurrent state or convolution: the logits after them are those of
// a run that never drafted, with every row, in worlds of one, two and three.
TEST_P(RejectedDrafts, LeaveNoTraceInTheLogits) {
  const std::vector<int32_t> tokens = sample_tokens(kPrompt + kSteps + 1);
  for (const int world : {1, 2, 3}) {
    SCOPED_TRACE(world);
    TestCluster cluster(GetParam(), world);
    ASSERT_NE(cluster.cluster, nullptr);
    const Reply expected = run_reply(*cluster.cluster, Drafting::kNever, false, tokens);
    expect_same(expected, run_reply(*cluster.cluster, Drafting::kRejected, false, tokens));
    expect_same(expected, run_reply(*cluster.cluster, Drafting::kPartlyAccepted, false, tokens));
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, RejectedDrafts, ::testing::Values("llama", "qwen3_5", "mlx_4bit"),
                         [](const auto& param) { return std::string(param.param); });

// Protects: the MTP layer's keys and its kept rows are those of the committed tokens alone: after any windows it drafts
// the same tokens, from the same bits, as in a run that never drafted; and drafting does not change the logits.
TEST(RejectedDraftsMtp, LeaveNoTraceInTheMtpLayer) {
  const std::vector<int32_t> tokens = sample_tokens(kPrompt + kSteps + 1, 3);
  for (const int world : {1, 2, 3}) {
    SCOPED_TRACE(world);
    TestCluster cluster("qwen3_5", world);
    ASSERT_NE(cluster.cluster, nullptr);
    const Reply without = run_reply(*cluster.cluster, Drafting::kNever, false, tokens);
    const Reply expected = run_reply(*cluster.cluster, Drafting::kNever, true, tokens);
    for (size_t i = 0; i < without.rows.size(); ++i) EXPECT_TRUE(same_bits(without.rows[i], expected.rows[i])) << i;
    for (const Drafting drafting : {Drafting::kRejected, Drafting::kPartlyAccepted, Drafting::kMtpRejected}) {
      expect_same(expected, run_reply(*cluster.cluster, drafting, true, tokens));
    }
  }
}

// Protects: the draft does not depend on the world: the MTP layer's bits are those of one rank.
TEST(RejectedDraftsMtp, DraftsAreTheSameInEveryWorld) {
  const std::vector<int32_t> tokens = sample_tokens(kPrompt + kSteps + 1, 9);
  TestCluster alone("qwen3_5", 1);
  ASSERT_NE(alone.cluster, nullptr);
  const Reply expected = run_reply(*alone.cluster, Drafting::kMtpRejected, true, tokens);
  for (const int world : {2, 3, 4, 5, 8}) {
    SCOPED_TRACE(world);
    TestCluster cluster("qwen3_5", world);
    ASSERT_NE(cluster.cluster, nullptr);
    expect_same(expected, run_reply(*cluster.cluster, Drafting::kMtpRejected, true, tokens));
  }
}

// Protects: every rank drafts the same tokens, though each holds a part of the vocabulary: else their windows differ.
TEST(RanksDraft, TheSameTokens) {
  constexpr int kWorld = 4;
  const std::unique_ptr<Ops> packer = one_thread_ops();
  auto shards = ModelShards::load_all(kFixtureRoot + "qwen3_5", kWorld, *packer);
  ASSERT_TRUE(shards.ok()) << shards.status();
  auto communicators = connect_ucx_threads(kWorld, {});
  ASSERT_TRUE(communicators.ok()) << communicators.status();
  std::vector<std::vector<std::vector<int32_t>>> drafts(kWorld);  // [rank][pass]
  std::vector<absl::Status> statuses(kWorld);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kWorld; ++rank) {
    threads.emplace_back([&, rank] {
      const size_t index = static_cast<size_t>(rank);
      const std::unique_ptr<Ops> ops = one_thread_ops();
      auto runner = PassRunner::create(*ops, (*shards)->model(rank), {.slots = 2, .pages = 4});
      if (!runner.ok()) {
        statuses[index] = runner.status();
        return;
      }
      (*runner)->use((*communicators)[index].get());
      PassPlan plan = prompt_plan(sample_tokens(30), 1);
      plan.sequences[0].use_mtp = true;
      for (uint64_t at = 30; at < 36; ++at) {
        auto result = (*runner)->run(plan);
        if (!result.ok()) {
          statuses[index] = result.status();
          return;
        }
        drafts[index].push_back(result->drafts[0]);
        plan = window_plan(at, static_cast<int32_t>(at));
        plan.sequences[0].use_mtp = true;
        plan.sequences[0].mtp_steps = 7;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(drafts[0].size(), 6u);
  EXPECT_TRUE(drafts[0][0].empty());
  EXPECT_EQ(drafts[0][5].size(), 7u);
  for (int rank = 1; rank < kWorld; ++rank) EXPECT_EQ(drafts[static_cast<size_t>(rank)], drafts[0]) << "rank " << rank;
}

// Protects: prompts so long that their sums travel by rows have the bits of one rank that read them in small pieces.
TEST(LongPrompts, SumsByRowsHaveTheSameBits) {
  constexpr size_t kRows = 530;  // * 64 columns * 4 bytes: over the threshold of 128 KiB a node
  const std::vector<int32_t> tokens = sample_tokens(kRows, 5);
  for (const char* fixture : {"qwen3_5", "llama"}) {
    SCOPED_TRACE(fixture);
    TestCluster alone(fixture, 1, 1, 10);
    ASSERT_NE(alone.cluster, nullptr);
    std::map<uint32_t, std::vector<float>> expected;
    for (size_t at = 0; at < kRows; at += 53) {
      PassPlan plan = prompt_plan(
          {tokens.begin() + static_cast<std::ptrdiff_t>(at), tokens.begin() + static_cast<std::ptrdiff_t>(at + 53)},
          10);
      if (at > 0) {
        plan.sequences[0].fresh = false;
        plan.sequences[0].first_position = at;
        plan.sequences[0].new_pages.clear();
      }
      const auto pass = alone.executor().execute(plan);
      ASSERT_TRUE(pass.ok()) << pass.status();
      expected[static_cast<uint32_t>(at + 52)] = row_of(*pass, 52);
    }
    for (const int world : {3, 4}) {
      SCOPED_TRACE(world);
      TestCluster cluster(fixture, world, 1, 10);
      ASSERT_NE(cluster.cluster, nullptr);
      PassPlan plan = prompt_plan(tokens, 10);
      plan.sequences[0].wants.clear();
      for (const auto& [row, logits] : expected) plan.sequences[0].wants.push_back({row, kFullRow});
      const auto pass = cluster.executor().execute(plan);
      ASSERT_TRUE(pass.ok()) << pass.status();
      for (const auto& [row, logits] : expected) EXPECT_TRUE(same_bits(row_of(*pass, row), logits)) << "row " << row;
    }
  }
}

// Protects: slots are their own: sequences in other slots, freed and taken anew, leave no trace in one that goes on.
TEST(Slots, AreIndependent) {
  TestCluster cluster("qwen3_5", 2);
  ASSERT_NE(cluster.cluster, nullptr);
  const std::vector<int32_t> tokens = sample_tokens(30, 8);
  const std::vector<int32_t> prompt(tokens.begin(), tokens.begin() + 20);
  const auto run = [&](bool company) {
    std::vector<std::vector<float>> rows;
    PassPlan plan = prompt_plan(prompt, 2, 0, 1);
    for (uint64_t at = 20; at <= 30; ++at) {
      if (company) {
        // A neighbour starts anew in slot 0 or 3, on the same pages each time, with a prompt that changes.
        const uint32_t slot = at % 2 == 0 ? 0 : 3;
        const PassPlan other =
            prompt_plan(sample_tokens(5 + at % 7, static_cast<uint32_t>(at)), 2, slot == 0 ? 8 : 12, slot);
        plan.sequences.insert(at % 3 == 0 ? plan.sequences.begin() : plan.sequences.end(), other.sequences[0]);
        if (at % 5 == 0) plan.release.push_back(slot);
      }
      const auto pass = cluster.executor().execute(plan);
      EXPECT_TRUE(pass.ok()) << pass.status();
      if (!pass.ok()) return rows;
      rows.push_back(row_of(*pass, at == 20 ? 19 : 0, 1));
      if (at < 30) plan = window_plan(at, tokens[at], {}, 0, 1);
    }
    EXPECT_TRUE(cluster.cluster->forget().ok());
    return rows;
  };
  const std::vector<std::vector<float>> alone = run(false);
  const std::vector<std::vector<float>> beside = run(true);
  ASSERT_EQ(alone.size(), 11u);
  ASSERT_EQ(beside.size(), alone.size());
  for (size_t i = 0; i < alone.size(); ++i) EXPECT_TRUE(same_bits(alone[i], beside[i])) << "row " << i;
}

// Protects: a plan that all ranks refuse comes back as an error with the reason, over both transports, and the cluster
// is taken down at once: its destructor does not wait for ranks that have ended.
TEST(ClusterErrors, ARefusedPlanIsAnErrorWithItsReason) {
  for (const char* transport : {"local", "ucx"}) {
    SCOPED_TRACE(transport);
    const auto begin = std::chrono::steady_clock::now();
    auto cluster = std::make_unique<TestCluster>("llama", 3, 2, 4, transport);
    ASSERT_NE(cluster->cluster, nullptr);
    EXPECT_STATUS(cluster->executor().execute(prompt_plan({1, 513}, 1)).status(), absl::StatusCode::kInternal,
                  HasSubstr("failed in pass 1"), HasSubstr("token 513 is outside the vocabulary of 512"));
    cluster.reset();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
  }
}

}  // namespace
}  // namespace tensorfold
