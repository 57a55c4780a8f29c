// The scheduler on a real tiny model: many requests at once, cancels, limits, a lost world, always the same bytes.
#include "coordinator/schedule/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "worker/runtime/local_cluster.h"

namespace tensorfold {
namespace {

const std::string kFixture = std::string(TENSORFOLD_SOURCE_DIR) + "/tests/fixtures/qwen3_5";

// A world whose passes can be made to fail, as when a rank is lost; try_regroup() brings it back after `outage` calls.
class BreakableLink : public ClusterLink, public PassExecutor {
 public:
  explicit BreakableLink(LocalCluster& cluster) : cluster_(cluster) {}

  PassExecutor& executor() override { return *this; }
  absl::StatusOr<PassResult> execute(PassPlan plan) override {
    ++passes_;
    if (always_ && plan.kind == PlanKind::kForward)
      return absl::InternalError("rank 1 failed in pass 7: a test says so");
    if (fail_at_ == passes_) return absl::UnavailableError("rank 1 (thread 1) was lost: a test says so");
    return cluster_.executor().execute(std::move(plan));
  }
  absl::Status try_regroup() override {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (outage_-- > 0) return absl::UnavailableError("waiting for rank 1");
    return cluster_.forget();
  }
  void fail_always(bool always) { always_ = always; }
  void fail_at(uint64_t pass, int outage) {
    fail_at_ = pass;
    outage_ = outage;
  }

