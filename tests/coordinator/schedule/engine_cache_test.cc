// The prefix cache in the scheduler, on real tiny models: what is resent, continued, branched or chosen twice starts
// late, and its bytes are those of a cold run.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <future>
#include <mutex>
#include <thread>

#include "coordinator/schedule/engine.h"
#include "worker/runtime/local_cluster.h"

namespace tensorfold {
namespace {

// A world that can lose everything it has.
class ForgetfulLink : public ClusterLink, public PassExecutor {
 public:
  explicit ForgetfulLink(LocalCluster& cluster) : cluster_(cluster) {}
  PassExecutor& executor() override { return *this; }
  absl::StatusOr<PassResult> execute(PassPlan plan) override {
    if (!plan.sequences.empty() && fail_in_ > 0 && --fail_in_ == 0) {
      return absl::UnavailableError("rank 1 (thread 1) was lost: a test says so");
    }
    rows_ += plan.rows();
    return cluster_.executor().execute(std::move(plan));
  }
  absl::Status try_regroup() override {
    for (int rank = 0; rank < cluster_.world(); ++rank) cluster_.runner(rank).reset();
    return absl::OkStatus();
  }
  void fail_in(int passes) { fail_in_ = passes; }
  uint64_t rows() const { return rows_; }

 private:
  LocalCluster& cluster_;
  std::atomic<int> fail_in_{0};
  std::atomic<uint64_t> rows_{0};
};

struct CacheCase {
  const char* fixture;
  bool has_states;
  bool has_mtp;
  DraftKind draft;
};

class EngineCacheTest : public ::testing::TestWithParam<CacheCase> {
 protected:
  struct World {
    std::unique_ptr<LocalCluster> cluster;
    std::unique_ptr<ForgetfulLink> link;
    std::unique_ptr<Engine> engine;
    ~World() {
      if (engine != nullptr) engine->stop();
    }
  };

  void SetUp() override {
    packer_ = *make_backend({.backend = "cpu", .isa = "auto", .threads = 1});
    shards_ = *ModelShards::load_all(std::string(TENSORFOLD_SOURCE_DIR) + "/tests/fixtures/" + GetParam().fixture, 2,
                                     *packer_);
    cold_ = open(false);
    warm_ = open(true);
  }

  // `folder`: where states are kept on disk; empty: nowhere.
  std::unique_ptr<World> open(bool cache, int64_t pages = 128, int64_t snapshots = 64, const std::string& folder = "") {
    auto world = std::make_unique<World>();
    LocalClusterOptions cluster;
    cluster.backend.threads = 1;
    cluster.runner.slots = 4;
    cluster.runner.pages = pages;
    cluster.runner.snapshots = snapshots;
    const StateOwner owner = {.build = "test", .fingerprint = "00112233445566aa", .rank = 0, .world = 2};
    cluster.state_directory = folder;
    cluster.state_owner = owner;
    world->cluster = *LocalCluster::start(*shards_, cluster);
    world->link = std::make_unique<ForgetfulLink>(*world->cluster);
    EngineModel model;
    model.context = 4096;
    model.vocabulary = 512;
    model.has_mtp = GetParam().has_mtp;
    model.has_states = GetParam().has_states;
    EngineOptions options;
    options.max_sequences = 4;
    options.pages = pages;
    options.prompt_chunk = 50;
    options.draft = GetParam().draft;
    options.cache.enabled = cache;
    options.cache.snapshots = snapshots;
    options.cache.snapshot_tokens = 128;
    world->engine = std::make_unique<Engine>(*world->link, model, options);
    if (!folder.empty()) {
      StateOptions states;
      states.enabled = true;
      states.fingerprint = owner.fingerprint;
      states.min_tokens = 64;
      world->engine->open_states(states, stored_in(StateStore::folder_of(folder, owner)), 2);
      EXPECT_TRUE(world->engine->restore_pinned(std::chrono::seconds(20)).ok());
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
      segment.mtp = file.header.mtp;
      segment.committed = file.header.committed;
      segment.kept.assign(file.header.kept.begin(), file.header.kept.end());
      segment.names = file.names;
    }
    return stored;
  }

