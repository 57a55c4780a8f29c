// One choice of one request on its way: its tokens, what is computed, what its next window holds, what its reply
// becomes. Owned by the scheduler's thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "coordinator/api/generation.h"
#include "coordinator/api/stop_matcher.h"
#include "coordinator/cache/page_pool.h"
#include "coordinator/draft/drafter.h"
#include "coordinator/draft/width_policy.h"
#include "coordinator/sampling/sampler.h"
#include "coordinator/sampling/token_counts.h"
#include "coordinator/schedule/prompt_progress.h"
#include "coordinator/tokenizer/stream_decoder.h"
#include "transport/pass/executor.h"

namespace tensorfold {

struct PrefixSnapshot;

/// What all choices of one request share.
struct RequestContext {
  uint64_t id = 0;
  GenerationRequest request;
  GenerationSink sink;
  std::vector<uint32_t> end_ids;  // sorted: the model's own end tokens (unless ignored) and the request's
  uint64_t seed = 0;
  bool cancelled = false;
  std::chrono::steady_clock::time_point submitted;
  std::chrono::milliseconds progress_interval{1000};  // between progress events of one choice
};

class Sequence {
 public:
  using Clock = std::chrono::steady_clock;

  /// `tokenizer` may be null: events then carry no text. `kind` is the drafter the profile allows.
  Sequence(std::shared_ptr<RequestContext> context, uint32_t choice, DraftKind kind, const CopyOptions& copy,
           const Tokenizer* tokenizer);

  RequestContext& context() { return *context_; }
  const RequestContext& context() const { return *context_; }
  bool background() const { return !promoted_ && context_->request.priority == Priority::kBackground; }
  /// A background sequence counts as a foreground one from now on.
  void promote() { promoted_ = true; }
  uint32_t choice() const { return choice_; }

  // The scheduler's part: where the sequence lives. -------------------------------------------------------------------
  std::optional<uint32_t> slot;
  std::vector<int32_t> pages;  // all that the sequence may need; plans tell the ranks of those that their rows reach
  bool fresh = true;           // the next plan starts the slot anew
  uint64_t restore_job = 0;    // that brings its state back from disk; 0: not asked for yet
  PrefixSnapshot* held_snapshot = nullptr;  // the cache keeps it until the first plan has run

  // Rows. ---------------------------------------------------------------------------------------------------------
  /// Tokens known (prompt and kept reply) that are not computed yet.
  uint64_t uncomputed() const { return tokens_.size() - computed_; }
  /// More than the last token is uncomputed: prompt rows, also of a reply that is replayed after a rank was lost.
  bool filling() const { return uncomputed() > 1 || !started_ || fresh; }
  /// Rows of a filling sequence up to where the cache wants a snapshot of it, or the last known token.
  uint64_t rows_to_stop() const { return (stops_ ? stops_(fill_end_, computed_) : tokens_.size()) - computed_; }
  /// `stop(end, computed)`: the next such position.
  void stop_at(std::function<uint64_t(uint64_t, uint64_t)> stops) { stops_ = std::move(stops); }
  std::span<const uint32_t> tokens() const { return tokens_; }
  /// Of those computed, rows of the last window that the next plan commits.
  uint32_t tentative() const { return accepted_; }
  /// Tokens known when it started: the rest was sampled since.
  uint64_t fill_end() const { return fill_end_; }
  bool drafts_with_mtp() const { return kind_ == DraftKind::kMtp || kind_ == DraftKind::kAuto; }
  /// The next `rows` rows of a filling sequence.
  void plan_prompt(uint64_t rows, bool use_mtp, SequencePlan* plan);
  /// A verify window as `choice` says.
  void plan_window(const WidthChoice& choice, bool use_mtp, SequencePlan* plan);
  /// What the width policy needs to know.
  WidthRequest width_request(bool mtp_available);
  /// Takes a pass's results: samples the wanted rows in order, keeps drafts that equal what the row before them
  /// sampled, emits tokens. `rows[r]` are the reports of rank r that belong to this sequence, in row order. Errors are
  /// the sampler's: the reply ends with them.
  void take(const SequencePlan& plan, const std::vector<int32_t>& drafts,
            const std::vector<std::vector<const RowReport*>>& rows, WidthPolicy& policy);

  // Ending. -------------------------------------------------------------------------------------------------------
  bool finished() const { return finished_; }
  void finish(FinishReason reason, std::optional<ApiError> error = std::nullopt);
  /// State was lost with a rank, or given up to another sequence: everything is computed again from the tokens known,
  /// which gives the same bits.
  void replay() { start_at(0, 0, kNoSnapshot); }
  /// The next plan starts the slot anew, with `position` tokens that are there already, `accepted` of them kept rows of
  /// `snapshot`.
  void start_at(uint64_t position, uint32_t accepted, uint32_t snapshot);

  /// By the time of its request, then by its choice.
  bool came_before(const Sequence& other) const {
    return context_->id != other.context_->id ? context_->id < other.context_->id : choice_ < other.choice_;
  }

  uint64_t length() const { return tokens_.size(); }
  uint64_t computed() const { return computed_; }
  uint64_t reply_tokens() const { return tokens_.size() - context_->request.prompt.size(); }
  uint64_t drafted() const { return stats_.drafted; }
  uint64_t accepted() const { return stats_.accepted; }

 private:
  struct RowSample {
    uint32_t id = 0;
    std::optional<RowLogprobs> logprobs;
  };
  absl::StatusOr<RowSample> sample(const std::vector<const RowReport*>& ranks, uint64_t position);
  /// Appends a reply token; returns false when it ended the reply.
  bool keep(RowSample sample, TokenEvent& event);
  bool ends_reply(uint32_t id) const;
  void want(SequencePlan* plan, uint32_t row) const;
  /// A prompt pass that gives no token: says how far it has come, to the log and to a client that asked.
  void read_on();
  void begin_plan(bool use_mtp, SequencePlan* plan) const;
  void add_pages(SequencePlan* plan);

  std::shared_ptr<RequestContext> context_;
  const uint32_t choice_;
  const DraftKind kind_;
  SamplingParams sampling_;
  std::vector<uint32_t> tokens_;     // prompt and kept reply
  uint64_t computed_ = 0;            // rows committed or planned as certain
  uint32_t accepted_ = 0;            // tentative rows of the last window that were kept
  bool started_ = false;             // the reply has begun
  bool in_window_ = false;           // the pass in flight holds a verify window, not prompt rows
  size_t pages_told_ = 0;            // of `pages`, which the ranks know
  uint32_t snapshot_ = kNoSnapshot;  // a fresh slot starts from it
  uint64_t fill_end_ = 0;
  std::function<uint64_t(uint64_t, uint64_t)> stops_;
  TokenCounts counts_;
  std::unique_ptr<Drafter> drafter_;
  Draft proposal_;      // the copy drafter's guess for the next window
  WidthChoice window_;  // of the pass in flight
  uint32_t window_match_ = 0;
  uint32_t idle_rounds_ = 0;
  Acceptance acceptance_;
  std::unique_ptr<StreamDecoder> decoder_;
  StopMatcher stop_;
  GenerationStats stats_;
  PromptProgress progress_;      // for the client
  PromptProgress log_progress_;  // for the log
  bool promoted_ = false;
  bool finished_ = false;
  Clock::time_point first_token_;
};

}  // namespace tensorfold
