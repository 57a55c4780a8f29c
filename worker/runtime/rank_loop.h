// The two ends of a pass over a world: rank 0 sends plans and collects reports, every other rank waits for plans.
#pragma once

#include <atomic>
#include <functional>

#include "transport/base/communicator.h"
#include "transport/pass/executor.h"
#include "worker/runtime/pass_runner.h"

namespace tensorfold {

/// Rank 0's end. Thread-safety: one thread.
class WorldExecutor : public PassExecutor {
 public:
  /// `communicator` is null for a world of one; all outlive the executor. `long_rows_timeout` as in RunnerOptions.
  WorldExecutor(PassRunner& runner, Communicator* communicator) : runner_(runner), communicator_(communicator) {}

  /// After an error of a plan that was sent, every further call repeats it at once.
  absl::StatusOr<PassResult> execute(PassPlan plan) override;
  /// Tells the other ranks' loops to end. Errors as execute().
  absl::Status stop();

 private:
  // Rank 0's share of a plan that was sent, and everybody's reports.
  absl::Status run_pass(const PassPlan& plan, Deadline deadline, PassResult* result);

  PassRunner& runner_;
  Communicator* const communicator_;
  uint64_t sequence_ = 0;
  absl::Status failure_;  // of the plan that left the world out of step
};

struct RankLoopHooks {
  /// Asked about once a second while idle; true ends the loop.
  std::function<bool()> should_stop = [] { return false; };
  /// After each pass, its sequence number.
  std::function<void(uint64_t)> on_step = [](uint64_t) {};
};

/// Serves plans until rank 0 says stop (OK), a hook says stop (OK), or the world breaks: the error names what and whom.
/// A plan that is damaged, repeated, lost or of another epoch ends the loop with both values named.
absl::Status run_rank(PassRunner& runner, Communicator& communicator, const RankLoopHooks& hooks = {});

}  // namespace tensorfold
