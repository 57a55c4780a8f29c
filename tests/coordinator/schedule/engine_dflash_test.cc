// A block drafter in the scheduler, with a target that it guesses right: its drafts are kept wherever its keys are
// there, after prefix hits, evictions, give-ups, losses and restarts, and no byte depends on it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <filesystem>
#include <future>
#include <mutex>
#include <thread>

#include "coordinator/schedule/engine.h"
#include "worker/runtime/local_cluster.h"

namespace tensorfold {
namespace {

const std::string kFixtures = TENSORFOLD_SOURCE_DIR "/tests/fixtures/";
constexpr int kWorld = 2;

// A world that can lose everything it has, and that can run something before a pass.
class TestLink : public ClusterLink, public PassExecutor {
 public:
  explicit TestLink(LocalCluster& cluster) : cluster_(cluster) {}
  PassExecutor& executor() override { return *this; }
  absl::StatusOr<PassResult> execute(PassPlan plan) override {
    if (!plan.sequences.empty()) {
      if (lose_in_ > 0 && --lose_in_ == 0) return absl::UnavailableError("rank 1 (thread 1) was lost: a test says so");
      for (const SequencePlan& sequence : plan.sequences) {
        if (!sequence.use_block) ++plans_without_keys_;
        if (sequence.block_drafts > 0) ++plans_with_blocks_;
      }
      if (then_in_ > 0 && --then_in_ == 0) then_();
    }
    return cluster_.executor().execute(std::move(plan));
  }
  absl::Status try_regroup() override {
    for (int rank = 0; rank < cluster_.world(); ++rank) cluster_.runner(rank).reset();
    return absl::OkStatus();
  }
  void lose_in(int passes) { lose_in_ = passes; }
  void then_in(int passes, std::function<void()> then) {
    then_ = std::move(then);
    then_in_ = passes;
  }
  uint64_t plans_without_keys() const { return plans_without_keys_; }
  uint64_t plans_with_blocks() const { return plans_with_blocks_; }

 private:
  LocalCluster& cluster_;
  std::function<void()> then_;
  std::atomic<int> lose_in_{0};
  std::atomic<int> then_in_{0};
  std::atomic<uint64_t> plans_without_keys_{0};
  std::atomic<uint64_t> plans_with_blocks_{0};
};

class FolderForStates {
 public:
  FolderForStates() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tensorfold-dflash-XXXXXX").string();
    if (::mkdtemp(pattern.data()) != nullptr) path_ = pattern;
  }
  ~FolderForStates() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct Wanted {
  DraftKind draft = DraftKind::kBlock;
  int lanes = 4;
  int64_t pages = 128;
  bool cache = true;
  bool adaptive = false;  // false: as many drafts as fit, so that what is kept can be told beforehand
  bool second = false;    // with the DFlash2 drafter
  std::string folder = {};
};

class Listening {
 public:
  GenerationSink sink() {
    return [this](GenerationEvent event) {
      auto* end = std::get_if<FinishEvent>(&event);
      if (end != nullptr) done_.set_value(std::move(*end));
    };
  }
  GenerationStats stats() {
    if (end_.wait_for(std::chrono::seconds(60)) != std::future_status::ready) {
      ADD_FAILURE() << "no end within a minute";
      return {};
    }
    const FinishEvent event = end_.get();
    EXPECT_FALSE(event.error.has_value());
    return event.stats;
  }

 private:
  std::promise<FinishEvent> done_;
  std::future<FinishEvent> end_ = done_.get_future();
};

class EngineDflash : public ::testing::Test {
 protected:
  struct World {
    std::unique_ptr<LocalCluster> cluster;
    std::unique_ptr<TestLink> link;
    std::unique_ptr<Engine> engine;
    ~World() {
      if (engine != nullptr) engine->stop();
    }
    GenerationStats run(const GenerationRequest& request) {
      Listening listening;
      EXPECT_TRUE(engine->submit(request, listening.sink()).ok());
      return listening.stats();
    }
  };

  static void SetUpTestSuite() {
    const auto packer = *make_backend({.backend = "cpu", .isa = "auto", .threads = 1});
    shards_ =
        ModelShards::load_all(kFixtures + "follower", kWorld, *packer, DrafterChoice(kFixtures + "follower_dflash"))
            ->release();
    second_ =
        ModelShards::load_all(kFixtures + "follower", kWorld, *packer, DrafterChoice(kFixtures + "follower_dflash2"))
            ->release();
  }
  static void TearDownTestSuite() {
    delete shards_;
    delete second_;
  }

