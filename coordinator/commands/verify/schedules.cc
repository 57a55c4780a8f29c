#include "coordinator/commands/verify/schedules.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>

#include "coordinator/sampling/identity.h"
#include "coordinator/schedule/engine.h"
#include "worker/runtime/local_cluster.h"

namespace tensorfold {
namespace {

constexpr int kStreams = 16;
constexpr int kChunk = 24;
constexpr int64_t kSnapshots = 8;
constexpr uint32_t kLogprobs = 8;  // of every token, beside its own
constexpr std::chrono::seconds kLongest{300};

// A local world whose passes are counted: what has to happen at a certain pass happens before it, whatever the
// machine's speed.
class CountingLink : public ClusterLink, public PassExecutor {
 public:
  explicit CountingLink(LocalCluster& cluster) : cluster_(cluster) {}
  /// Called before every pass with its number, from 1.
  void before_pass(std::function<void(uint64_t)> action) { action_ = std::move(action); }

  PassExecutor& executor() override { return *this; }
  absl::Status try_regroup() override { return cluster_.forget(); }
  absl::StatusOr<PassResult> execute(PassPlan plan) override {
    if (++passes_; action_) action_(passes_);
    return cluster_.executor().execute(std::move(plan));
  }

 private:
  LocalCluster& cluster_;
  uint64_t passes_ = 0;
  std::function<void(uint64_t)> action_;
};

// One request's tokens and log-probabilities, and its end.
struct Heard {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<uint32_t> words;  // ids, then the bits of every log-probability
  size_t tokens = 0;
  bool finished = false;
  std::optional<ApiError> error;

  void add(double value) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    words.push_back(static_cast<uint32_t>(bits));
    words.push_back(static_cast<uint32_t>(bits >> 32));
  }
  void take(const GenerationEvent& event) {
    const std::lock_guard lock(mutex);
    if (const TokenEvent* kept = std::get_if<TokenEvent>(&event)) {
      tokens += kept->tokens.size();
      for (const GeneratedToken& token : kept->tokens) {
        words.push_back(token.id);
        if (!token.logprobs) continue;
        add(token.logprobs->chosen.logprob);
        for (const IdLogprob& other : token.logprobs->top) {
          words.push_back(other.id);
          add(other.logprob);
        }
      }
      return;
    }
    finished = true;
    error = std::get<FinishEvent>(event).error;
    changed.notify_all();
  }
};

// The tested request and the others of one schedule, on one engine.
class ScheduleRun {
 public:
  ScheduleRun(LocalCluster& cluster, const EngineModel& model, const ScheduleOutcome& cell, const CellInputs& inputs,
              int64_t pages)
      : cell_(cell), inputs_(inputs), link_(cluster), engine_(link_, model, options(cell, pages)) {}
  ~ScheduleRun() { engine_.stop(); }
  ScheduleRun(const ScheduleRun&) = delete;
  ScheduleRun& operator=(const ScheduleRun&) = delete;

  absl::Status run(ScheduleOutcome* outcome) {
    arrange();
    engine_.start();
    std::unique_lock lock(heard_->mutex);
    const bool ended = heard_->changed.wait_for(lock, kLongest, [this] { return heard_->finished; });
    if (!ended) return absl::DeadlineExceededError(cell_.name() + ": the reply did not end");
    if (heard_->error) return absl::InternalError(cell_.name() + ": " + heard_->error->message);
    outcome->hash = token_sha(heard_->words);
    lock.unlock();
    over_ = true;  // others that still come are refused
    engine_.stop();
    outcome->preempted = engine_.status().preempted;
    if (!refused_.empty()) return absl::InternalError(cell_.name() + ": " + refused_);
    if (cell_.schedule == CellSchedule::kPreempted && outcome->preempted < least_preempted()) {
      return absl::InternalError(fmt::format("{}: the lane was taken {} times", cell_.name(), outcome->preempted));
    }
    return absl::OkStatus();
  }

 private:
  // Short prompts and replies may be done before somebody comes.
  uint64_t least_preempted() const {
    if (inputs_.reply_tokens < 10) return 0;
    return inputs_.prompt.size() > 2 * kChunk ? 2 : 1;
  }

  static EngineOptions options(const ScheduleOutcome& cell, int64_t pages) {
    EngineOptions options;
    options.max_sequences = cell.schedule == CellSchedule::kPreempted ? 1 : kStreams;
    options.queue_limit = 2 * kStreams;
    options.max_batch_rows = 96;
    options.prompt_chunk = kChunk;
    options.pages = pages;
    options.draft = DraftKind::kAuto;
    // Half of the runs resume from what the prefix cache kept, the others compute everything again.
    options.cache.enabled = cell.draft;
    options.cache.snapshots = kSnapshots;
    options.cache.snapshot_tokens = kPageSize;
    return options;
  }

  GenerationRequest request(uint32_t number) const {
    GenerationRequest request;
    request.prompt = number == 0 ? inputs_.prompt : inputs_.mates[number % inputs_.mates.size()];
    // Others differ from one another, and from themselves in other schedules.
    if (number > 0) request.prompt.resize(request.prompt.size() - number % 7, request.prompt[0]);
    request.max_tokens = number == 0 ? inputs_.reply_tokens : inputs_.reply_tokens + 3 * (number % 5);
    request.ignore_eos = true;
    request.seed = inputs_.seed + number;
    request.sampling.temperature = number == 0 ? (cell_.sampled ? 0.9 : 0.0) : (number % 2 == 0 ? 0.7 : 0.0);
    request.sampling.top_p = number == 0 && cell_.sampled ? 0.95 : 1.0;
    request.draft = number == 0 ? cell_.draft : number % 3 != 0;
    if (number == 0) request.logprobs = kLogprobs;
    return request;
  }

