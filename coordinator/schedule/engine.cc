#include "coordinator/schedule/engine.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "coordinator/sampling/identity.h"
#include "coordinator/schedule/warm_up.h"

namespace tensorfold {
namespace {

constexpr int kRetryAfterSeconds = 1;
constexpr std::chrono::milliseconds kIdleTick{100};
constexpr std::chrono::milliseconds kUrgentTick{1};
constexpr int kMostFailures = 4;  // passes that fail in a row, the world regrouped each time

bool mtp_in_use(const EngineModel& model, DraftKind kind) {
  return model.has_mtp && (kind == DraftKind::kMtp || kind == DraftKind::kAuto);
}

// Most drafts of a block; 0: no block drafter is in use.
uint32_t block_drafts(const EngineModel& model, DraftKind kind) {
  return kind == DraftKind::kBlock || kind == DraftKind::kAuto ? model.block_drafts : 0;
}

// What the client said, whatever turn the sequence was given since.
bool asked_for_background(const Sequence& sequence) {
  return sequence.context().request.priority == Priority::kBackground;
}

// Whether a rank's answer is what was asked for, token ids included: a rank that is out of its mind must not put its
// tokens into a reply. `vocabulary` 0: not known.
bool answers(const RowReport& row, const RowWant& want, uint32_t vocabulary) {
  if (row.first_id < 0) return false;
  if (want.top_n == kFullRow) return row.candidates.empty() && !row.logits.empty();
  const size_t most = want.top_n == kDrawn ? 1 : want.top_n;
  if (!row.logits.empty() || row.candidates.empty() || row.candidates.size() > most) return false;
  return std::all_of(row.candidates.begin(), row.candidates.end(), [&](const WireCandidate& candidate) {
    return candidate.id >= row.first_id && (vocabulary == 0 || static_cast<uint32_t>(candidate.id) < vocabulary);
  });
}

CacheOptions cache_options(const EngineModel& model, const EngineOptions& options) {
  CacheOptions out = options.cache;
  out.has_states = model.has_states;
  out.has_mtp = mtp_in_use(model, options.draft);
  return out;
}

}  // namespace

Engine::Engine(ClusterLink& link, EngineModel model, EngineOptions options)
    : link_(link),
      model_(std::move(model)),
      options_(options),
      last_step_(Clock::now()),
      admission_({.count = options.queue_limit, .tokens = options.queue_tokens}),
      lanes_(options.max_sequences, options.pages, cache_options(model_, options)),
      policy_(options.width),
      planner_({.max_batch_rows = options.max_batch_rows,
                .prompt_chunk = options.prompt_chunk,
                .budget = options.round_budget,
                .use_mtp = mtp_in_use(model_, options.draft),
                .block_drafts = block_drafts(model_, options.draft)},
               policy_),
      turns_(options.background_turn) {
  publish();
}

Engine::~Engine() { stop(); }

void Engine::start() {
  thread_ = std::thread([this] { run(); });
}

absl::Status Engine::warm_up() {
  const uint32_t widest = options_.draft == DraftKind::kNone ? 1 : policy_.options().max_width;
  const WarmUpOptions options = {.widest = widest,
                                 .use_mtp = mtp_in_use(model_, options_.draft),
                                 .block_drafts = block_drafts(model_, options_.draft),
                                 .most_rows = options_.max_batch_rows};
  const absl::StatusOr<WarmUpResult> measured = tensorfold::warm_up(link_.executor(), options, policy_);
  if (!measured.ok()) return measured.status();
  mtp_step_ms_ = measured->mtp_step_ms;
  block_ms_ = measured->block_ms;
  planner_.record_prompt(measured->prompt_rows, 0.0, measured->prompt_ms);
  return absl::OkStatus();
}

ApiOr<uint64_t> Engine::submit(GenerationRequest request, GenerationSink sink) {
  if (pages_for(request) > lanes_.pages()) {
    return cache_too_small_error(request.prompt.size() + request.max_tokens,
                                 static_cast<uint64_t>(lanes_.pages() * kPageSize));
  }
  auto context = std::make_shared<RequestContext>();
  context->seed = request.seed.has_value() ? *request.seed : default_seed(request.prompt, options_.seed_salt);
  context->end_ids = request.stop_ids;
  if (!request.ignore_eos) {
    context->end_ids.insert(context->end_ids.end(), model_.end_ids.begin(), model_.end_ids.end());
  }
  std::sort(context->end_ids.begin(), context->end_ids.end());
  context->sink = std::move(sink);
  context->submitted = Clock::now();
  context->progress_interval = options_.progress_interval;
  context->request = std::move(request);
  const GenerationRequest& kept = context->request;
  std::vector<std::unique_ptr<Sequence>> sequences;
  for (uint32_t choice = 0; choice < kept.n; ++choice) {
    sequences.push_back(std::make_unique<Sequence>(context, choice, options_.draft, options_.copy, model_.tokenizer));
    if (!kept.cache) continue;
    sequences.back()->stop_at(
        [this](uint64_t end, uint64_t computed) { return lanes_.cache().next_stop(end, computed); });
  }
  const int count = static_cast<int>(sequences.size());
  const int64_t tokens = static_cast<int64_t>(kept.prompt.size()) * count;

  const std::lock_guard lock(mutex_);
  const auto rejected = [&](ApiError error) {
    ++status_.rejected;
    return error;
  };
  if (status_.draining || stopping_) return rejected(draining_error(kRetryAfterSeconds));
  if (!status_.up) return rejected(error_from_status(absl::UnavailableError(status_.down_reason)));
  // The scheduler learns of a loss in its next round; a request must not be parked for a cluster that is known to be
  // down.
  if (const absl::Status health = link_.health(); !health.ok()) return rejected(error_from_status(health));
  const int free_lanes = std::max(0, options_.max_sequences - status_.active);
  if (std::optional<ApiError> error = admission_.refuse(count, tokens, free_lanes)) return rejected(*std::move(error));
  context->id = next_id_++;
  admission_.add(count, tokens);
  ++status_.requests;
  for (std::unique_ptr<Sequence>& sequence : sequences) incoming_.push_back(std::move(sequence));
  wake_.notify_one();
  return context->id;
}

void Engine::cancel(uint64_t id) {
  const std::lock_guard lock(mutex_);
  cancels_.push_back(id);
  wake_.notify_one();
}

bool Engine::drain(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  status_.draining = true;
  wake_.notify_one();
  return idle_.wait_for(lock, timeout, [this] { return status_.active == 0 && admission_.waiting() == 0; });
}

bool Engine::write_states(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  writing_ = true;
  wake_.notify_one();
  const bool all = idle_.wait_for(lock, timeout, [this] { return status_.unwritten_segments == 0; });
  writing_ = false;
  return all && status_.up;  // what a lost rank leaves unwritten is no longer counted
}

void Engine::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

EngineStatus Engine::status() const {
  const std::lock_guard lock(mutex_);
  EngineStatus out = status_;
  out.queued = admission_.waiting();
  out.queued_tokens = admission_.waiting_tokens();
  out.seconds_since_step = std::chrono::duration<double>(Clock::now() - last_step_).count();
  return out;
}

void Engine::publish() {
  const std::lock_guard lock(mutex_);
  status_.active = static_cast<int>(active_.size());
  status_.pages = lanes_.pages();
  status_.free_pages = lanes_.free_pages();
  status_.cached_pages = lanes_.cache().cached_pages();
  status_.snapshots = lanes_.cache().snapshots();
  status_.cache = lanes_.cache().counters();
  status_.states = lanes_.cache().states().counters();
  status_.stored_segments = static_cast<int64_t>(lanes_.cache().states().segments());
  status_.unwritten_segments = static_cast<int64_t>(lanes_.cache().states().unwritten());
  status_.up = down_.ok();
  status_.down_reason = std::string(down_.message());
  status_.active_background = static_cast<int>(
      std::count_if(active_.begin(), active_.end(), [](const auto& sequence) { return sequence->background(); }));
  status_.queued_background = static_cast<int>(queue_.background());
  status_.round_budget_seconds = planner_.budget_ms(active_.size()) / 1000.0;
  int64_t tokens = 0;
  const auto count_tokens = [&](const Sequence& sequence) {
    tokens += static_cast<int64_t>(sequence.context().request.prompt.size());
  };
  queue_.for_each(count_tokens);
  for (const std::unique_ptr<Sequence>& sequence : incoming_) count_tokens(*sequence);
  admission_.set(static_cast<int>(queue_.size() + incoming_.size()), tokens);
  if (status_.active == 0 && admission_.waiting() == 0) idle_.notify_all();  // drain(), write_states()
}

void Engine::run() {
  while (true) {
    const bool idle = active_.empty() && queue_.empty();
    take_commands(idle || !down_.ok());
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) break;
    }
    drop_ended();
    if (!down_.ok()) {
      wait_for_ranks();
      publish();
      continue;
    }
    if (const absl::Status health = link_.health(); !health.ok()) {
      fail_round(health);
      publish();
      continue;
    }
    give_background_its_turn();
    start_sequences();
    if (active_.empty()) {
      round_end_ = {};
      ping_if_idle();
    } else {
      run_round();
    }
    drop_ended();
    publish();
  }
  finish_all(draining_error(kRetryAfterSeconds));
  publish();
}