  // Until nothing waits to be written.
  static void wait_written(World& world) {
    for (int i = 0; i < 5000; ++i) {
      const auto pending = std::make_shared<std::promise<bool>>();
      world.engine->with_states([pending](StateKeeper& states) { pending->set_value(states.pending()); });
      if (!pending->get_future().get()) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    ADD_FAILURE() << "states are not written within ten seconds";
  }

  static GenerationRequest request(std::vector<uint32_t> prompt, uint32_t max_tokens = 20, double temperature = 0.8) {
    GenerationRequest request;
    request.prompt = std::move(prompt);
    request.max_tokens = max_tokens;
    request.sampling.temperature = temperature;
    request.seed = 11;
    request.return_token_ids = true;
    return request;
  }

  static std::vector<uint32_t> text(uint32_t count, uint32_t seed) {
    std::vector<uint32_t> tokens;
    for (uint32_t i = 0; i < count; ++i) tokens.push_back(10 + (seed * 131 + i * i * 7 + i) % 400);
    return tokens;
  }

  // All choices' ends, by choice.
  static std::vector<GenerationStats> run(World& world, const GenerationRequest& request) {
    struct Shared {
      std::mutex mutex;
      std::condition_variable changed;
      std::vector<GenerationStats> ends;
      uint32_t left = 0;
    };
    auto shared = std::make_shared<Shared>();
    shared->ends.resize(request.n);
    shared->left = request.n;
    const ApiOr<uint64_t> id = world.engine->submit(request, [shared](GenerationEvent event) {
      auto* end = std::get_if<FinishEvent>(&event);
      if (end == nullptr) return;
      const std::lock_guard lock(shared->mutex);
      shared->ends[end->choice] = end->stats;
      --shared->left;
      shared->changed.notify_all();
    });
    EXPECT_TRUE(id.ok());
    std::unique_lock lock(shared->mutex);
    EXPECT_TRUE(shared->changed.wait_for(lock, std::chrono::seconds(30), [&] { return shared->left == 0; }));
    return shared->ends;
  }

  // Runs it cold and warm: the same ids, and how many tokens were not computed again.
  uint64_t same(const GenerationRequest& request, GenerationStats* stats = nullptr) {
    const std::vector<GenerationStats> expected = run(*cold_, request);
    const std::vector<GenerationStats> found = run(*warm_, request);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(found[i].token_sha, expected[i].token_sha) << "choice " << i;
      EXPECT_EQ(expected[i].cached_tokens, 0u);
    }
    if (stats != nullptr) *stats = found[0];
    return found[0].cached_tokens;
  }

  // What a prompt of `tokens` that was read before is resumed at: pages alone reach to the last token (one less with an
  // MTP layer, whose hidden row is missing), snapshots to the last page's beginning.
  static uint64_t resent(uint64_t tokens) {
    if (GetParam().has_states) return (tokens - 1) / 64 * 64;
    return tokens - 1;
  }

