// A whole world inside one process: every rank a thread, over the local or the UCX transport. What `generate`,
// `logits`, `verify` and `bench` run on, with the very code that serves between processes.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/ucx/ucx_endpoint.h"
#include "worker/runtime/backend.h"
#include "worker/runtime/rank_loop.h"
#include "worker/runtime/shards.h"

namespace tensorfold {

struct LocalClusterOptions {
  std::string transport = "local";  // local | ucx
  UcxOptions ucx;
  BackendOptions backend;  // of each rank; threads 0 shares the cores between the ranks
  RunnerOptions runner;
  /// States on disk: the folder of all ranks, and whose they are (rank and world are filled in); empty: none.
  std::string state_directory;
  StateOwner state_owner;
  int64_t state_quota = int64_t{1} << 40;
  /// Wraps each rank's Ops; the negative control uses it. Null: none.
  std::function<std::unique_ptr<Ops>(std::unique_ptr<Ops>)> decorate;
};

/// Thread-safety: one thread drives it. The destructor stops the ranks; it waits at most for a running pass.
class LocalCluster {
 public:
  /// `shards` holds the weights of all ranks (and thereby the world) and outlives the cluster; several clusters with
  /// different instruction sets, threads or transports may share it, one after the other or at the same time.
  static absl::StatusOr<std::unique_ptr<LocalCluster>> start(ModelShards& shards, const LocalClusterOptions& options);
  ~LocalCluster();

  PassExecutor& executor() { return *executor_; }
  Ops& ops(int rank) { return *ranks_[static_cast<size_t>(rank)].ops; }
  PassRunner& runner(int rank) { return *ranks_[static_cast<size_t>(rank)].runner; }
  int world() const { return static_cast<int>(ranks_.size()); }
  /// Makes every rank forget all sequences (between cells of a test).
  absl::Status forget();

 private:
  struct Rank {
    std::unique_ptr<Ops> ops;
    std::unique_ptr<StateStore> states;
    std::unique_ptr<PassRunner> runner;
    std::unique_ptr<Communicator> communicator;
    std::thread thread;  // ranks 1 and up
  };
  LocalCluster() = default;

  std::vector<Rank> ranks_;
  std::unique_ptr<WorldExecutor> executor_;
  int64_t slots_ = 0;
};

/// Connects `world` UCX endpoints of this process, one a thread.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> connect_ucx_threads(int world, const UcxOptions& options);

}  // namespace tensorfold