// Requests and cancellations that came in. Waits a tick for some when there is nothing else to do.
void Engine::take_commands(bool wait) {
  std::vector<uint64_t> cancels;
  std::vector<std::function<void(StateKeeper&)>> calls;
  {
    std::unique_lock lock(mutex_);
    const auto something = [this] {
      return stopping_ || writing_ || !incoming_.empty() || !cancels_.empty() || !state_calls_.empty();
    };
    if (wait && !something()) wake_.wait_for(lock, kIdleTick, something);
    while (!incoming_.empty()) {
      queue_.push(std::move(incoming_.front()));
      incoming_.pop_front();
    }
    cancels.swap(cancels_);
    calls.swap(state_calls_);
  }
  for (const std::function<void(StateKeeper&)>& call : calls) call(lanes_.cache().states());
  for (const uint64_t id : cancels) {
    const auto cancel = [&](Sequence& sequence) {
      if (sequence.context().id == id) sequence.context().cancelled = true;
    };
    for (const std::unique_ptr<Sequence>& sequence : active_) cancel(*sequence);
    queue_.for_each(cancel);
  }
}

// Sequences that finished, were cancelled or ran out of time leave their lanes and the queue.
void Engine::drop_ended() {
  const Clock::time_point now = Clock::now();
  const auto end = [&](Sequence& sequence) {
    const RequestContext& context = sequence.context();
    if (!sequence.finished() && context.cancelled) {
      sequence.finish(FinishReason::kCancelled);
      const std::lock_guard lock(mutex_);
      ++status_.cancelled;
    } else if (!sequence.finished() && context.request.deadline.has_value() && now >= *context.request.deadline) {
      const double allowed = std::chrono::duration<double>(*context.request.deadline - context.submitted).count();
      sequence.finish(FinishReason::kError, timeout_error(allowed));
      const std::lock_guard lock(mutex_);
      ++status_.failed;
    }
    if (sequence.finished()) lanes_.give_back(sequence);
    return sequence.finished();
  };
  std::erase_if(active_, [&](const std::unique_ptr<Sequence>& sequence) { return end(*sequence); });
  queue_.erase_if(end);
}

