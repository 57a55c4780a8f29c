// What a pass is about to do, and for whom: a verify window of every decoding sequence, and as many prompt rows as the
// row limit and the round's time budget allow. Decided by rank 0 alone from measured costs; a decision can never change
// a reply's bytes. One owner (the scheduler's thread), not thread-safe.
//
// Prompt rows are shared by deficit round robin: each filling sequence in turn may take a quantum of rows, and a turn
// that time cuts short goes on in the next round. Background sequences get what the foreground's prompts leave.
//
// docs/scheduling.md tells users the same.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "coordinator/draft/draft_trials.h"
#include "coordinator/draft/prompt_costs.h"
#include "coordinator/draft/width_policy.h"
#include "coordinator/schedule/sequence.h"
#include "transport/pass/plan.h"

namespace tensorfold {

struct RoundOptions {
  int max_batch_rows = 512;                  // rows a pass
  int prompt_chunk = 256;                    // prompt rows of one sequence in a pass
  std::chrono::microseconds budget{100000};  // of a round; 0: from measured pass costs
  bool use_mtp = false;                      // the model has an MTP layer and the profile uses it
  uint32_t block_drafts = 0;                 // most drafts of the block drafter that the profile uses; 0: none
};

struct Round {
  PassPlan plan;
  std::vector<Sequence*> sequences;  // one a plan entry
  // What the costs are learned from.
  size_t windows = 0;
  size_t window_rows = 0;  // more than windows: some have drafts
  double window_ms = 0;    // expected of a pass of the windows alone
  int64_t prompt_rows = 0;
  double prompt_position = 0;  // mean of the prompt rows'
  double expected_ms = 0;      // of all of it
  double budget_ms = 0;

  /// `use_block`: the block drafter's keys are kept for it, whether its own request drafts or not: others may go on
  /// from its pages.
  SequencePlan& add(Sequence* sequence, bool use_block);
};

class RoundPlanner {
 public:
  /// `policy` outlives the planner.
  RoundPlanner(RoundOptions options, const WidthPolicy& policy) : options_(options), policy_(policy) {}

  /// A round of `active`. The plan's releases are the caller's.
  Round plan(const std::vector<std::unique_ptr<Sequence>>& active);
  /// A round's pass took `ms`. Its windows' part is the width policy's to learn when there were no prompt rows.
  void record(const Round& round, double ms);
  /// A round of windows alone kept `tokens` in `ms` from the end of the round before to its own.
  void record_windows(const Round& round, size_t tokens, double ms) {
    trials_.record(round.windows, round.window_rows > round.windows, tokens, ms, policy_.pass_ms(round.windows, 0));
  }
  /// A pass of `rows` prompt rows alone took `ms` (the warm-up's).
  void record_prompt(int64_t rows, double position, double ms) { costs_.record(rows, position, ms); }

  /// The time that a round with so many rows of verify windows should take.
  double budget_ms(size_t window_rows) const;

 private:
  struct Fill {
    Sequence* sequence = nullptr;
    int64_t rows = 0;
  };
  // What is left of a round for prompt rows.
  struct Room {
    int64_t rows = 0;
    double ms = 0;
  };
  struct Turn {
    int64_t deficit = 0;  // rows that the sequence may still take in its turn
    uint64_t served = 0;  // when its last turn ended
  };

  double row_ms(double position) const;
  void add_windows(const std::vector<Sequence*>& decoding, size_t most_rows, Round* round) const;
  void fill(const std::vector<Sequence*>& filling, Room* room, std::vector<Fill>* fills);
  int64_t grant(const Fill& part, const Room& room, bool first) const;
  void forget_ended(const std::vector<std::unique_ptr<Sequence>>& active);

  const RoundOptions options_;
  const WidthPolicy& policy_;
  PromptCosts costs_;
  DraftTrials trials_;
  std::unordered_map<const Sequence*, Turn> turns_;  // of the filling sequences
  uint64_t clock_ = 0;
  // Prompt rows of a round: at most twice as many as last kept the budget, so that a wrong estimate (of the first
  // prompt, after a quiet time) costs little.
  int64_t trusted_rows_ = 32;
};

}  // namespace tensorfold
