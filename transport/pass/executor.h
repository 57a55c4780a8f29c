// Runs passes on all ranks: what the coordinator sees of the workers.
#pragma once

#include <chrono>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/pass/plan.h"

namespace tensorfold {

/// What a pass gave: every rank's report, and the tokens that the MTP layer drafted for each sequence of the plan.
struct PassResult {
  std::vector<PassReport> reports;           // one a rank, in rank order
  std::vector<std::vector<int32_t>> drafts;  // one a sequence of the plan; empty without mtp_steps
};

/// Thread-safety: one thread (the scheduler's) calls execute().
class PassExecutor {
 public:
  virtual ~PassExecutor() = default;
  /// Fills in epoch and sequence number, sends the plan to every rank, runs rank 0's share and collects the reports.
  /// Errors: Unavailable or DeadlineExceeded when a rank is lost or late (named, with host), Internal when a rank
  /// refused the plan. After an error the world is out of step and must be regrouped.
  virtual absl::StatusOr<PassResult> execute(PassPlan plan) = 0;
};

}  // namespace tensorfold
