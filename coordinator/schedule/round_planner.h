// What a pass is about to do, and for whom: a verify window of every decoding sequence, and as many prompt rows of the
// filling ones as the row limit and the round's time budget allow. Decided by rank 0 alone from measured costs; a
// decision can never change a reply's bytes. One owner (the scheduler's thread), not thread-safe.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "coordinator/draft/width_policy.h"
#include "coordinator/schedule/sequence.h"
#include "transport/pass/plan.h"

namespace tensorfold {

struct RoundOptions {
  int max_batch_rows = 512;                  // rows a pass
  int prompt_chunk = 256;                    // prompt rows of one sequence in a pass
  std::chrono::microseconds budget{100000};  // prompt rows that fit beside decoding sequences
  bool use_mtp = false;                      // the model has an MTP layer and the profile uses it
};

struct Round {
  PassPlan plan;
  std::vector<Sequence*> sequences;  // one a plan entry
};

class RoundPlanner {
 public:
  explicit RoundPlanner(RoundOptions options) : options_(options) {}

  /// A round of all of `active` that there is room for. The plan's releases are the caller's.
  Round plan(const std::vector<std::unique_ptr<Sequence>>& active, const WidthPolicy& policy);

 private:
  RoundOptions options_;
  size_t next_fill_ = 0;  // whose prompt goes first, in turn
};

}  // namespace tensorfold
