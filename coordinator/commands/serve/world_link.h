// Rank 0's world: forms it, runs passes on it, and forms it again after a rank was lost.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "coordinator/cluster/membership.h"
#include "coordinator/commands/serve/rank_setup.h"
#include "coordinator/schedule/engine.h"
#include "coordinator/service/model_service.h"
#include "worker/runtime/rank_loop.h"

namespace tensorfold {

/// Thread-safety: form(), executor() and try_regroup() are the scheduler's thread's (form() before it starts); the rest
/// may be called from any thread.
class WorldLink : public ClusterLink {
 public:
  /// Listens for the other ranks. `setup` outlives the link.
  static absl::StatusOr<std::unique_ptr<WorldLink>> start(RankSetup& setup);
  ~WorldLink() override;

  /// Waits for all ranks, connects, loads, and lets all begin. Stops early when `stop` is set.
  absl::Status form(const std::atomic<bool>& stop);

  PassExecutor& executor() override { return recording_; }
  absl::Status health() override;
  absl::Status try_regroup() override;

  /// Whether every rank is there, with each one's state; never waits.
  Readiness readiness() const;
  /// Tells the ranks to stop.
  void shutdown(const std::string& reason);

 private:
  // Tells the membership about each completed pass.
  class RecordingExecutor : public PassExecutor {
   public:
    explicit RecordingExecutor(WorldLink& link) : link_(link) {}
    absl::StatusOr<PassResult> execute(PassPlan plan) override;

   private:
    WorldLink& link_;
  };
  enum class Stage : uint8_t { kRenew, kWaitAll, kWaitReady, kUp };

  explicit WorldLink(RankSetup& setup) : setup_(setup), recording_(*this) {}
  absl::Status renew();
  absl::Status gather_ranks(Deadline deadline);
  absl::Status advance(Deadline deadline);
  void epoch_over(const std::string& cause);

  RankSetup& setup_;
  RecordingExecutor recording_;
  std::unique_ptr<Membership> membership_;
  std::unique_ptr<UcxEndpoint> endpoint_;
  std::unique_ptr<WorldExecutor> executor_;
  std::atomic<Stage> stage_{Stage::kRenew};
  Deadline::Clock::time_point not_before_;  // of the next attempt at an epoch
  mutable std::mutex mutex_;                // guards the two below against the control plane's callbacks
  std::unique_ptr<Communicator> communicator_;
  absl::Status broken_;  // why the current epoch is over
};

}  // namespace tensorfold