// Whether the same request's first choice is still reading the prompt that this one will find in the cache.
bool Engine::waits_for_prompt(const Sequence& sequence) const {
  if (!lanes_.cache().options().enabled || !sequence.context().request.cache || sequence.choice() == 0) return false;
  return std::any_of(active_.begin(), active_.end(), [&](const std::unique_ptr<Sequence>& other) {
    return other->context().id == sequence.context().id && other->filling() && !other->finished();
  });
}

// Of the background sequences without a lane, and of those whose prompts others left no time for, the first that came.
// Only beside foreground work: among themselves background sequences go in the order in which they came.
void Engine::give_background_its_turn() {
  const bool waits = queue_.background() > 0 || left_out_;
  bool others = false;
  const auto look = [&others](const Sequence& sequence) { others = others || !asked_for_background(sequence); };
  for (const std::unique_ptr<Sequence>& sequence : active_) look(*sequence);
  queue_.for_each(look);
  if (waits && !others) return;  // the interval goes on: foreground work comes and goes
  if (!turns_.due(Clock::now(), waits)) return;
  Sequence* first = queue_.first_background();
  bool has_lane = false;
  for (const std::unique_ptr<Sequence>& sequence : active_) {
    if (!sequence->background() || !sequence->filling()) continue;
    if (first != nullptr && first->came_before(*sequence)) continue;
    first = sequence.get();
    has_lane = true;
  }
  if (first == nullptr) return;
  has_lane ? first->promote() : queue_.promote_background();
  const std::lock_guard lock(mutex_);
  ++status_.promoted;
}

