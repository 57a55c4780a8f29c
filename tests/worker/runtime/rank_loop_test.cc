// The two ends of a pass when something is wrong: plans out of order, damaged messages, ranks that fail.
#include "worker/runtime/rank_loop.h"

#include <fmt/format.h>

#include <atomic>
#include <thread>

#include "tests/worker/runtime/runtime_testing.h"
#include "transport/local/local_world.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kEpoch = 6;

absl::Status succeed(PassContext&, Tensor) { return absl::OkStatus(); }

// Exchanges a sum, as every real layer does.
absl::Status exchange(PassContext& pass, Tensor residual) {
  const int rank_count = 2;
  std::vector<Tensor> partials;
  for (int i = 0; i < 8 / rank_count; ++i) {
    partials.push_back(ScriptedModel::zeros(*pass.ops, residual.rows, residual.cols));
  }
  return pass.sum->add(8, 0, partials, residual);
}

// Two ranks over threads, each with a scripted model; rank 1 serves plans.
class RankLoopTest : public ::testing::Test {
 protected:
  void start(ScriptedModel::Forward zero, ScriptedModel::Forward one, RunnerOptions one_options = {}) {
    auto world = LocalWorld::create(2, kEpoch, {"spark-1", "spark-2"});
    ASSERT_TRUE(world.ok()) << world.status();
    communicators_ = *std::move(world);
    models_.push_back(std::make_unique<ScriptedModel>(ShardSpec{2, 0}, std::move(zero)));
    models_.push_back(std::make_unique<ScriptedModel>(ShardSpec{2, 1}, std::move(one)));
    for (size_t rank = 0; rank < 2; ++rank) {
      ops_.push_back(one_thread_ops());
      auto runner = PassRunner::create(*ops_[rank], *models_[rank], rank == 0 ? RunnerOptions{} : one_options);
      ASSERT_TRUE(runner.ok()) << runner.status();
      runners_.push_back(*std::move(runner));
      runners_[rank]->use(communicators_[rank].get());
    }
    rank_one_ = std::thread([this] {
      RankLoopHooks hooks;
      hooks.should_stop = [this] { return stop_.load(); };
      hooks.on_step = [this](uint64_t sequence) { last_step_ = sequence; };
      ended_ = run_rank(*runners_[1], *communicators_[1], hooks);
    });
  }

  // The status that rank 1's loop ended with.
  absl::Status end() {
    rank_one_.join();
    return ended_;
  }

  void TearDown() override {
    stop_ = true;
    if (rank_one_.joinable()) rank_one_.join();
  }

  void send(std::vector<std::byte> message) {
    const absl::Status sent =
        communicators_[0]->broadcast(0, message, kMaxPlanBytes, Deadline::after(std::chrono::seconds(10)));
    ASSERT_TRUE(sent.ok()) << sent;
  }
  void send_plan(uint32_t epoch, uint64_t sequence) {
    PassPlan plan;
    plan.kind = PlanKind::kPing;
    plan.epoch = epoch;
    plan.sequence = sequence;
    send(encode_plan(plan));
  }
  void collect() {
    std::vector<std::vector<std::byte>> all;
    const absl::Status gathered =
        communicators_[0]->gather(0, {}, &all, size_t{1} << 20, Deadline::after(std::chrono::seconds(10)));
    ASSERT_TRUE(gathered.ok()) << gathered;
  }

  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::vector<std::unique_ptr<ScriptedModel>> models_;
  std::vector<std::unique_ptr<Ops>> ops_;
  std::vector<std::unique_ptr<PassRunner>> runners_;
  std::thread rank_one_;
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> last_step_{0};
  absl::Status ended_ = absl::UnknownError("still running");
};

// Protects: nothing of an earlier membership is computed on; both epochs are named.
TEST_F(RankLoopTest, EndsOnAnotherEpoch) {
  start(succeed, succeed);
  send_plan(kEpoch - 1, 1);
  EXPECT_STATUS(end(), absl::StatusCode::kDataLoss, HasSubstr("rank 1"), HasSubstr("epoch 5, pass 1"),
                HasSubstr("expected epoch 6, pass 1"));
}

// Protects: a plan that comes twice is not computed twice.
TEST_F(RankLoopTest, EndsOnARepeatedPlan) {
  start(succeed, succeed);
  send_plan(kEpoch, 1);
  collect();
  send_plan(kEpoch, 1);
  EXPECT_STATUS(end(), absl::StatusCode::kDataLoss, HasSubstr("epoch 6, pass 1"),
                HasSubstr("expected epoch 6, pass 2"));
  EXPECT_EQ(last_step_, 1u);
}