  std::unique_ptr<Ops> packer_;
  std::unique_ptr<ModelShards> shards_;
  std::unique_ptr<World> cold_;
  std::unique_ptr<World> warm_;
};

// Protects: a prompt that is sent again, whole, edited or cut anywhere around a page's end, is only computed from the
// last place that can be resumed, and gives the bytes of a cold run.
TEST_P(EngineCacheTest, ResentAndEditedPromptsStartLate) {
  const std::vector<uint32_t> prompt = text(300, 1);
  EXPECT_EQ(same(request(prompt)), 0u);
  EXPECT_EQ(same(request(prompt)), resent(300));
  EXPECT_EQ(same(request(prompt, 30, 0.0)), resent(300));
  for (const uint32_t cut : {1u, 2u, 63u, 64u, 65u, 127u, 128u, 129u, 191u, 192u, 193u, 255u, 256u, 257u, 299u}) {
    SCOPED_TRACE(cut);
    std::vector<uint32_t> edited(prompt.begin(), prompt.begin() + cut);
    const std::vector<uint32_t> other = text(40, 77 + cut);
    edited.insert(edited.end(), other.begin(), other.end());
    const uint64_t cached = same(request(edited, 6));
    // The grid of 128 and what earlier cuts left; at least the grid, at most the cut and what happens to agree.
    if (GetParam().has_states) {
      EXPECT_GE(cached, cut / 128 * 128);
      EXPECT_LE(cached, cut + 2);
    } else {
      EXPECT_GE(cached, cut > 1 ? cut - 1 : 0u);
      EXPECT_LE(cached, cut + 2);
    }
  }
}

// Protects: a turn after a reply re-reads only the new tokens: everything that was computed of the reply is used again,
// whatever was drafted, and the bytes are those of reading the conversation cold. Regenerating the same turn still
// hits.
TEST_P(EngineCacheTest, TurnsAfterRepliesReadOnlyNewTokens) {
  std::vector<uint32_t> conversation = text(90, 5);
  for (uint32_t turn = 0; turn < 5; ++turn) {
    SCOPED_TRACE(turn);
    GenerationStats stats;
    const size_t length = conversation.size();
    const uint64_t cached = same(request(conversation, 17 + turn * 11, turn % 2 == 0 ? 0.0 : 0.9), &stats);
    // All but the new tokens and the reply's last, which was sampled and never computed.
    if (turn > 0) {
      EXPECT_GE(cached + 8 + 1, length);
    }
    EXPECT_EQ(same(request(conversation, 17 + turn * 11, turn % 2 == 0 ? 0.0 : 0.9)) > 0, length > 64) << "regenerated";
    conversation.insert(conversation.end(), stats.token_ids.begin(), stats.token_ids.end());
    const std::vector<uint32_t> next = text(8, 40 + turn);
    conversation.insert(conversation.end(), next.begin(), next.end());
  }
}

// Protects: choices of one request share its prompt, which is read once, and each is what it is alone.
TEST_P(EngineCacheTest, ChoicesShareTheirPrompt) {
  GenerationRequest many = request(text(200, 9), 12);
  many.n = 3;
  const uint64_t before = warm_->link->rows();
  same(many);
  EXPECT_LT(warm_->link->rows() - before, 200 + 3 * (64 + 12 * 8)) << "the prompt was read more than once";
  EXPECT_EQ(warm_->engine->status().cache.hits, 2u);
}

// Protects: a request that opts out computes everything, uses nothing and leaves nothing, with the same bytes.
TEST_P(EngineCacheTest, RequestsCanOptOut) {
  GenerationRequest mine = request(text(200, 3));
  mine.cache = false;
  EXPECT_EQ(same(mine), 0u);
  EXPECT_EQ(same(mine), 0u);
  EXPECT_EQ(warm_->engine->status().cached_pages, 0);
  mine.cache = true;
  EXPECT_EQ(same(mine), 0u);
  EXPECT_EQ(same(mine), resent(200));
}

// Protects: a reply that the client checks without drafts starts from what drafted ones left, and the other way round.
TEST_P(EngineCacheTest, SerialChecksShareTheCache) {
  GenerationRequest serial = request(text(180, 21), 24);
  serial.draft = false;
  same(serial);
  serial.draft = true;
  same(serial);
  same(serial);
  serial.draft = false;
  EXPECT_GT(same(serial), 0u);
}

// Protects: when a rank is lost the cache is empty with it: what was cached is computed again, replies go on to the
// same bytes, and afterwards the cache fills anew.
TEST_P(EngineCacheTest, ALostRankEmptiesTheCache) {
  const std::vector<uint32_t> prompt = text(220, 4);
  same(request(prompt));
  warm_->link->fail_in(9);
  same(request(prompt, 30));
  EXPECT_EQ(warm_->engine->status().parked, 1u);
  EXPECT_GT(same(request(prompt, 30)), 0u);
}

// Protects: under pressure chains are forgotten and computed again, requests that fit always run, many at once stay
// themselves, and at the end no page is lost.
TEST_P(EngineCacheTest, EvictionLeavesNoTrace) {
  warm_.reset();
  warm_ = open(true, 14, 3);
  for (uint32_t round = 0; round < 3; ++round) {
    for (uint32_t which = 0; which < 5; ++which) {
      SCOPED_TRACE(round * 10 + which);
      same(request(text(150 + 60 * which, which), 15));
    }
    std::vector<std::thread> threads;
    for (uint32_t which = 0; which < 4; ++which) {
      threads.emplace_back([&, which] {
        const GenerationRequest mine = request(text(100 + 90 * which, which % 3), 12);
        EXPECT_EQ(run(*warm_, mine)[0].token_sha, run(*cold_, mine)[0].token_sha) << which;
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_GT(warm_->engine->status().cache.evicted_pages, 0u);
  for (int i = 0; i < 1000 && warm_->engine->status().free_pages != 14; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_EQ(warm_->engine->status().free_pages, 14);
}

class FolderForStates {
 public:
  FolderForStates()
      : path_(std::filesystem::temp_directory_path() / ("tensorfold-cache-" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(path_);
  }
  ~FolderForStates() {
    // A world that lives longer may be writing there still.
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string path() const { return path_.string(); }
  std::vector<std::string> files(const std::string& part) const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path_)) {
      const std::string name = entry.path().string();
      if (entry.is_regular_file() && name.find(part) != std::string::npos) found.push_back(name);
    }
    std::sort(found.begin(), found.end());
    return found;
  }

 private:
  std::filesystem::path path_;
};

// Protects: what was computed is there after a restart: prompts and conversations start late from disk, over several
// segments, and give the bytes of a cold run; what is damaged or missing on any rank is computed again.
TEST_P(EngineCacheTest, StatesComeBackFromDisk) {
  const FolderForStates folder;
  const auto reopen = [&](int64_t pages = 256) {
    warm_.reset();
    warm_ = open(true, pages, 64, folder.path());
  };
  reopen();
  const std::vector<uint32_t> prompt = text(300, 1);
  const std::vector<uint32_t> longer = text(2180, 2);
  GenerationStats stats;
  EXPECT_EQ(same(request(prompt), &stats), 0u);
  EXPECT_EQ(same(request(longer, 8)), 0u);
  std::vector<uint32_t> next = prompt;
  next.insert(next.end(), stats.token_ids.begin(), stats.token_ids.end());
  const std::vector<uint32_t> turn = text(8, 40);
  next.insert(next.end(), turn.begin(), turn.end());
  wait_written(*warm_);
  EXPECT_GT(warm_->engine->status().states.saved, 2u);
  EXPECT_EQ(warm_->engine->status().states.save_failures, 0u);

  reopen();
  EXPECT_EQ(same(request(longer, 8)), resent(2180));
  EXPECT_GE(same(request(next)) + 8 + 1, next.size());
  EXPECT_GT(warm_->engine->status().states.restored, 1u);
  wait_written(*warm_);

  // One byte of each file of rank 1 changed: all of it is computed again, and written again.
  warm_.reset();
  for (const std::string& file : folder.files("rank1of2")) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(-100, std::ios::end);
    const char byte = static_cast<char>(stream.get() ^ 1);
    stream.seekp(-100, std::ios::end);
    stream.put(byte);
  }
  reopen();
  EXPECT_EQ(same(request(longer, 8)), 0u);
  EXPECT_GT(warm_->engine->status().states.restore_failures, 0u);
  wait_written(*warm_);
  reopen();
  EXPECT_EQ(same(request(longer, 8)), resent(2180));

  // Rank 1 has lost its files, and rank 0 one in the middle.
  warm_.reset();
  for (const std::string& file : folder.files("rank1of2")) std::filesystem::remove(file);
  reopen();
  EXPECT_EQ(same(request(longer, 8)), 0u);
  warm_.reset();  // it writes into the folder
}

// Protects: an orderly stop writes what is still queued for the disks, also more than one pass can order.
TEST_P(EngineCacheTest, AnOrderlyStopWritesWhatIsQueued) {
  const FolderForStates folder;
  warm_.reset();
  warm_ = open(true, 256, 64, folder.path());
  std::vector<std::vector<uint32_t>> prompts;
  for (uint32_t seed = 0; seed < 12; ++seed) prompts.push_back(text(150, 50 + seed));
  for (const std::vector<uint32_t>& prompt : prompts) same(request(prompt, 2));
  EXPECT_TRUE(warm_->engine->drain(std::chrono::seconds(30)));
  EXPECT_TRUE(warm_->engine->write_states(std::chrono::seconds(30)));
  EXPECT_EQ(warm_->engine->status().unwritten_segments, 0);
  warm_.reset();
  warm_ = open(true, 256, 64, folder.path());
  for (const std::vector<uint32_t>& prompt : prompts) EXPECT_EQ(same(request(prompt, 2)), resent(150));
  warm_.reset();  // it writes into the folder
}

// Protects: a context that is pinned by name is in memory before the first request, survives a quota that lets nothing
// else live, and can be let go.
TEST_P(EngineCacheTest, PinnedContextsAreBackBeforeTheFirstRequest) {
  const FolderForStates folder;
  warm_.reset();
  warm_ = open(true, 256, 64, folder.path());
  const std::vector<uint32_t> prompt = text(2120, 6);
  GenerationStats stats;
  same(request(prompt, 8), &stats);
  wait_written(*warm_);
  const auto with = [&](auto call) {
    const auto done = std::make_shared<std::promise<bool>>();
    warm_->engine->with_states([done, call](StateKeeper& states) { done->set_value(call(states)); });
    return done->get_future().get();
  };
  EXPECT_TRUE(with([](StateKeeper& states) {
    const std::vector<StoredSegment> all = states.list();
    const auto last =
        std::max_element(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.end() < b.end(); });
    return states.pin(last->key, "manual");
  }));
  wait_written(*warm_);
  warm_.reset();
  warm_ = open(true, 256, 64, folder.path());
  EXPECT_GE(warm_->engine->status().states.restored, 2u);
  const uint64_t restored = warm_->engine->status().states.restored;
  std::vector<uint32_t> next = prompt;
  next.insert(next.end(), stats.token_ids.begin(), stats.token_ids.end());
  next.push_back(3);
  EXPECT_GE(same(request(next, 4)) + 2, next.size() - 1);
  EXPECT_EQ(warm_->engine->status().states.restored, restored) << "it was in memory";
  EXPECT_TRUE(with([](StateKeeper& states) { return states.unpin("manual") && !states.unpin("manual"); }));
  EXPECT_TRUE(with([](StateKeeper& states) {
    const size_t before = states.segments();
    return states.drop(states.list()[0].key) && states.segments() < before;
  }));
  warm_.reset();  // it writes into the folder
}

INSTANTIATE_TEST_SUITE_P(Models, EngineCacheTest,
                         ::testing::Values(CacheCase{"qwen3_5", true, true, DraftKind::kAuto},
                                           CacheCase{"qwen3_5", true, true, DraftKind::kMtp},
                                           CacheCase{"qwen3_next", true, false, DraftKind::kCopy},
                                           CacheCase{"llama", false, false, DraftKind::kAuto},
                                           CacheCase{"qwen3_moe", false, false, DraftKind::kNone}));

}  // namespace
}  // namespace tensorfold