// Who waits gets lanes in order; only choices that wait for their own request's prompt are overtaken. A foreground
// sequence that finds none takes those of background ones.
void Engine::start_sequences() {
  const auto later = [this](Sequence& sequence) {
    return waits_for_prompt(sequence) || lanes_.waits_for_state(sequence);
  };
  while (Sequence* next = queue_.next(later)) {
    if (!lanes_.take(*next) && !(make_room(*next) && lanes_.take(*next))) break;
    if (!asked_for_background(*next)) turns_.foreground_started();
    active_.push_back(queue_.take(*next));
  }
}

// Background sequences give up lanes for `next`, the oldest first and no more than needed; none if all together would
// not do.
bool Engine::make_room(const Sequence& next) {
  if (next.background()) return false;
  std::vector<size_t> background;
  int64_t pages = 0;
  for (size_t i = 0; i < active_.size(); ++i) {
    if (!active_[i]->background()) continue;
    background.push_back(i);
    pages += static_cast<int64_t>(active_[i]->pages.size());
  }
  if (background.empty() || !lanes_.would_fit(next, static_cast<int64_t>(background.size()), pages)) return false;
  std::sort(background.begin(), background.end(),
            [this](size_t a, size_t b) { return active_[a]->came_before(*active_[b]); });
  uint64_t preempted = 0;
  for (const size_t index : background) {
    if (lanes_.would_fit(next, 0, 0)) break;
    lanes_.give_back(*active_[index]);
    queue_.push_back_in(std::move(active_[index]));
    ++preempted;
  }
  std::erase(active_, nullptr);
  const std::lock_guard lock(mutex_);
  status_.preempted += preempted;
  return true;
}