// Protects: a plan that was lost is noticed at the next one.
TEST_F(RankLoopTest, EndsOnALostPlan) {
  start(succeed, succeed);
  send_plan(kEpoch, 1);
  collect();
  send_plan(kEpoch, 3);
  EXPECT_STATUS(end(), absl::StatusCode::kDataLoss, HasSubstr("epoch 6, pass 3"),
                HasSubstr("expected epoch 6, pass 2"));
}

// Protects: a damaged plan is not computed on; it is named as damage.
TEST_F(RankLoopTest, EndsOnADamagedPlan) {
  start(succeed, succeed);
  PassPlan plan = prompt_plan({1, 2}, 1);
  plan.epoch = kEpoch;
  plan.sequence = 1;
  std::vector<std::byte> bytes = encode_plan(plan);
  bytes[30] ^= std::byte{4};
  send(bytes);
  EXPECT_STATUS(end(), absl::StatusCode::kDataLoss, HasSubstr("plan: checksum"), HasSubstr("computed"));
}

// Protects: passes run, are counted, and a stop ends the loop without an error.
TEST_F(RankLoopTest, ServesPassesUntilStop) {
  start(exchange, [](PassContext& pass, Tensor residual) {
    std::vector<Tensor> partials;
    for (int i = 0; i < 4; ++i) partials.push_back(ScriptedModel::zeros(*pass.ops, residual.rows, residual.cols));
    return pass.sum->add(8, 4, partials, residual);
  });
  WorldExecutor executor(*runners_[0], communicators_[0].get());
  auto pass = executor.execute(prompt_plan({1, 2, 3}, 1));
  ASSERT_TRUE(pass.ok()) << pass.status();
  ASSERT_EQ(pass->reports.size(), 2u);
  EXPECT_EQ(pass->reports[1].rank, 1u);
  EXPECT_EQ(pass->reports[1].rows[0].first_id, 16);
  EXPECT_EQ(row_of(*pass, 2).size(), 32u);
  pass = executor.execute(window_plan(3, 4, {5, 6}));
  ASSERT_TRUE(pass.ok()) << pass.status();
  EXPECT_TRUE(executor.stop().ok());
  EXPECT_TRUE(end().ok()) << ended_;
  EXPECT_EQ(last_step_, 3u);
}

// Protects: a plan that rank 0 itself finds wrong is never sent, and the world stays in step.
TEST_F(RankLoopTest, RefusedPlansDoNotBreakTheWorld) {
  start(succeed, succeed);
  WorldExecutor executor(*runners_[0], communicators_[0].get());
  PassPlan bad = prompt_plan({1, 2}, 1);
  bad.sequences[0].certain = 3;
  EXPECT_STATUS(executor.execute(bad).status(), absl::StatusCode::kInvalidArgument, HasSubstr("3 certain of 2 tokens"));
  PassPlan huge = prompt_plan({1, 2}, 1);
  huge.sequences[0].new_pages.assign(300000, 0);
  EXPECT_STATUS(executor.execute(huge).status(), absl::StatusCode::kInvalidArgument, HasSubstr("at most 1048576"));
  const auto pass = executor.execute(prompt_plan({1, 2}, 1));
  EXPECT_TRUE(pass.ok()) << pass.status();
  EXPECT_TRUE(executor.stop().ok());
  EXPECT_TRUE(end().ok()) << ended_;
}

// Protects: a rank that fails in a pass is named with its host and cause, and ends its own loop with that cause.
TEST_F(RankLoopTest, AFailedRankIsNamedWithItsCause) {
  start(succeed, [](PassContext&, Tensor) { return absl::InternalError("layer 3: the accelerator fell over"); });
  WorldExecutor executor(*runners_[0], communicators_[0].get());
  EXPECT_STATUS(executor.execute(prompt_plan({1, 2}, 1)).status(), absl::StatusCode::kInternal,
                HasSubstr("rank 1 (spark-2) failed in pass 1"), HasSubstr("layer 3: the accelerator fell over"));
  EXPECT_STATUS(end(), absl::StatusCode::kInternal, HasSubstr("the accelerator fell over"));
}

// Protects: the same of rank 0 itself.
TEST_F(RankLoopTest, RankZerosOwnFailureIsNamedToo) {
  start([](PassContext&, Tensor) { return absl::InternalError("rank 0 has no memory"); }, succeed);
  WorldExecutor executor(*runners_[0], communicators_[0].get());
  EXPECT_STATUS(executor.execute(prompt_plan({1, 2}, 1)).status(), absl::StatusCode::kInternal,
                HasSubstr("rank 0 (spark-1) failed in pass 1"), HasSubstr("rank 0 has no memory"));
}