  static std::unique_ptr<World> open(const Wanted& setup = {}) {
    auto world = std::make_unique<World>();
    LocalClusterOptions cluster;
    cluster.backend.threads = 1;
    cluster.runner.slots = setup.lanes;
    cluster.runner.pages = setup.pages;
    const StateOwner owner = {.build = "test", .fingerprint = "00112233445566aa", .rank = 0, .world = kWorld};
    cluster.state_directory = setup.folder;
    cluster.state_owner = owner;
    world->cluster = *LocalCluster::start(setup.second ? *second_ : *shards_, cluster);
    world->link = std::make_unique<TestLink>(*world->cluster);
    EngineModel model;
    model.context = 4096;
    model.vocabulary = 128;
    model.block_drafts = shards_->block_drafts();
    model.has_states = false;
    EngineOptions options;
    options.max_sequences = setup.lanes;
    options.pages = setup.pages;
    options.prompt_chunk = 50;
    options.draft = setup.draft;
    options.width.adaptive = setup.adaptive;
    options.cache.enabled = setup.cache;
    world->engine = std::make_unique<Engine>(*world->link, model, options);
    if (!setup.folder.empty()) {
      StateOptions states;
      states.enabled = true;
      states.fingerprint = owner.fingerprint;
      states.min_tokens = 64;
      world->engine->open_states(states, stored_in(StateStore::folder_of(setup.folder, owner)), kWorld);
    }
    world->engine->start();
    return world;
  }

  static std::vector<StoredSegment> stored_in(const std::string& folder) {
    std::vector<StoredSegment> stored;
    for (const StateFileInfo& file : StateStore::list(folder)) {
      if (!file.status.ok()) continue;
      StoredSegment& segment = stored.emplace_back();
      segment.key = file.header.key;
      segment.parent = file.header.parent;
      segment.first_position = file.header.first_position;
      segment.tokens.assign(file.header.tokens.begin(), file.header.tokens.end());
    }
    return stored;
  }

