// Ranks with made-up weights, each a thread of this process with a backend of its own, whose sequences can begin at any
// context without computing it.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/commands/bench/report.h"
#include "transport/pass/executor.h"
#include "worker/checkpoint/tensor_source.h"
#include "worker/model/model.h"
#include "worker/runtime/backend.h"
#include "worker/runtime/rank_loop.h"

namespace tensorfold {

struct ShapeWorldOptions {
  int world = 1;
  BackendOptions backend;
  int link_rounds = 2000;
};

/// Thread-safety: one thread drives it.
class ShapeWorld {
 public:
  /// Measures the links of a wider world, then packs every rank's share. `source` may go away afterwards. Errors name
  /// tensor or option.
  static absl::StatusOr<std::unique_ptr<ShapeWorld>> load(const TensorSource& source, const ShapeWorldOptions& options);
  ~ShapeWorld();

  /// Makes caches of `pages` KV pages and starts the ranks; once.
  absl::Status start(int64_t pages);

  PassExecutor& executor() { return *executor_; }
  /// Between passes: slot 0 of every rank stands at `tokens`, its keys, values and states whatever they are.
  absl::Status assume_context(int64_t tokens);

  const ModelShape& shape(int rank) const { return ranks_[static_cast<size_t>(rank)].model->shape(); }
  const std::string& backend() const { return backend_; }
  const WeightTotals& weights() const { return weights_; }
  const std::vector<LinkFigure>& links() const { return links_; }
  /// Of all ranks: the caches, and the recurrent states in use.
  int64_t kv_bytes() const;
  int64_t state_bytes() const;

 private:
  struct Rank {
    std::unique_ptr<Ops> ops;
    std::unique_ptr<Model> model;
    std::unique_ptr<Communicator> communicator;
    std::unique_ptr<PassRunner> runner;
    std::thread thread;  // ranks 1 and up
  };
  ShapeWorld() = default;
  absl::Status connect(const ShapeWorldOptions& options);

  std::vector<Rank> ranks_;
  std::unique_ptr<WorldExecutor> executor_;
  std::string backend_;
  WeightTotals weights_;
  std::vector<LinkFigure> links_;
};

}  // namespace tensorfold