void Engine::run_round() {
  Round round = planner_.plan(active_);
  left_out_ = std::any_of(active_.begin(), active_.end(), [&](const std::unique_ptr<Sequence>& sequence) {
    return sequence->background() && sequence->filling() &&
           std::find(round.sequences.begin(), round.sequences.end(), sequence.get()) == round.sequences.end();
  });
  // A slot that was freed and taken again starts fresh, which clears it anyway.
  lanes_.order(&round.plan);
  const Clock::time_point start = Clock::now();
  absl::StatusOr<PassResult> result = link_.executor().execute(round.plan);
  if (!result.ok()) {
    fail_round(result.status());
    return;
  }
  failures_ = 0;
  take_events(*result);
  const double ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  spdlog::debug("round: {} window rows, {} prompt rows at {:.0f}; {:.1f} ms, expected {:.1f} ms", round.window_rows,
                round.prompt_rows, round.prompt_position, ms, round.expected_ms);
  uint32_t mtp_steps = 0;  // chained once for all sequences
  bool blocks = false;     // likewise
  for (const SequencePlan& sequence : round.plan.sequences) {
    mtp_steps = std::max(mtp_steps, sequence.mtp_steps);
    blocks = blocks || sequence.block_drafts > 0;
  }
  if (round.prompt_rows == 0) {
    const double drafting = mtp_steps * mtp_step_ms_ + (blocks ? block_ms_ : 0.0);
    policy_.record_pass(round.window_rows, std::max(ms - drafting, ms / 2));
  }
  planner_.record(round, ms);

  int ended = 0;
  size_t kept = 0;
  // Each rank reports the wanted rows in the plan's order.
  std::vector<size_t> at(result->reports.size(), 0);
  for (size_t i = 0; i < round.sequences.size(); ++i) {
    const SequencePlan& plan = round.plan.sequences[i];
    std::vector<std::vector<const RowReport*>> rows(result->reports.size());
    for (size_t rank = 0; rank < result->reports.size(); ++rank) {
      const std::vector<RowReport>& reports = result->reports[rank].rows;
      for (const RowWant& want : plan.wants) {
        if (at[rank] >= reports.size() || reports[at[rank]].slot != plan.slot || reports[at[rank]].row != want.row ||
            !answers(reports[at[rank]], want, model_.vocabulary)) {
          fail_round(
              absl::DataLossError("rank " + std::to_string(rank) + " did not report the rows that were asked for"));
          return;
        }
        rows[rank].push_back(&reports[at[rank]++]);
      }
    }
    const std::vector<int32_t> none;
    const std::vector<int32_t>& drafts = i < result->drafts.size() ? result->drafts[i] : none;
    Sequence& sequence = *round.sequences[i];
    const uint64_t before = sequence.reply_tokens();
    const uint64_t drafted = sequence.drafted();
    const uint64_t accepted = sequence.accepted();
    sequence.take(plan, drafts, rows, policy_);
    lanes_.advanced(sequence);
    kept += sequence.reply_tokens() - before;
    const std::lock_guard lock(mutex_);
    status_.reply_tokens += sequence.reply_tokens() - before;
    status_.drafted += sequence.drafted() - drafted;
    status_.accepted += sequence.accepted() - accepted;
    if (plan.certain > 1 || before == 0) status_.prompt_tokens += plan.certain;
    if (sequence.finished()) {
      ++status_.finished;
      ++ended;
    }
  }
  const Clock::time_point now = Clock::now();
  if (round.prompt_rows == 0 && round_end_.time_since_epoch().count() != 0) {
    planner_.record_windows(round, kept, std::chrono::duration<double, std::milli>(now - round_end_).count());
  }
  round_end_ = now;
  const std::lock_guard lock(mutex_);
  last_step_ = now;
  admission_.record_round(ms / 1000.0, round.prompt_rows, ended);
  ++status_.passes;
  if (round.prompt_rows > 0) ++status_.prompt_passes;
  status_.window_rows += round.window_rows;
  status_.pass_rows += round.plan.rows();
  status_.pass_seconds += ms / 1000.0;
}

void Engine::ping_if_idle() {
  // States that go to disk and come back need passes to be ordered and to be heard of.
  bool urgent = lanes_.cache().states().urgent();
  {
    const std::lock_guard lock(mutex_);
    urgent = urgent || (writing_ && status_.unwritten_segments > 0);
  }
  if (urgent) {
    std::this_thread::sleep_for(kUrgentTick);
  } else if (!lanes_.cache().states().pending()) {
    const std::lock_guard lock(mutex_);
    if (Clock::now() - last_step_ < options_.ping_interval) return;
  }
  PassPlan plan;
  plan.kind = PlanKind::kPing;
  lanes_.order(&plan);
  const absl::StatusOr<PassResult> result = link_.executor().execute(std::move(plan));
  if (!result.ok()) {
    fail_round(result.status());
    return;
  }
  take_events(*result);
  const std::lock_guard lock(mutex_);
  last_step_ = Clock::now();
}

