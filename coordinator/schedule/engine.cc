#include "coordinator/schedule/engine.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "coordinator/sampling/identity.h"

namespace tensorfold {
namespace {

constexpr int kRetryAfterSeconds = 1;
constexpr std::chrono::milliseconds kIdleTick{100};
constexpr int64_t kPageSize = 64;
constexpr int kMostFailures = 4;  // passes that fail in a row, the world regrouped each time

}  // namespace

// What a pass is about to do, and for whom.
struct Engine::Round {
  PassPlan plan;
  std::vector<Sequence*> sequences;  // one a plan entry
};

Engine::Engine(ClusterLink& link, EngineModel model, EngineOptions options)
    : link_(link),
      model_(std::move(model)),
      options_(options),
      last_step_(Clock::now()),
      pool_(options.pages),
      policy_(options.width) {
  for (int slot = options.max_sequences - 1; slot >= 0; --slot) free_slots_.push_back(static_cast<uint32_t>(slot));
  publish();
}

Engine::~Engine() { stop(); }

void Engine::start() {
  thread_ = std::thread([this] { run(); });
}

// One verify window of the warm-up sequence, none of it kept but the certain row. Milliseconds.
absl::StatusOr<double> Engine::timed_window(uint32_t width, uint32_t mtp_steps, uint64_t* position) {
  PassPlan plan;
  SequencePlan& sequence = plan.sequences.emplace_back();
  sequence.fresh = *position == 0;
  sequence.use_mtp = mtp_in_use();
  sequence.first_position = *position;
  sequence.certain = 1;
  sequence.tokens.assign(width - mtp_steps, 0);
  sequence.mtp_steps = mtp_steps;
  if (sequence.fresh) sequence.new_pages = {0};
  for (uint32_t row = 0; row < width; ++row) sequence.wants.push_back({row, 1});
  *position += 1;
  const Clock::time_point start = Clock::now();
  const absl::StatusOr<PassResult> result = link_.executor().execute(std::move(plan));
  if (!result.ok()) return result.status();
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

absl::Status Engine::warm_up() {
  constexpr int kRepeats = 3;
  constexpr std::chrono::seconds kLongest{3};
  const Clock::time_point begin = Clock::now();
  const uint32_t widest = options_.draft == DraftKind::kNone ? 1 : policy_.options().max_width;
  uint64_t position = 0;
  std::vector<uint32_t> widths;
  for (uint32_t width = 1; width < widest; width *= 2) widths.push_back(width);
  widths.push_back(widest);
  for (const uint32_t width : widths) {
    double best = 0;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      const absl::StatusOr<double> ms = timed_window(width, 0, &position);
      if (!ms.ok()) return ms.status();
      if (repeat == 0 || *ms < best) best = *ms;
      if (Clock::now() - begin > kLongest) break;
    }
    policy_.record_pass(width, best);
  }
  if (mtp_in_use() && widest > 1) {
    const uint32_t steps = std::min(widest - 1, 3u);
    double best = 0;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      const absl::StatusOr<double> ms = timed_window(steps + 1, steps, &position);
      if (!ms.ok()) return ms.status();
      if (repeat == 0 || *ms < best) best = *ms;
      if (Clock::now() - begin > kLongest) break;
    }
    mtp_step_ms_ = std::max(0.0, best - policy_.costs().estimate(steps + 1)) / steps;
    policy_.record_mtp_step(mtp_step_ms_);
  }
  PassPlan release;
  release.kind = PlanKind::kPing;
  release.release = {0};
  return link_.executor().execute(std::move(release)).status();
}

int64_t Engine::pages_for(const GenerationRequest& request) const {
  // A window's tentative rows may reach past the last token kept.
  const int64_t tokens = static_cast<int64_t>(request.prompt.size()) + request.max_tokens + kMaxWindow;
  return (tokens + kPageSize - 1) / kPageSize;
}