  static void wait_written(World& world) {
    for (int i = 0; i < 5000; ++i) {
      const auto pending = std::make_shared<std::promise<bool>>();
      world.engine->with_states([pending](StateKeeper& states) { pending->set_value(states.pending()); });
      if (!pending->get_future().get()) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    ADD_FAILURE() << "states are not written within ten seconds";
  }

  // A text that runs in one of the target's cycles of 8: the reply goes on in it.
  static std::vector<uint32_t> text(uint32_t count, uint32_t cycle) {
    std::vector<uint32_t> tokens;
    for (uint32_t i = 0; i < count; ++i) tokens.push_back(8 * cycle + i % 8);
    return tokens;
  }

  static GenerationRequest request(std::vector<uint32_t> prompt, uint32_t max_tokens, double temperature = 0.0) {
    GenerationRequest request;
    request.prompt = std::move(prompt);
    request.max_tokens = max_tokens;
    request.sampling.temperature = temperature;
    request.seed = 5;
    request.return_token_ids = true;
    return request;
  }

  static GenerationStats serial(const GenerationRequest& request) {
    return open({.draft = DraftKind::kNone, .cache = false})->run(request);
  }

  static ModelShards* shards_;
  static ModelShards* second_;
};

ModelShards* EngineDflash::shards_ = nullptr;
ModelShards* EngineDflash::second_ = nullptr;

// Protects: drafts of a block are kept where they are right, many at once, and the reply is the serial one; with
// sampling, too, where many are not.
TEST_F(EngineDflash, KeepsRightDraftsAndChangesNoByte) {
  for (const bool adaptive : {false, true}) {
    const auto world = open({.adaptive = adaptive});
    for (const double temperature : {0.0, 0.7, 1.6}) {
      const GenerationRequest wanted = request(text(40, 3), 60, temperature);
      const GenerationStats expected = serial(wanted), found = world->run(wanted);
      EXPECT_EQ(found.token_ids, expected.token_ids);
      EXPECT_GT(found.drafted, 0u);
      if (temperature > 0.0) continue;
      EXPECT_GE(found.accepted * 10, found.drafted * 9) << found.accepted << " of " << found.drafted;
      if (!adaptive) {
        EXPECT_LE(found.rounds, 10u);
      }
    }
    EXPECT_GT(world->link->plans_with_blocks(), 0u);
  }
}

// Protects: `auto` finds out that blocks pay, and other kinds never ask for one.
TEST_F(EngineDflash, KindsChooseTheirDrafter) {
  const GenerationRequest wanted = request(text(40, 3), 60);
  const GenerationStats expected = serial(wanted);
  for (const DraftKind kind : {DraftKind::kNone, DraftKind::kCopy, DraftKind::kAuto, DraftKind::kBlock}) {
    const auto world = open({.draft = kind, .adaptive = true});
    EXPECT_EQ(world->run(wanted).token_ids, expected.token_ids) << draft_kind_name(kind);
    const bool blocks = kind == DraftKind::kBlock;
    if (kind != DraftKind::kAuto) {
      EXPECT_EQ(world->link->plans_with_blocks() > 0, blocks) << draft_kind_name(kind);
    }
    EXPECT_EQ(world->link->plans_without_keys() == 0, blocks || kind == DraftKind::kAuto) << draft_kind_name(kind);
  }
}

// Protects: a prompt found in the cache brings the drafter's keys with it, at a page's end and inside one (a copied
// page), also when a request that does not draft left it there: the first window's drafts look back into it.
TEST_F(EngineDflash, CachedPrefixesHaveItsKeys) {
  for (const uint32_t length : {129u, 150u, 192u}) {
    SCOPED_TRACE(length);
    const auto world = open();
    GenerationRequest first = request(text(length, 5), 8);
    first.draft = length == 150;
    world->run(first);
    const GenerationRequest again = request(text(length, 5), 8);
    const GenerationStats found = world->run(again);
    EXPECT_EQ(found.cached_tokens, length - 1);
    EXPECT_EQ(found.token_ids, serial(again).token_ids);
    // 8 tokens: one of the prompt's last row, and a window of one and six drafts, all of which look 9 back.
    EXPECT_EQ(found.drafted, 6u);
    EXPECT_EQ(found.accepted, 6u);
  }
}

// Protects: the control of the test above: with nothing in the cache of keys the same window's drafts are wrong, so
// what is measured there is the keys and not the guess.
TEST_F(EngineDflash, WithoutKeysDraftsAreWrong) {
  const auto world = open();
  PassPlan prompt;
  SequencePlan& sequence = prompt.sequences.emplace_back();
  sequence.fresh = true;
  const std::vector<uint32_t> tokens = text(40, 5);
  sequence.tokens.assign(tokens.begin(), tokens.end());
  sequence.certain = 40;
  sequence.new_pages = {0};
  for (const bool keys : {false, true}) {
    sequence.use_block = keys;
    ASSERT_TRUE(world->cluster->executor().execute(prompt).ok());
    PassPlan window;
    SequencePlan& next = window.sequences.emplace_back();
    next.first_position = 40;
    next.tokens = {8 * 5};
    next.certain = 1;
    next.use_block = true;
    next.block_drafts = 7;
    const absl::StatusOr<PassResult> pass = world->cluster->executor().execute(window);
    ASSERT_TRUE(pass.ok()) << pass.status();
    const std::vector<int32_t> right = {41, 42, 43, 44, 45, 46, 47};
    EXPECT_EQ(pass->drafts[0] == right, keys);
  }
}

// Protects DFlash2's selector along a whole reply: its edges, each from the token that it chose before, lead where the
// logits alone do not, and what it chooses is kept.
TEST_F(EngineDflash, SelectorsEdgesDecide) {
  const auto world = open({.second = true});
  for (const double temperature : {0.0, 0.9}) {
    const GenerationRequest wanted = request(text(40, 3), 60, temperature);
    const GenerationStats found = world->run(wanted);
    EXPECT_EQ(found.token_ids, serial(wanted).token_ids);
    if (temperature > 0.0) continue;
    EXPECT_GE(found.accepted * 10, found.drafted * 9) << found.accepted << " of " << found.drafted;
  }
  for (int rank = 0; rank < kWorld; ++rank) world->cluster->runner(rank).keep_block_logits(true);
  PassPlan window;
  SequencePlan& sequence = window.sequences.emplace_back();
  sequence.fresh = sequence.use_block = true;
  sequence.tokens = {8 * 5};  // nothing before it: its own successor is all that is known
  sequence.certain = 1;
  sequence.new_pages = {0};
  sequence.block_drafts = 7;
  const absl::StatusOr<PassResult> pass = world->cluster->executor().execute(window);
  ASSERT_TRUE(pass.ok()) << pass.status();
  std::vector<std::vector<float>> rows(8);
  for (int rank = 0; rank < kWorld; ++rank) {
    for (const RowReport& part : world->cluster->runner(rank).block_rows()) {
      rows[part.row].insert(rows[part.row].end(), part.logits.begin(), part.logits.end());
    }
  }
  int others = 0;
  for (size_t row = 1; row < 8; ++row) {
    const auto best = std::max_element(rows[row].begin(), rows[row].end()) - rows[row].begin();
    others += best == pass->drafts[0][row - 1] ? 0 : 1;
  }
  EXPECT_GT(others, 0) << "the logits alone would have chosen the same";
}

// Protects: pages that are given to somebody else and computed again have the keys of what is in them now.
TEST_F(EngineDflash, EvictedPrefixesAreComputedAgain) {
  const auto world = open({.lanes = 1, .pages = 6});
  for (int turn = 0; turn < 2; ++turn) {
    for (const uint32_t cycle : {2u, 9u, 4u}) {
      const GenerationRequest wanted = request(text(200, cycle), 30);
      const GenerationStats found = world->run(wanted);
      EXPECT_EQ(found.token_ids, serial(wanted).token_ids);
      EXPECT_GE(found.accepted * 10, found.drafted * 8);
    }
  }
  EXPECT_GT(world->engine->status().cache.evicted_pages, 0);
}

// Protects: a background reply that gives its lane up goes on with its drafter's keys, and so does who took it.
TEST_F(EngineDflash, GivenUpLanesGoOn) {
  const auto world = open({.lanes = 1});
  GenerationRequest slow = request(text(70, 6), 100);
  slow.priority = Priority::kBackground;
  const GenerationRequest quick = request(text(70, 7), 20);
  Listening background, foreground;
  world->link->then_in(5, [&] { EXPECT_TRUE(world->engine->submit(quick, foreground.sink()).ok()); });
  ASSERT_TRUE(world->engine->submit(slow, background.sink()).ok());
  const GenerationStats first = foreground.stats(), second = background.stats();
  EXPECT_GE(world->engine->status().preempted, 1u);
  EXPECT_EQ(first.token_ids, serial(quick).token_ids);
  EXPECT_EQ(second.token_ids, serial(slow).token_ids);
  EXPECT_GE(first.accepted * 10, first.drafted * 8);
  EXPECT_GE(second.accepted * 10, second.drafted * 8);
}

// Protects: after ranks were lost the drafter's keys are computed again with everything else.
TEST_F(EngineDflash, LostRanksComputeTheKeysAgain) {
  const auto world = open();
  const GenerationRequest wanted = request(text(100, 8), 80);
  world->link->lose_in(6);
  const GenerationStats found = world->run(wanted);
  EXPECT_EQ(world->engine->status().parked, 1u);
  EXPECT_EQ(found.token_ids, serial(wanted).token_ids);
  EXPECT_GE(found.accepted * 10, found.drafted * 8);
}

// Protects: states on disk hold the drafter's keys, which are back after a restart.
TEST_F(EngineDflash, RestoredStatesHaveItsKeys) {
  const FolderForStates folder;
  const GenerationRequest wanted = request(text(129, 10), 8);
  {
    const auto world = open({.folder = folder.path()});
    world->run(wanted);
    wait_written(*world);
  }
  const auto world = open({.folder = folder.path()});
  const GenerationStats found = world->run(wanted);
  EXPECT_GE(found.cached_tokens, 128u);
  EXPECT_EQ(found.token_ids, serial(wanted).token_ids);
  EXPECT_EQ(found.accepted, 6u);
}

// Protects: sequences side by side draft in one block pass each for itself, beside prompts that are being read.
TEST_F(EngineDflash, ManySequencesTogether) {
  const auto world = open();
  std::vector<GenerationRequest> wanted;
  std::vector<std::unique_ptr<Listening>> listening;
  for (uint32_t i = 0; i < 6; ++i) {
    wanted.push_back(request(text(30 + 37 * i, i + 1), 50, i % 2 == 0 ? 0.0 : 0.9));
    listening.push_back(std::make_unique<Listening>());
    ASSERT_TRUE(world->engine->submit(wanted.back(), listening.back()->sink()).ok());
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    const GenerationStats found = listening[i]->stats();
    EXPECT_EQ(found.token_ids, serial(wanted[i]).token_ids) << i;
    if (i % 2 == 0) {
      EXPECT_GE(found.accepted * 10, found.drafted * 8) << i;
    }
  }
}

}  // namespace
}  // namespace tensorfold
