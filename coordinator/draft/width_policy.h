// How many drafts each sequence's verify window carries, and from which source: whatever is expected to keep the most
// tokens a millisecond. Decided by rank 0 alone from measured costs and acceptance; a decision can never change a
// reply's bytes.
//
// With drafts kept at rates a1, a2, ... a window of d drafts is expected to keep 1 + a1 + a1 a2 + ... tokens. The pass
// costs PassCosts.estimate(all windows' rows), plus a chained MTP step for each depth that any sequence drafts with it,
// plus one step of the block drafter if any sequence drafts with that, however many tokens.
// Each further draft adds less than the one before, so for a given number of rows the best set is the best next draft,
// one after the other; the policy walks all numbers of rows and keeps the best ratio. No clocks, no randomness; one
// owner, not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "coordinator/draft/acceptance.h"
#include "coordinator/draft/drafter.h"
#include "coordinator/draft/pass_costs.h"

namespace tensorfold {

struct WidthOptions {
  uint32_t max_width = 8;  // rows of a verify window, 1..16: at most max_width - 1 drafts
  // A sequence that has drafted nothing for so many rounds drafts one token, or a bad start would never be measured
  // again.
  uint32_t probe_interval = 32;
  bool adaptive = true;  // false: always max_width - 1 drafts, where the source has as many
};

// One decoding sequence's part in a round.
struct WidthRequest {
  DraftKind kind = DraftKind::kNone;  // the request's drafter; kNone for "draft": false
  bool mtp_available = false;         // the model has an MTP layer and its state for this sequence is current
  uint32_t block_drafts = 0;          // most that the block drafter gives at once; 0: there is none
  uint32_t copy_match = 0;            // Draft::match of the copy drafter; 0 = it found nothing
  uint32_t copy_ids = 0;              // how many ids it guesses
  uint32_t room = 0;         // drafts the sequence can still use: tokens to max_tokens or the context's end, less one
  uint32_t idle_rounds = 0;  // rounds since the sequence last drafted
  const Acceptance* acceptance = nullptr;  // its own; null: the global one alone
};

struct WidthChoice {
  DraftKind kind = DraftKind::kNone;  // kNone, kMtp, kCopy or kBlock; never kAuto
  uint32_t drafts = 0;                // 0 exactly when kind is kNone
};

class WidthPolicy {
 public:
  explicit WidthPolicy(WidthOptions options = {});

  // One choice a request, in order. `most_rows`: of all windows together; each sequence has its one row whatever it
  // says.
  //
  // More streams never keep fewer tokens a millisecond than one, if rows together cost no more than apart: all windows
  // of one stream's best width are among the sets that are weighed, and the best set is taken.
  std::vector<WidthChoice> choose(std::span<const WidthRequest> requests, size_t most_rows = SIZE_MAX) const;

  // Measurements. `acceptance` is the sequence's own (may be null); the global prior is kept here.
  void record_pass(size_t rows, double ms) { costs_.record(rows, ms); }
  void record_mtp_step(double ms);  // one chained step for all sequences of a round
  void record_block(double ms);     // the blocks of all sequences of a round
  void record_window(const WidthChoice& choice, uint32_t copy_match, size_t accepted, Acceptance* acceptance);

  // Milliseconds of a pass of verify windows alone, with the MTP layer chained `mtp_depth` times, and with blocks.
  double pass_ms(size_t rows, size_t mtp_depth, bool blocks = false) const;

  const PassCosts& costs() const { return costs_; }
  const Acceptance& global() const { return global_; }
  const WidthOptions& options() const { return options_; }

 private:
  struct Plan;  // a request's source with the expected tokens of each depth

  Plan plan_of(const WidthRequest& request, size_t base_rows) const;
  Plan plan_for(const WidthRequest& request, DraftKind kind, DraftSource source, size_t available) const;
  double best_value(const Plan& plan, size_t base_rows) const;
  std::vector<uint32_t> best_depths(const std::vector<Plan>& plans, size_t most_rows) const;

  WidthOptions options_;
  PassCosts costs_;
  Acceptance global_;
  double mtp_step_ms_ = 0.0;  // 0 until measured
  double block_ms_ = 0.0;     // 0 until measured
};

}  // namespace tensorfold