  void submit(uint32_t number, Priority priority) {
    GenerationRequest wanted = request(number);
    wanted.priority = priority;
    GenerationSink sink = [](const GenerationEvent&) {};
    if (number == 0) sink = [heard = heard_](const GenerationEvent& event) { heard->take(event); };
    const ApiOr<uint64_t> id = engine_.submit(std::move(wanted), std::move(sink));
    if (!id.ok() && !over_) refused_ = id.error().message;
  }

  void arrange() {
    switch (cell_.schedule) {
      case CellSchedule::kAlone:
        submit(0, Priority::kForeground);
        break;
      case CellSchedule::kMixed:
        for (uint32_t i = 1; i < kStreams; ++i) {
          submit(i, i % 4 == 0 ? Priority::kBackground : Priority::kForeground);
          if (i == 7) submit(0, Priority::kForeground);
        }
        break;
      case CellSchedule::kPreempted:
        submit(0, Priority::kBackground);
        // While its prompt is read, and again when it has its first token: no window is as wide as the reply is long.
        link_.before_pass([this](uint64_t pass) {
          const std::lock_guard lock(heard_->mutex);
          if (pass == 2) submit(2, Priority::kForeground);
          if (heard_->tokens == 0 || taken_in_reply_) return;
          taken_in_reply_ = true;
          submit(3, Priority::kForeground);
        });
        break;
      case CellSchedule::kBackground:
        submit(0, Priority::kBackground);
        link_.before_pass([this](uint64_t pass) {
          if (pass < kStreams) submit(static_cast<uint32_t>(pass), Priority::kForeground);
        });
        break;
    }
  }

  const ScheduleOutcome& cell_;
  const CellInputs& inputs_;
  std::shared_ptr<Heard> heard_ = std::make_shared<Heard>();
  std::string refused_;
  std::atomic<bool> over_{false};
  bool taken_in_reply_ = false;
  CountingLink link_;
  Engine engine_;
};

}  // namespace

std::string schedule_name(CellSchedule schedule) {
  switch (schedule) {
    case CellSchedule::kAlone:
      return "alone";
    case CellSchedule::kMixed:
      return "mixed";
    case CellSchedule::kPreempted:
      return "preempted";
    case CellSchedule::kBackground:
      return "background";
  }
  return "?";
}

std::string ScheduleOutcome::name() const {
  return fmt::format("schedule {} world {} draft {} {}", schedule_name(schedule), world, draft ? "auto" : "off",
                     sampled ? "sampled" : "greedy");
}

absl::StatusOr<std::vector<ScheduleOutcome>> run_schedules(const ScheduleOptions& options, const CellInputs& inputs) {
  std::vector<ScheduleOutcome> outcomes;
  std::string reference[2];
  size_t longest = inputs.prompt.size();
  for (const std::vector<uint32_t>& mate : inputs.mates) longest = std::max(longest, mate.size());
  const int64_t each = static_cast<int64_t>(longest + inputs.reply_tokens + 16 + kMaxWindow) / kPageSize + 1;
  const int64_t pages = (kStreams + 1) * each;
  for (const int world : options.worlds) {
    const BackendOptions backend = {.backend = options.backend,
                                    .isa = "auto",
                                    .threads = 1,
                                    .kv_format = options.kv_format,
                                    .precision = options.precision};
    auto shards = ModelShards::load_all(options.model_dir, world, backend, nullptr, options.drafter);
    if (!shards.ok()) return shards.status();
    LocalClusterOptions cluster_options;
    cluster_options.transport = options.transport;
    cluster_options.backend = backend;
    cluster_options.runner.slots = kStreams;
    cluster_options.runner.pages = pages;
    cluster_options.runner.snapshots = kSnapshots;
    auto cluster = LocalCluster::start(**shards, cluster_options);
    if (!cluster.ok()) return cluster.status();
    EngineModel model;
    model.context = static_cast<uint32_t>(pages * kPageSize);
    model.vocabulary = static_cast<uint32_t>((*shards)->shape(0).vocab);
    model.has_mtp = (*shards)->shape(0).has_mtp;
    model.block_drafts = (*shards)->block_drafts();
    model.has_states = !(*shards)->shape(0).recurrent.empty();
    for (const CellSchedule schedule :
         {CellSchedule::kAlone, CellSchedule::kMixed, CellSchedule::kPreempted, CellSchedule::kBackground}) {
      for (const bool draft : {false, true}) {
        for (const bool sampled : {false, true}) {
          ScheduleOutcome& outcome = outcomes.emplace_back();
          outcome.schedule = schedule;
          outcome.world = world;
          outcome.draft = draft;
          outcome.sampled = sampled;
          if (absl::Status status = ScheduleRun(**cluster, model, outcome, inputs, pages).run(&outcome); !status.ok()) {
            return status;
          }
          if (absl::Status status = (*cluster)->forget(); !status.ok()) return status;
          std::string& expected = reference[sampled ? 1 : 0];
          if (expected.empty()) expected = outcome.hash;
          outcome.same = outcome.hash == expected;
        }
      }
    }
  }
  return outcomes;
}

}  // namespace tensorfold
