// Passes of the widths that verify windows have, run before the first request: everything is loaded by then, and the
// width policy knows what passes cost.
#pragma once

#include "absl/status/statusor.h"
#include "coordinator/draft/width_policy.h"
#include "transport/pass/executor.h"

namespace tensorfold {

struct WarmUpOptions {
  uint32_t widest = 8;        // rows of the widest window
  bool use_mtp = false;       // time a chained MTP step, too
  uint32_t block_drafts = 0;  // time the block drafter, too: most drafts of a block; 0: there is none
  int most_rows = 512;        // of a pass
};

struct WarmUpResult {
  double mtp_step_ms = 0;  // a chained MTP step; 0 without
  double block_ms = 0;     // the block drafter's blocks; 0 without
  // A pass of prompt rows alone.
  int64_t prompt_rows = 0;
  double prompt_ms = 0;
};

/// Records the windows' costs in `policy` and returns the others. Takes a few seconds at most, uses slot 0 and page 0
/// and leaves them free. Errors are the pass's.
absl::StatusOr<WarmUpResult> warm_up(PassExecutor& executor, const WarmUpOptions& options, WidthPolicy& policy);

}  // namespace tensorfold