 private:
  LocalCluster& cluster_;
  std::atomic<uint64_t> passes_{0};
  std::atomic<uint64_t> fail_at_{0};
  std::atomic<int> outage_{0};
  std::atomic<bool> always_{false};
};

// Collects one request's events. The engine may call the sink until it is stopped, so the state is shared with it.
class Listener {
 public:
  GenerationSink sink() {
    return [state = state_](GenerationEvent event) {
      const std::lock_guard lock(state->mutex);
      if (auto* tokens = std::get_if<TokenEvent>(&event)) {
        state->tokens += tokens->tokens.size();
      } else {
        state->finishes.push_back(std::get<FinishEvent>(std::move(event)));
      }
      state->changed.notify_all();
    };
  }
  FinishEvent finish(size_t index = 0) {
    std::unique_lock lock(state_->mutex);
    EXPECT_TRUE(
        state_->changed.wait_for(lock, std::chrono::seconds(60), [&] { return state_->finishes.size() > index; }));
    return state_->finishes.size() > index ? state_->finishes[index] : FinishEvent{};
  }
  void wait_tokens(size_t count) {
    std::unique_lock lock(state_->mutex);
    EXPECT_TRUE(state_->changed.wait_for(lock, std::chrono::seconds(60), [&] { return state_->tokens >= count; }));
  }
  size_t tokens() {
    const std::lock_guard lock(state_->mutex);
    return state_->tokens;
  }
  bool finished() {
    const std::lock_guard lock(state_->mutex);
    return !state_->finishes.empty();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    size_t tokens = 0;
    std::vector<FinishEvent> finishes;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

class EngineTest : public testing::Test {
 protected:
  void open(EngineOptions options, int world = 2) {
    options.cache.snapshots = 8;
    packer_ = *make_backend({.backend = "cpu", .isa = "auto", .threads = 1});
    shards_ = *ModelShards::load_all(kFixture, world, *packer_);
    LocalClusterOptions cluster;
    cluster.backend.threads = 1;
    cluster.runner.slots = options.max_sequences;
    cluster.runner.pages = options.pages;
    cluster.runner.snapshots = options.cache.snapshots;
    cluster_ = *LocalCluster::start(*shards_, cluster);
    link_ = std::make_unique<BreakableLink>(*cluster_);
    EngineModel model;
    model.context = 4096;
    model.vocabulary = 512;
    model.has_mtp = true;
    engine_ = std::make_unique<Engine>(*link_, model, options);
    engine_->start();
  }

  static GenerationRequest request(uint32_t seed, uint32_t prompt_tokens = 30, uint32_t max_tokens = 24) {
    GenerationRequest request;
    for (uint32_t i = 0; i < prompt_tokens; ++i) request.prompt.push_back(10 + (seed * 131 + i * i * 7) % 400);
    request.max_tokens = max_tokens;
    request.sampling.temperature = seed % 2 == 0 ? 0.0 : 0.8;
    request.return_token_ids = true;
    return request;
  }

  std::string run(const GenerationRequest& request) {
    Listener listener;
    const ApiOr<uint64_t> id = engine_->submit(request, listener.sink());
    EXPECT_TRUE(id.ok());
    return id.ok() ? listener.finish().stats.token_sha : "";
  }

  // The status is published after a round, the finish event during it.
  bool all_pages_free() {
    for (int i = 0; i < 1000; ++i) {
      if (engine_->status().free_pages == engine_->status().pages) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

  void TearDown() override {
    if (engine_ != nullptr) engine_->stop();
  }

  std::unique_ptr<Ops> packer_;
  std::unique_ptr<ModelShards> shards_;
  std::unique_ptr<LocalCluster> cluster_;
  std::unique_ptr<BreakableLink> link_;
  std::unique_ptr<Engine> engine_;
};

// Protects: a reply is the same drafted and serial, alone and among others, whatever lane and order it gets.
TEST_F(EngineTest, SameBytesAloneSerialAndCrowded) {
  EngineOptions options;
  options.max_sequences = 3;
  options.prompt_chunk = 13;
  options.max_batch_rows = 40;
  open(options);
  std::vector<std::string> serial;
  for (uint32_t seed = 0; seed < 8; ++seed) {
    GenerationRequest plain = request(seed, 20 + 11 * seed);
    plain.draft = false;
    serial.push_back(run(plain));
  }
  std::vector<Listener> listeners(8);
  for (uint32_t seed = 0; seed < 8; ++seed) {
    ASSERT_TRUE(engine_->submit(request(seed, 20 + 11 * seed), listeners[seed].sink()).ok());
  }
  for (uint32_t seed = 0; seed < 8; ++seed) {
    const FinishEvent finish = listeners[seed].finish();
    EXPECT_EQ(finish.stats.token_sha, serial[seed]) << seed;
    EXPECT_EQ(finish.reason, FinishReason::kLength);
    EXPECT_EQ(finish.stats.completion_tokens, 24u);
  }
  EXPECT_TRUE(all_pages_free());
  EXPECT_EQ(engine_->status().finished, 16u);
}

// Protects: when a pass fails, requests are parked and go on with the same bytes, streams in the middle of a reply too.
TEST_F(EngineTest, RepliesSurviveALostRank) {
  open({});
  std::vector<std::string> undisturbed;
  for (uint32_t seed = 0; seed < 3; ++seed) undisturbed.push_back(run(request(seed)));
  for (const uint64_t later : {1, 2, 4, 7}) {
    std::vector<Listener> listeners(3);
    link_->fail_at(engine_->status().passes + later + 1, 4);
    for (uint32_t seed = 0; seed < 3; ++seed) ASSERT_TRUE(engine_->submit(request(seed), listeners[seed].sink()).ok());
    for (uint32_t seed = 0; seed < 3; ++seed) {
      EXPECT_EQ(listeners[seed].finish().stats.token_sha, undisturbed[seed]) << "failure at pass " << later;
    }
  }
}

// Protects: a rank that stays away turns parked requests into clean errors that name it, and new ones are refused at
// once.
TEST_F(EngineTest, ParkDeadlineEndsWithACleanError) {
  EngineOptions options;
  options.park_deadline = std::chrono::milliseconds(200);
  open(options);
  run(request(0));
  Listener listener;
  link_->fail_at(engine_->status().passes + 3, 1000000);
  ASSERT_TRUE(engine_->submit(request(1), listener.sink()).ok());
  const FinishEvent finish = listener.finish();
  ASSERT_TRUE(finish.error.has_value());
  EXPECT_EQ(finish.reason, FinishReason::kError);
  EXPECT_EQ(finish.error->http_status(), 503);
  EXPECT_NE(finish.error->message.find("rank 1"), std::string::npos) << finish.error->message;
  Listener refused;
  const ApiOr<uint64_t> id = engine_->submit(request(2), refused.sink());
  ASSERT_FALSE(id.ok());
  EXPECT_EQ(id.error().http_status(), 503);
  EXPECT_TRUE(id.error().retry_after_s.has_value());
}

// Protects: work that fails every time, though all ranks come back, ends with an error and does not hold up others for
// ever.
TEST_F(EngineTest, WorkThatAlwaysFailsIsGivenUp) {
  open({});
  const std::string good = run(request(0));
  link_->fail_always(true);
  Listener listener;
  ASSERT_TRUE(engine_->submit(request(1), listener.sink()).ok());
  const FinishEvent finish = listener.finish();
  EXPECT_EQ(finish.reason, FinishReason::kError);
  ASSERT_TRUE(finish.error.has_value());
  link_->fail_always(false);
  Listener next;
  bool admitted = false;
  for (int i = 0; i < 1000 && !admitted; ++i) {
    admitted = engine_->submit(request(0), next.sink()).ok();
    if (!admitted) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ASSERT_TRUE(admitted);
  EXPECT_EQ(next.finish().stats.token_sha, good);
}

// Protects: cancelled requests leave at once, running or queued, and their lane and pages are free again.
TEST_F(EngineTest, CancelFreesLaneAndQueue) {
  EngineOptions options;
  options.max_sequences = 1;
  open(options);
  Listener running;
  Listener queued;
  const ApiOr<uint64_t> first = engine_->submit(request(0, 30, 3000), running.sink());
  const ApiOr<uint64_t> second = engine_->submit(request(1, 30, 3000), queued.sink());
  ASSERT_TRUE(first.ok() && second.ok());
  running.wait_tokens(3);
  engine_->cancel(*second);
  EXPECT_EQ(queued.finish().reason, FinishReason::kCancelled);
  EXPECT_FALSE(running.finished());
  engine_->cancel(*first);
  EXPECT_EQ(running.finish().reason, FinishReason::kCancelled);
  EXPECT_FALSE(run(request(2)).empty());
  EXPECT_TRUE(all_pages_free());
}

// Protects: a full queue says 429 with Retry-After, a request larger than the pool says what there is, before any work.
TEST_F(EngineTest, AdmissionIsBoundedAndExplained) {
  EngineOptions options;
  options.max_sequences = 1;
  options.queue_limit = 2;
  options.pages = 60;
  open(options);
  std::vector<Listener> listeners(6);
  std::vector<uint64_t> ids;
  int refused = 0;
  for (uint32_t i = 0; i < 6; ++i) {
    const ApiOr<uint64_t> id = engine_->submit(request(i, 30, 2000), listeners[i].sink());
    if (id.ok()) {
      ids.push_back(*id);
      continue;
    }
    ++refused;
    EXPECT_EQ(id.error().http_status(), 429);
    EXPECT_TRUE(id.error().retry_after_s.has_value());
  }
  EXPECT_GE(refused, 3);
  Listener large;
  const ApiOr<uint64_t> id = engine_->submit(request(9, 3000, 1000), large.sink());
  ASSERT_FALSE(id.ok());
  EXPECT_EQ(id.error().http_status(), 400);
  for (const uint64_t admitted : ids) engine_->cancel(admitted);
}

// Protects: n choices are n replies keyed by their index, and choice 0 equals the reply to n = 1.
TEST_F(EngineTest, ChoicesAreKeyedByTheirIndex) {
  open({});
  const std::string one = run(request(1));
  GenerationRequest three = request(1);
  three.n = 3;
  Listener listener;
  ASSERT_TRUE(engine_->submit(three, listener.sink()).ok());
  std::vector<std::string> shas(3);
  for (size_t i = 0; i < 3; ++i) {
    const FinishEvent finish = listener.finish(i);
    shas[finish.choice] = finish.stats.token_sha;
  }
  EXPECT_EQ(shas[0], one);
  EXPECT_NE(shas[1], one);
  EXPECT_NE(shas[2], shas[1]);
}

// Protects: penalties and bias change the reply, and are applied to drafted rows exactly as serially.
TEST_F(EngineTest, PenaltiesAreTheSameDraftedAndSerial) {
  open({});
  for (const double temperature : {0.0, 0.9}) {
    GenerationRequest plain = request(2, 30, 40);
    plain.sampling.temperature = temperature;
    const std::string without = run(plain);
    plain.sampling.repetition_penalty = 1.3;
    plain.sampling.presence_penalty = 0.7;
    plain.sampling.frequency_penalty = 0.4;
    plain.sampling.logit_bias = {{.id = 33, .bias = 4.0}};
    const std::string drafted = run(plain);
    plain.draft = false;
    EXPECT_EQ(run(plain), drafted);
    EXPECT_NE(drafted, without);
  }
}

// Protects: draining refuses new work, finishes what there is, and says when it could not.
TEST_F(EngineTest, DrainFinishesWhatIsThere) {
  open({});
  Listener listener;
  ASSERT_TRUE(engine_->submit(request(1, 30, 60), listener.sink()).ok());
  EXPECT_TRUE(engine_->drain(std::chrono::seconds(30)));
  EXPECT_TRUE(listener.finished());
  Listener late;
  const ApiOr<uint64_t> id = engine_->submit(request(2), late.sink());
  ASSERT_FALSE(id.ok());
  EXPECT_EQ(id.error().http_status(), 503);
}

// Protects: a request's deadline ends it, queued or running.
TEST_F(EngineTest, DeadlinesEndRequests) {
  EngineOptions options;
  options.max_sequences = 1;
  open(options);
  GenerationRequest slow = request(0, 30, 3500);
  slow.deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
  Listener listener;
  ASSERT_TRUE(engine_->submit(slow, listener.sink()).ok());
  const FinishEvent finish = listener.finish();
  ASSERT_TRUE(finish.error.has_value());
  EXPECT_EQ(finish.error->http_status(), 504);
}

// Protects: a foreground request takes the lane of a background one, the oldest, which goes on afterwards with the same
// bytes; nobody is ended for it.
TEST_F(EngineTest, BackgroundGivesItsLaneUpAndResumesExactly) {
  EngineOptions options;
  options.max_sequences = 2;
  open(options);
  std::vector<std::string> undisturbed;
  for (uint32_t seed = 0; seed < 4; ++seed) undisturbed.push_back(run(request(seed, 40, 120)));
  std::vector<Listener> background(2);
  for (uint32_t seed = 0; seed < 2; ++seed) {
    GenerationRequest slow = request(seed, 40, 120);
    slow.priority = Priority::kBackground;
    ASSERT_TRUE(engine_->submit(slow, background[seed].sink()).ok());
  }
  for (Listener& listener : background) listener.wait_tokens(5);
  std::vector<Listener> foreground(2);
  for (uint32_t seed = 2; seed < 4; ++seed) {
    ASSERT_TRUE(engine_->submit(request(seed, 40, 120), foreground[seed - 2].sink()).ok());
  }
  for (uint32_t seed = 0; seed < 2; ++seed) {
    EXPECT_EQ(foreground[seed].finish().stats.token_sha, undisturbed[seed + 2]);
  }
  for (uint32_t seed = 0; seed < 2; ++seed) {
    const FinishEvent finish = background[seed].finish();
    EXPECT_EQ(finish.stats.token_sha, undisturbed[seed]) << seed;
    EXPECT_EQ(finish.stats.completion_tokens, 120u);
    EXPECT_EQ(finish.reason, FinishReason::kLength);
  }
  EXPECT_GE(engine_->status().preempted, 1u);
  EXPECT_TRUE(all_pages_free());
}

// Protects: pages are given up as lanes are, but only when that is enough; background ones never take a lane from
// anybody, and a cancelled one that gave its lane up ends with what it had.
TEST_F(EngineTest, PagesAreGivenUpOnlyWhenItHelps) {
  EngineOptions options;
  options.max_sequences = 3;
  options.pages = 60;
  open(options);
  GenerationRequest slow = request(0, 30, 1800);  // 29 pages
  slow.priority = Priority::kBackground;
  Listener background;
  const ApiOr<uint64_t> slow_id = engine_->submit(slow, background.sink());
  ASSERT_TRUE(slow_id.ok());
  background.wait_tokens(3);
  Listener small;
  ASSERT_TRUE(engine_->submit(request(1, 30, 1800), small.sink()).ok());  // fits beside it
  small.wait_tokens(3);
  EXPECT_EQ(engine_->status().preempted, 0u);
  Listener other;
  GenerationRequest second = slow;
  ASSERT_TRUE(engine_->submit(second, other.sink()).ok());  // background: it waits
  Listener large;
  ASSERT_TRUE(engine_->submit(request(2, 30, 1000), large.sink()).ok());
  large.wait_tokens(1);
  EXPECT_EQ(engine_->status().preempted, 1u);
  EXPECT_FALSE(background.finished());
  engine_->cancel(*slow_id);
  const FinishEvent finish = background.finish();
  EXPECT_EQ(finish.reason, FinishReason::kCancelled);
  EXPECT_GE(finish.stats.completion_tokens, 3u);
  EXPECT_EQ(finish.stats.token_ids.size(), finish.stats.completion_tokens);
}

// Protects: background work goes on although foreground requests never stop coming, keeps the lane that it got, and
// gives the bytes that it gives alone.
TEST_F(EngineTest, BackgroundHasItsTurnUnderAnyLoad) {
  EngineOptions options;
  options.max_sequences = 1;
  options.background_turn = std::chrono::milliseconds(30);
  open(options);
  const std::string undisturbed = run(request(0, 40, 20));
  std::atomic<bool> over = false;
  std::atomic<bool> refused = false;
  std::thread others([&] {
    for (uint32_t seed = 1; !over; ++seed) {
      if (engine_->status().queued - engine_->status().queued_background < 3) {
        Listener ignored;
        if (!engine_->submit(request(seed, 30, 20), ignored.sink()).ok()) refused = true;
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  });
  while (engine_->status().queued < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  GenerationRequest slow = request(0, 40, 20);
  slow.priority = Priority::kBackground;
  Listener background;
  ASSERT_TRUE(engine_->submit(slow, background.sink()).ok());
  const FinishEvent finish = background.finish();
  over = true;
  others.join();
  EXPECT_EQ(finish.stats.token_sha, undisturbed);
  EXPECT_EQ(engine_->status().promoted, 1u);
  EXPECT_EQ(engine_->status().preempted, 0u);
  EXPECT_FALSE(refused);
}

// Protects the order of a batch that is alone: turns are for background work beside foreground work, so nobody is
// given one, and nobody gives a lane up.
TEST_F(EngineTest, BackgroundAloneKeepsItsOrder) {
  EngineOptions options;
  options.max_sequences = 1;
  options.background_turn = std::chrono::milliseconds(1);
  open(options);
  std::vector<std::unique_ptr<Listener>> batch;
  for (uint32_t seed = 1; seed <= 12; ++seed) {
    GenerationRequest one = request(seed, 40, 20);
    one.priority = Priority::kBackground;
    batch.push_back(std::make_unique<Listener>());
    ASSERT_TRUE(engine_->submit(one, batch.back()->sink()).ok());
  }
  for (const std::unique_ptr<Listener>& listener : batch) EXPECT_EQ(listener->finish().reason, FinishReason::kLength);
  EXPECT_EQ(engine_->status().promoted, 0u);
  EXPECT_EQ(engine_->status().preempted, 0u);
}

// Protects: a request's deadline ends it while it waits, too, with the usage of what was done: nothing.
TEST_F(EngineTest, DeadlinesEndWaitingRequests) {
  EngineOptions options;
  options.max_sequences = 1;
  open(options);
  Listener running;
  const ApiOr<uint64_t> id = engine_->submit(request(0, 30, 3500), running.sink());
  ASSERT_TRUE(id.ok());
  running.wait_tokens(1);
  GenerationRequest late = request(1);
  late.deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(30);
  Listener waiting;
  ASSERT_TRUE(engine_->submit(late, waiting.sink()).ok());
  const FinishEvent finish = waiting.finish();
  ASSERT_TRUE(finish.error.has_value());
  EXPECT_EQ(finish.error->http_status(), 504);
  EXPECT_EQ(finish.stats.prompt_tokens, 30u);
  EXPECT_EQ(finish.stats.completion_tokens, 0u);
  EXPECT_FALSE(running.finished());
  engine_->cancel(*id);
}

// Protects: the numbers of a reply that was cut are those of the tokens that were sent.
TEST_F(EngineTest, CutRepliesCountWhatWasSent) {
  open({});
  Listener listener;
  const ApiOr<uint64_t> id = engine_->submit(request(3, 30, 3500), listener.sink());
  ASSERT_TRUE(id.ok());
  listener.wait_tokens(10);
  engine_->cancel(*id);
  const FinishEvent finish = listener.finish();
  EXPECT_EQ(finish.reason, FinishReason::kCancelled);
  EXPECT_EQ(finish.stats.completion_tokens, listener.tokens());
  EXPECT_EQ(finish.stats.token_ids.size(), listener.tokens());
  EXPECT_EQ(finish.stats.prompt_tokens, 30u);
  EXPECT_GE(finish.stats.min_rows, 1u);
  EXPECT_EQ(finish.stats.token_sha.size(), 12u);
}

}  // namespace
}  // namespace tensorfold