void Engine::take_events(const PassResult& result) {
  for (const PassReport& report : result.reports) lanes_.cache().states().take_events(report.events);
}

void Engine::open_states(StateOptions options, std::vector<StoredSegment> stored, int world) {
  options.has_states = model_.has_states;
  options.enabled = options.enabled && lanes_.cache().options().enabled;
  lanes_.cache().states().open(std::move(options), std::move(stored), world);
}

// What is pinned is there before the first request: one that would use it must not wait.
absl::Status Engine::restore_pinned(std::chrono::milliseconds most) {
  StateKeeper& states = lanes_.cache().states();
  const size_t contexts = states.restore_pinned();
  const Clock::time_point begin = Clock::now();
  while (states.urgent()) {
    if (Clock::now() - begin > most) {
      spdlog::warn("pinned contexts are not all back after {} ms; the rest is computed when it is asked for",
                   most.count());
      states.clear();
      break;
    }
    PassPlan plan;
    plan.kind = PlanKind::kPing;
    lanes_.order(&plan);
    const absl::StatusOr<PassResult> result = link_.executor().execute(std::move(plan));
    if (!result.ok()) return result.status();
    take_events(*result);
    std::this_thread::sleep_for(kUrgentTick);
  }
  publish();
  if (contexts > 0) spdlog::info("{} pinned contexts: {} states are back", contexts, states.counters().restored);
  return absl::OkStatus();
}

void Engine::with_states(std::function<void(StateKeeper&)> call) {
  const std::lock_guard lock(mutex_);
  state_calls_.push_back(std::move(call));
  wake_.notify_one();
}

void Engine::fail_round(const absl::Status& why) {
  spdlog::error("a pass failed: {}", std::string(why.message()));
  const bool rank_lost = absl::IsUnavailable(why) || absl::IsDeadlineExceeded(why);
  if (!rank_lost && ++failures_ >= kMostFailures) {
    // No rank is lost and the same work fails again and again: it is the work. Others shall be served.
    failures_ = 0;
    finish_active(error_from_status(why));
  }
  down_ = why;
  down_since_ = Clock::now();
  // Regrouped ranks start with nothing. Pages that sequences shared are not computed twice into one place: all wait for
  // lanes again, in the order they had.
  lanes_.lost(active_);
  parked_ += active_.size();
  for (std::unique_ptr<Sequence>& sequence : active_) {
    sequence->replay();
    queue_.push_back_in(std::move(sequence));
  }
  active_.clear();
}

void Engine::wait_for_ranks() {
  const absl::Status status = link_.try_regroup();
  if (status.ok()) {
    const double seconds = std::chrono::duration<double>(Clock::now() - down_since_).count();
    spdlog::info("all ranks are back after {:.1f} s; {} replies go on", seconds, parked_);
    down_ = absl::OkStatus();
    const std::lock_guard lock(mutex_);
    status_.parked += std::exchange(parked_, 0u);
    return;
  }
  if (Clock::now() - down_since_ >= options_.park_deadline) {
    finish_all(error_from_status(absl::UnavailableError(std::string(down_.message()))));
  }
}

void Engine::finish_active(const ApiError& error) {
  for (const std::unique_ptr<Sequence>& sequence : active_) {
    sequence->finish(FinishReason::kError, error);
    lanes_.give_back(*sequence);
  }
  const std::lock_guard lock(mutex_);
  status_.failed += active_.size();
  active_.clear();
}

void Engine::finish_all(const ApiError& error) {
  finish_active(error);
  uint64_t failed = queue_.size();
  queue_.for_each([&](Sequence& sequence) { sequence.finish(FinishReason::kError, error); });
  queue_.clear();
  const std::lock_guard lock(mutex_);
  for (const std::unique_ptr<Sequence>& sequence : incoming_) {
    sequence->finish(FinishReason::kError, error);
    ++failed;
  }
  incoming_.clear();
  status_.failed += failed;
}

}  // namespace tensorfold
