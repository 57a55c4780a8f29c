// The world that `bench` measures: threads of this process over the local transport, processes over UCX.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/commands/bench/report.h"
#include "transport/pass/executor.h"
#include "worker/runtime/local_cluster.h"

namespace tensorfold {

struct BenchWorldOptions {
  std::string model;
  DrafterChoice drafter;
  int world = 1;
  std::string transport = "local";
  BackendOptions backend;  // of each rank; threads 0 shares the cores
  RunnerOptions runner;
  int link_rounds = 2000;
};

/// One thread drives it.
class BenchWorld {
 public:
  /// Loads the model and connects the ranks; for more than one, measures the links first. With UCX it forks, so the
  /// caller must not have started threads.
  static absl::StatusOr<std::unique_ptr<BenchWorld>> open(const BenchWorldOptions& options);
  virtual ~BenchWorld() = default;

  virtual PassExecutor& executor() = 0;
  virtual const ModelConfig& config() const = 0;
  virtual const ModelShape& shape() const = 0;  // rank 0's
  virtual uint32_t block_drafts() const = 0;    // most of the block drafter; 0: there is none
  int threads() const { return threads_; }
  int processes() const { return processes_; }
  const std::string& backend() const { return backend_; }
  const WeightTotals& weights() const { return weights_; }
  const std::vector<LinkFigure>& links() const { return links_; }

 protected:
  int threads_ = 0;
  int processes_ = 1;
  std::string backend_;
  WeightTotals weights_;
  std::vector<LinkFigure> links_;
};

/// Threads of each rank: `threads`, or for 0 its part of the cores.
int rank_threads(int threads, int world);

/// The share of one rank.
WeightTotals weight_totals(const Model& model);

/// BenchWorld::open for UCX: in processes.cc.
absl::StatusOr<std::unique_ptr<BenchWorld>> open_process_world(const BenchWorldOptions& options);

}  // namespace tensorfold
