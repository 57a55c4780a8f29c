#include "coordinator/schedule/sequence.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "coordinator/sampling/identity.h"
#include "coordinator/sampling/logprobs.h"
#include "kernels/numerics/gumbel.h"

namespace tensorfold {
namespace {

constexpr std::chrono::seconds kLogInterval{5};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A wanted row of all ranks as one row of logits; ranks hold ascending parts of the vocabulary.
std::vector<float> whole_row(const std::vector<const RowReport*>& ranks) {
  std::vector<float> logits;
  for (const RowReport* part : ranks) logits.insert(logits.end(), part->logits.begin(), part->logits.end());
  return logits;
}

}  // namespace

Sequence::Sequence(std::shared_ptr<RequestContext> context, uint32_t choice, DraftKind kind, const CopyOptions& copy,
                   const Tokenizer* tokenizer)
    : context_(std::move(context)),
      choice_(choice),
      kind_(context_->request.draft ? kind : DraftKind::kNone),
      sampling_(context_->request.sampling),
      tokens_(context_->request.prompt),
      counts_(context_->request.prompt),
      drafter_(make_drafter(kind_, copy)),
      stop_(context_->request.stop),
      progress_(context_->progress_interval),
      log_progress_(kLogInterval) {
  sampling_.seed = choice_seed(context_->seed, choice);
  if (tokenizer != nullptr) decoder_ = std::make_unique<StreamDecoder>(*tokenizer, /*skip_special=*/true);
  stats_.prompt_tokens = static_cast<uint32_t>(tokens_.size());
}

void Sequence::want(SequencePlan* plan, uint32_t row) const {
  const RowNeeds needs = row_needs(sampling_, context_->request.logprobs.has_value());
  RowWant& wanted = plan->wants.emplace_back();
  wanted.row = row;
  wanted.top_n = needs.full_row ? kFullRow : needs.draw ? kDrawn : needs.top_n;
  if (!needs.draw) return;
  wanted.key = row_key(sampling_.seed, plan->first_position + row + 1);  // the row's token stands behind it
  wanted.temperature = sampling_.temperature;
}

void Sequence::begin_plan(bool use_mtp, SequencePlan* plan) const {
  plan->use_mtp = use_mtp && drafts_with_mtp();
  plan->first_position = computed_;
  plan->accepted = accepted_;
}

// The pages that the plan's rows reach and the ranks do not know yet: a plan stays small, however long the prompt.
void Sequence::add_pages(SequencePlan* plan) {
  const uint64_t end = plan->first_position + plan->tokens.size() + plan->drafted();
  const size_t needed = std::min<size_t>(pages.size(), static_cast<size_t>((end + kPageSize - 1) / kPageSize));
  for (; pages_told_ < needed; ++pages_told_) plan->new_pages.push_back(pages[pages_told_]);
}

void Sequence::plan_prompt(uint64_t rows, bool use_mtp, SequencePlan* plan) {
  begin_plan(use_mtp, plan);
  plan->fresh = fresh;
  if (fresh) plan->snapshot = snapshot_;
  for (uint64_t i = 0; i < rows; ++i) plan->tokens.push_back(static_cast<int32_t>(tokens_[computed_ + i]));
  plan->certain = static_cast<uint32_t>(rows);
  add_pages(plan);
  // The last known token's row gives the next token.
  if (computed_ + rows == tokens_.size()) want(plan, static_cast<uint32_t>(rows) - 1);
  window_ = {};
  in_window_ = false;
  // Indexed piece by piece: all at the first window would hold up everybody's round after a long prompt.
  drafter_->observe(std::span(tokens_).first(computed_ + rows));
}

WidthRequest Sequence::width_request(bool mtp_available) {
  const GenerationRequest& request = context_->request;
  WidthRequest out;
  out.kind = kind_;
  out.mtp_available = mtp_available;
  const uint64_t left = request.max_tokens - reply_tokens();
  out.room = static_cast<uint32_t>(left > 0 ? left - 1 : 0);
  out.idle_rounds = idle_rounds_;
  out.acceptance = &acceptance_;
  proposal_ = {};
  if (kind_ == DraftKind::kCopy || kind_ == DraftKind::kAuto) {
    proposal_ = drafter_->propose(tokens_, std::min<size_t>(kMaxWindow - 1, out.room));
    out.copy_match = proposal_.match;
    out.copy_ids = static_cast<uint32_t>(proposal_.ids.size());
  }
  return out;
}

void Sequence::plan_window(const WidthChoice& choice, bool use_mtp, SequencePlan* plan) {
  begin_plan(use_mtp, plan);
  plan->tokens.push_back(static_cast<int32_t>(tokens_.back()));
  plan->certain = 1;
  window_ = choice;
  in_window_ = true;
  window_match_ = proposal_.match;
  if (choice.kind == DraftKind::kMtp) {
    plan->mtp_steps = choice.drafts;
  } else if (choice.kind == DraftKind::kBlock) {
    plan->block_drafts = choice.drafts;
  } else if (choice.kind == DraftKind::kCopy) {
    const size_t count = std::min<size_t>(choice.drafts, proposal_.ids.size());
    window_.drafts = static_cast<uint32_t>(count);
    for (size_t i = 0; i < count; ++i) plan->tokens.push_back(static_cast<int32_t>(proposal_.ids[i]));
  }
  add_pages(plan);
  for (uint32_t row = 0; row <= window_.drafts; ++row) want(plan, row);
}

absl::StatusOr<Sequence::RowSample> Sequence::sample(const std::vector<const RowReport*>& ranks, uint64_t position) {
  RowSample out;
  if (!ranks[0]->logits.empty()) {
    const std::vector<float> logits = whole_row(ranks);
    const absl::StatusOr<Sampled> sampled = sample_row(sampling_, logits, position, counts_);
    if (!sampled.ok()) return sampled.status();
    out.id = sampled->id;
    if (context_->request.logprobs.has_value()) {
      absl::StatusOr<RowLogprobs> logprobs = compute_logprobs(logits, out.id, *context_->request.logprobs, position);
      if (!logprobs.ok()) return logprobs.status();
      out.logprobs = *std::move(logprobs);
    }
    return out;
  }
  if (row_needs(sampling_, false).draw) {
    std::vector<SampleCandidate> drawn;
    for (const RowReport* part : ranks) {
      for (const WireCandidate& token : part->candidates) {
        drawn.push_back({.logit = token.logit, .id = static_cast<uint32_t>(token.id)});
      }
    }
    const absl::StatusOr<Sampled> sampled = sample_drawn(sampling_, drawn, position);
    if (!sampled.ok()) return sampled.status();
    out.id = sampled->id;
    return out;
  }
  std::vector<std::vector<SampleCandidate>> lists;
  for (const RowReport* part : ranks) {
    std::vector<SampleCandidate>& list = lists.emplace_back();
    for (const WireCandidate& candidate : part->candidates) {
      list.push_back({.logit = candidate.logit, .id = static_cast<uint32_t>(candidate.id)});
    }
  }
  std::vector<CandidateList> views;
  for (const std::vector<SampleCandidate>& list : lists) {
    // Fewer than asked for: the rank has no more.
    const bool all = list.size() < row_needs(sampling_, false).top_n;
    views.push_back({.candidates = list, .slice_rows = all ? static_cast<uint32_t>(list.size()) : kMaxVocabulary});
  }
  const absl::StatusOr<CandidateSample> sampled = sample_candidates(sampling_, views, position);
  if (!sampled.ok()) return sampled.status();
  if (sampled->needs_full_row) {
    return absl::InternalError("the candidates of a row do not decide its token, which row_needs() rules out");
  }
  out.id = sampled->sampled.id;
  return out;
}

bool Sequence::ends_reply(uint32_t id) const {
  return std::binary_search(context_->end_ids.begin(), context_->end_ids.end(), id);
}

bool Sequence::keep(RowSample sample, TokenEvent& event) {
  const GenerationRequest& request = context_->request;
  tokens_.push_back(sample.id);
  counts_.push(sample.id);
  const bool may_end = reply_tokens() > request.min_tokens;
  const bool ends = may_end && ends_reply(sample.id);
  if (decoder_ != nullptr && !ends) {
    const std::string text = decoder_->push(static_cast<int32_t>(sample.id));
    event.text += may_end ? stop_.feed(text) : text;
  }
  event.tokens.push_back({sample.id, std::move(sample.logprobs)});
  if (ends || stop_.stopped()) {
    stats_.completion_tokens = static_cast<uint32_t>(reply_tokens());
    return false;
  }
  return reply_tokens() < request.max_tokens;
}

void Sequence::take(const SequencePlan& plan, const std::vector<int32_t>& drafts,
                    const std::vector<std::vector<const RowReport*>>& rows, WidthPolicy& policy) {
  fresh = false;
  computed_ = plan.first_position + plan.certain;
  accepted_ = 0;
  if (plan.wants.empty()) return read_on();
  std::vector<int32_t> window(plan.tokens.begin() + plan.certain, plan.tokens.end());
  window.insert(window.end(), drafts.begin(), drafts.end());
  const bool decoding = started_ && in_window_;
  TokenEvent event;
  event.choice = choice_;
  bool goes_on = true;
  absl::Status failure;
  for (size_t i = 0; i < plan.wants.size() && goes_on; ++i) {
    std::vector<const RowReport*> ranks;
    ranks.reserve(rows.size());
    for (const std::vector<const RowReport*>& rank : rows) ranks.push_back(rank[i]);
    absl::StatusOr<RowSample> sampled = sample(ranks, tokens_.size());
    if (!sampled.ok()) {
      failure = sampled.status();
      break;
    }
    const bool hit = i < window.size() && static_cast<uint32_t>(window[i]) == sampled->id;
    goes_on = keep(*std::move(sampled), event);
    if (!hit) break;
    ++accepted_;
  }
  if (!started_) {
    started_ = true;
    first_token_ = Clock::now();
    stats_.prefill_s = std::chrono::duration<double>(first_token_ - context_->submitted).count();
  } else if (decoding) {
    stats_.rounds += 1;
    stats_.drafted += window.size();
    stats_.accepted += accepted_;
    const uint32_t width = static_cast<uint32_t>(window.size()) + 1;
    stats_.min_rows = stats_.min_rows == 0 ? width : std::min(stats_.min_rows, width);
    policy.record_window(window_, window_match_, accepted_, &acceptance_);
    idle_rounds_ = window.empty() ? idle_rounds_ + 1 : 0;
  }
  // Accepted rows are committed by the next plan's first row.
  computed_ = plan.first_position + plan.certain + accepted_;
  if (!event.tokens.empty()) context_->sink(std::move(event));
  if (!failure.ok()) {
    finish(FinishReason::kError, model_output_broken_error(std::string(failure.message())));
  } else if (!goes_on) {
    const bool stopped =
        stop_.stopped() || (reply_tokens() > context_->request.min_tokens && ends_reply(tokens_.back()));
    finish(stopped ? FinishReason::kStop : FinishReason::kLength);
  }
}

void Sequence::read_on() {
  const Clock::time_point now = Clock::now();
  const GenerationRequest& request = context_->request;
  if (const auto event = log_progress_.after_pass(now, computed_, tokens_.size())) {
    spdlog::info("{}: read {} of {} prompt tokens, {:.0f} a second, {:.0f} s left", request.id, event->read,
                 event->total, event->tokens_per_s, event->seconds_left);
  }
  if (!request.progress || started_) return;  // a reply that has begun is not read by its client
  if (auto event = progress_.after_pass(now, computed_, tokens_.size())) {
    event->choice = choice_;
    context_->sink(*event);
  }
}

void Sequence::finish(FinishReason reason, std::optional<ApiError> error) {
  if (finished_) return;
  finished_ = true;
  const std::span<const uint32_t> reply = std::span(tokens_).subspan(context_->request.prompt.size());
  FinishEvent event;
  event.choice = choice_;
  event.reason = reason;
  event.error = std::move(error);
  if (decoder_ != nullptr && !stop_.stopped()) event.text = stop_.feed(decoder_->flush()) + stop_.finish();
  stats_.completion_tokens = static_cast<uint32_t>(reply.size());
  stats_.token_sha = token_sha(reply);
  stats_.min_rows = std::max(stats_.min_rows, 1u);
  if (started_) stats_.decode_s = seconds_since(first_token_);
  if (context_->request.return_token_ids) stats_.token_ids.assign(reply.begin(), reply.end());
  event.stats = stats_;
  context_->sink(std::move(event));
}

void Sequence::start_at(uint64_t position, uint32_t accepted, uint32_t snapshot) {
  computed_ = position;
  accepted_ = accepted;
  snapshot_ = snapshot;
  fill_end_ = tokens_.size();
  fresh = true;
  window_ = {};
  if (!started_) {
    stats_.cached_tokens = static_cast<uint32_t>(std::min<uint64_t>(position, context_->request.prompt.size()));
  }
  in_window_ = false;
  pages_told_ = 0;
  restore_job = 0;
}

}  // namespace tensorfold