// Protects: a plan that all ranks refuse names the reason, not the silence after it.
TEST_F(RankLoopTest, APlanThatAllRefuseNamesTheReason) {
  start(exchange, exchange);
  WorldExecutor executor(*runners_[0], communicators_[0].get());
  EXPECT_STATUS(executor.execute(prompt_plan({1, 32}, 1)).status(), absl::StatusCode::kInternal,
                HasSubstr("rank 0 (spark-1) failed in pass 1"), HasSubstr("token 32 is outside the vocabulary of 32"));
}

// Protects: a rank that gives up in the middle of a pass, while rank 0 waits for its part of a sum, is named at once
// and not after the pass's deadline of half a minute.
TEST_F(RankLoopTest, ARankThatGivesUpMidwayIsNamedAtOnce) {
  start(exchange, exchange, {.pages = 1});
  WorldExecutor executor(*runners_[0], communicators_[0].get());
  const auto begin = std::chrono::steady_clock::now();
  const absl::Status status = executor.execute(prompt_plan({1, 2}, 1, 1)).status();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 (spark-2)"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("pass 1: all_gather: out of step with rank 1"));
  // The world is out of step for good: whoever asks again hears why, at once.
  EXPECT_EQ(executor.execute(prompt_plan({1, 2}, 1)).status(), status);
  EXPECT_EQ(executor.stop(), status);
  EXPECT_STATUS(end(), absl::StatusCode::kInternal, HasSubstr("page 1"), HasSubstr("this rank has 1"));
}

// Protects: a rank that says nothing is named when the pass's time is over.
TEST_F(RankLoopTest, ASilentRankIsNamedAtTheDeadline) {
  start(succeed, [this](PassContext&, Tensor) {
    while (!stop_) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return absl::OkStatus();
  });
  auto runner = PassRunner::create(
      *ops_[0], *models_[0],
      {.step_timeout = std::chrono::milliseconds(100), .row_timeout = std::chrono::microseconds(1000)});
  ASSERT_TRUE(runner.ok()) << runner.status();
  (*runner)->use(communicators_[0].get());
  WorldExecutor executor(**runner, communicators_[0].get());
  EXPECT_STATUS(executor.execute(prompt_plan({1, 2}, 1)).status(), absl::StatusCode::kDeadlineExceeded,
                HasSubstr("rank 1 (spark-2)"), HasSubstr("waited 0.1"));
}

// Protects: a report of another pass or rank is never taken for this pass's.
TEST_F(RankLoopTest, ReportsOfOtherPassesAreRefused) {
  for (const int breach : {0, 1, 2, 3}) {
    auto world = LocalWorld::create(2, kEpoch, {"spark-1", "spark-2"});
    ASSERT_TRUE(world.ok()) << world.status();
    ScriptedModel model(ShardSpec{2, 0}, succeed);
    const std::unique_ptr<Ops> ops = one_thread_ops();
    auto runner = PassRunner::create(*ops, model, {});
    ASSERT_TRUE(runner.ok()) << runner.status();
    std::thread liar([&] {
      Communicator& communicator = *(*world)[1];
      std::vector<std::byte> message;
      const Deadline deadline = Deadline::after(std::chrono::seconds(10));
      ASSERT_TRUE(communicator.broadcast(0, message, kMaxPlanBytes, deadline).ok());
      PassReport report;
      report.epoch = breach == 0 ? kEpoch + 1 : kEpoch;
      report.sequence = breach == 1 ? 7 : 1;
      report.rank = breach == 2 ? 0 : 1;
      std::vector<std::byte> bytes = encode_report(report);
      if (breach == 3) bytes[9] ^= std::byte{1};
      ASSERT_TRUE(communicator.gather(0, bytes, nullptr, size_t{1} << 20, deadline).ok());
    });
    WorldExecutor executor(**runner, (*world)[0].get());
    const absl::Status status = executor.execute(prompt_plan({1, 2}, 1)).status();
    liar.join();
    EXPECT_STATUS(status, absl::StatusCode::kDataLoss, HasSubstr("rank 1 (spark-2)"));
    if (breach == 1) {
      EXPECT_THAT(std::string(status.message()), HasSubstr("pass 7; expected epoch 6, pass 1"));
    }
  }
}

// Protects: an idle rank asks whether it should stop, and stops without an error.
TEST_F(RankLoopTest, AnIdleRankCanBeStopped) {
  start(succeed, succeed);
  stop_ = true;
  EXPECT_TRUE(end().ok()) << ended_;
}

}  // namespace
}  // namespace tensorfold