ApiOr<uint64_t> Engine::submit(GenerationRequest request, GenerationSink sink) {
  const int64_t pages = pages_for(request);
  if (pages > pool_.pages()) {
    return cache_too_small_error(request.prompt.size() + request.max_tokens,
                                 static_cast<uint64_t>(pool_.pages() * kPageSize));
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
  context->request = std::move(request);
  const GenerationRequest& kept = context->request;
  std::vector<std::unique_ptr<Sequence>> sequences;
  for (uint32_t choice = 0; choice < kept.n; ++choice) {
    sequences.push_back(std::make_unique<Sequence>(context, choice, options_.draft, options_.copy, model_.tokenizer));
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
  const bool too_many = waiting_ + count > options_.queue_limit + free_lanes;
  const bool too_long = options_.queue_tokens > 0 && waiting_ > 0 && waiting_tokens_ + tokens > options_.queue_tokens;
  if (too_many || too_long) {
    return rejected(queue_full_error(static_cast<uint64_t>(waiting_), static_cast<uint64_t>(options_.queue_limit),
                                     kRetryAfterSeconds));
  }
  context->id = next_id_++;
  waiting_ += count;
  waiting_tokens_ += tokens;
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
  return idle_.wait_for(lock, timeout, [this] { return status_.active == 0 && waiting_ == 0; });
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
  out.queued = waiting_;
  out.queued_tokens = waiting_tokens_;
  out.seconds_since_step = std::chrono::duration<double>(Clock::now() - last_step_).count();
  return out;
}

void Engine::publish() {
  const std::lock_guard lock(mutex_);
  status_.active = static_cast<int>(active_.size());
  status_.pages = pool_.pages();
  status_.free_pages = pool_.free_pages();
  status_.up = down_.ok();
  status_.down_reason = std::string(down_.message());
  waiting_ = static_cast<int>(queue_.size() + incoming_.size());
  waiting_tokens_ = 0;
  for (const auto* waiting : {&queue_, &incoming_}) {
    for (const std::unique_ptr<Sequence>& sequence : *waiting) {
      waiting_tokens_ += static_cast<int64_t>(sequence->context().request.prompt.size());
    }
  }
  if (status_.active == 0 && waiting_ == 0) idle_.notify_all();
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
    start_sequences();
    if (active_.empty()) {
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
  {
    std::unique_lock lock(mutex_);
    const auto something = [this] { return stopping_ || !incoming_.empty() || !cancels_.empty(); };
    if (wait && !something()) wake_.wait_for(lock, kIdleTick, something);
    while (!incoming_.empty()) {
      queue_.push_back(std::move(incoming_.front()));
      incoming_.pop_front();
    }
    cancels.swap(cancels_);
  }
  for (const uint64_t id : cancels) {
    for (const std::unique_ptr<Sequence>& sequence : active_) {
      if (sequence->context().id == id) sequence->context().cancelled = true;
    }
    for (const std::unique_ptr<Sequence>& sequence : queue_) {
      if (sequence->context().id == id) sequence->context().cancelled = true;
    }
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
    if (sequence.finished()) release(sequence);
    return sequence.finished();
  };
  std::erase_if(active_, [&](const std::unique_ptr<Sequence>& sequence) { return end(*sequence); });
  std::erase_if(queue_, [&](const std::unique_ptr<Sequence>& sequence) { return end(*sequence); });
}

void Engine::release(Sequence& sequence) {
  if (!sequence.slot.has_value()) return;
  to_release_.push_back(*sequence.slot);
  free_slots_.push_back(*sequence.slot);
  pool_.give_back(sequence.pages);
  sequence.slot.reset();
  sequence.pages.clear();
}

// First come, first served: a long request at the head is not overtaken, so it cannot starve.
void Engine::start_sequences() {
  while (!queue_.empty() && !free_slots_.empty()) {
    Sequence& next = *queue_.front();
    std::vector<int32_t> pages = pool_.take(pages_for(next.context().request));
    if (pages.empty()) break;
    next.pages = std::move(pages);
    next.slot = free_slots_.back();
    free_slots_.pop_back();
    next.replay();
    active_.push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
}

bool Engine::mtp_in_use() const {
  return model_.has_mtp && (options_.draft == DraftKind::kMtp || options_.draft == DraftKind::kAuto);
}

void Engine::build_round(Round* round) {
  const bool mtp = mtp_in_use();
  std::vector<Sequence*> decoding;
  std::vector<Sequence*> filling;
  for (const std::unique_ptr<Sequence>& sequence : active_) {
    (sequence->filling() ? filling : decoding).push_back(sequence.get());
  }
  const auto add = [&](Sequence* sequence) -> SequencePlan& {
    SequencePlan& plan = round->plan.sequences.emplace_back();
    plan.slot = *sequence->slot;
    round->sequences.push_back(sequence);
    return plan;
  };

  // Prompt rows get what the verify windows leave of the rows and, beside decoding sequences, of the time budget.
  int64_t budget = options_.max_batch_rows - static_cast<int64_t>(decoding.size());
  if (!decoding.empty() && !filling.empty()) {
    const double budget_ms = static_cast<double>(options_.round_budget.count()) / 1000.0;
    int64_t fits = options_.prompt_chunk;
    while (fits > 16 && policy_.costs().estimate(static_cast<size_t>(fits) + decoding.size()) > budget_ms) fits /= 2;
    budget = std::min(budget, fits);
  }
  std::vector<std::pair<Sequence*, int64_t>> fills;
  int64_t prompt_rows = 0;
  for (size_t i = 0; i < filling.size() && budget > 0; ++i) {
    Sequence* sequence = filling[(next_fill_ + i) % filling.size()];
    const int64_t rows =
        std::min<int64_t>({budget, options_.prompt_chunk, static_cast<int64_t>(sequence->uncomputed())});
    fills.emplace_back(sequence, rows);
    prompt_rows += rows;
    budget -= rows;
  }
  ++next_fill_;

  std::vector<WidthRequest> requests;
  for (Sequence* sequence : decoding) requests.push_back(sequence->width_request(mtp));
  const std::vector<WidthChoice> choices = policy_.choose(requests, static_cast<size_t>(prompt_rows));
  for (size_t i = 0; i < decoding.size(); ++i) decoding[i]->plan_window(choices[i], mtp, &add(decoding[i]));
  for (const auto& [sequence, rows] : fills) {
    sequence->plan_prompt(static_cast<uint64_t>(rows), mtp, &add(sequence));
  }
  round->plan.release = std::exchange(to_release_, {});
  // A slot that was freed and taken again starts fresh, which clears it anyway.
}

void Engine::run_round() {
  Round round;
  build_round(&round);
  const Clock::time_point start = Clock::now();
  absl::StatusOr<PassResult> result = link_.executor().execute(round.plan);
  if (!result.ok()) {
    fail_round(result.status());
    return;
  }
  failures_ = 0;
  const double ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  uint32_t mtp_steps = 0;  // chained once for all sequences
  for (const SequencePlan& sequence : round.plan.sequences) mtp_steps = std::max(mtp_steps, sequence.mtp_steps);
  policy_.record_pass(round.plan.rows(), std::max(ms - mtp_steps * mtp_step_ms_, ms / 2));

  // Each rank reports the wanted rows in the plan's order.
  std::vector<size_t> at(result->reports.size(), 0);
  for (size_t i = 0; i < round.sequences.size(); ++i) {
    const SequencePlan& plan = round.plan.sequences[i];
    std::vector<std::vector<const RowReport*>> rows(result->reports.size());
    for (size_t rank = 0; rank < result->reports.size(); ++rank) {
      const std::vector<RowReport>& reports = result->reports[rank].rows;
      for (const RowWant& want : plan.wants) {
        if (at[rank] >= reports.size() || reports[at[rank]].slot != plan.slot || reports[at[rank]].row != want.row) {
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
    const std::lock_guard lock(mutex_);
    status_.reply_tokens += sequence.reply_tokens() - before;
    status_.drafted += sequence.drafted() - drafted;
    status_.accepted += sequence.accepted() - accepted;
    if (plan.certain > 1 || before == 0) status_.prompt_tokens += plan.certain;
    if (sequence.finished()) ++status_.finished;
  }
  const std::lock_guard lock(mutex_);
  last_step_ = Clock::now();
  ++status_.passes;
  status_.pass_rows += round.plan.rows();
  status_.pass_seconds += ms / 1000.0;
}

void Engine::ping_if_idle() {
  {
    const std::lock_guard lock(mutex_);
    if (Clock::now() - last_step_ < options_.ping_interval) return;
  }
  PassPlan plan;
  plan.kind = PlanKind::kPing;
  plan.release = std::exchange(to_release_, {});
  const absl::StatusOr<PassResult> result = link_.executor().execute(std::move(plan));
  if (!result.ok()) {
    fail_round(result.status());
    return;
  }
  const std::lock_guard lock(mutex_);
  last_step_ = Clock::now();
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
  for (const std::unique_ptr<Sequence>& sequence : active_) sequence->replay();
  to_release_.clear();  // regrouped ranks start with empty slots
}

void Engine::wait_for_ranks() {
  const absl::Status status = link_.try_regroup();
  if (status.ok()) {
    const double seconds = std::chrono::duration<double>(Clock::now() - down_since_).count();
    spdlog::info("all ranks are back after {:.1f} s; {} replies go on", seconds, active_.size());
    down_ = absl::OkStatus();
    const std::lock_guard lock(mutex_);
    status_.parked += active_.size();
    return;
  }
  if (Clock::now() - down_since_ >= options_.park_deadline) {
    finish_all(error_from_status(absl::UnavailableError(std::string(down_.message()))));
  }
}

void Engine::finish_active(const ApiError& error) {
  for (const std::unique_ptr<Sequence>& sequence : active_) {
    sequence->finish(FinishReason::kError, error);
    release(*sequence);
  }
  const std::lock_guard lock(mutex_);
  status_.failed += active_.size();
  active_.clear();
}

void Engine::finish_all(const ApiError& error) {
  finish_active(error);
  uint64_t failed = 0;
  for (const std::unique_ptr<Sequence>& sequence : queue_) {
    sequence->finish(FinishReason::kError, error);
    ++failed;
  }
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
