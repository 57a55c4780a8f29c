// WorldSum over a Communicator, for tensors in host memory: aligned subtrees are added here, their nodes travel, every
// rank finishes the tree.
#pragma once

#include <functional>
#include <vector>

#include "transport/base/communicator.h"
#include "worker/runtime/world_sum.h"

namespace tensorfold {

/// Thread-safety: used by the pass runner's thread.
class ExchangeSum : public WorldSum {
 public:
  /// Messages of at least `long_bytes` a node are exchanged by rows when the world has more than two ranks: each rank
  /// finishes the tree for its share of the rows, then the finished rows are gathered. The bits are the same.
  explicit ExchangeSum(Ops& ops, int64_t long_bytes = 128 * 1024) : ops_(ops), long_bytes_(long_bytes) {}

  void use(Communicator* communicator) override { communicator_ = communicator; }
  absl::Status begin_pass(Deadline deadline) override {
    deadline_ = deadline;
    return absl::OkStatus();
  }

  absl::Status add(int64_t slices, int64_t first, std::span<const Tensor> partials, Tensor residual) override;

 private:
  // Nodes are [rows, cols] each; the results are the finished sum, [rows, cols].
  absl::StatusOr<Tensor> exchange_at_once(int64_t slices, std::span<const Tensor> nodes);
  absl::StatusOr<Tensor> exchange_by_rows(int64_t slices, std::span<const Tensor> nodes);
  // Finishes the tree over all ranks' nodes, stacked in rank order in `all`; the sum is the first node's place.
  Tensor finish(int64_t slices, Tensor all, int64_t node_rows);

  Ops& ops_;
  const int64_t long_bytes_;
  Communicator* communicator_ = nullptr;
  Deadline deadline_ = Deadline::after(std::chrono::seconds(60));
};

}  // namespace tensorfold
