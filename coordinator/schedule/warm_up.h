// Passes of the widths that verify windows have, run before the first request: everything is loaded by then, and the
// width policy knows what passes cost.
#pragma once

#include "absl/status/statusor.h"
#include "coordinator/draft/width_policy.h"
#include "transport/pass/executor.h"

namespace tensorfold {

struct WarmUpOptions {
  uint32_t widest = 8;   // rows of the widest window
  bool use_mtp = false;  // time a chained MTP step, too
};

/// Records the measured costs in `policy` and returns the milliseconds of a chained MTP step (0 without). Takes a few
/// seconds at most, uses slot 0 and page 0 and leaves them free. Errors are the pass's.
absl::StatusOr<double> warm_up(PassExecutor& executor, const WarmUpOptions& options, WidthPolicy& policy);

}  // namespace tensorfold
