#include "worker/runtime/device_sum.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/numerics/slices.h"
#include "kernels/numerics/tree.h"
#include "transport/device/device_exchange.h"

namespace tensorfold {
namespace {

class DeviceSum : public WorldSum {
 public:
  DeviceSum(Ops& ops, CudaStreamOps& device) : ops_(ops), device_(device) {}

  void use(Communicator* communicator) override {
    exchange_.reset();
    communicator_ = communicator;
  }

  absl::Status begin_pass(Deadline deadline) override {
    if (communicator_ == nullptr || communicator_->world() == 1) return absl::OkStatus();
    if (exchange_ == nullptr) {
      std::vector<std::string> report;
      auto chosen = choose_exchange(*communicator_, device_.exchange(), device_.device(), &report);
      if (communicator_->rank() == 0) {
        for (const std::string& line : report) spdlog::info("exchange between GPUs: {}", line);
      }
      if (!chosen.ok()) return chosen.status();
      exchange_ = *std::move(chosen);
    }
    exchange_->set_deadline(deadline);
    return exchange_->status();
  }

  absl::Status finish_pass() override { return exchange_ == nullptr ? absl::OkStatus() : exchange_->status(); }
  std::string describe() const override { return exchange_ == nullptr ? std::string() : exchange_->name(); }

  absl::Status add(int64_t slices, int64_t first, std::span<const Tensor> partials, Tensor residual) override {
    const SliceRange mine = {first, static_cast<int64_t>(partials.size())};
    if (mine.count == slices) {
      ops_.sum_tree(partials, fold_plan(slices, mine), residual);
      return absl::OkStatus();
    }
    const int world = communicator_->world();
    const WorldNodes all = world_nodes(slices, world);
    const int64_t rows = residual.rows;
    const Tensor buffer = ops_.scratch(static_cast<int64_t>(all.nodes.size()) * rows, residual.cols);
    const size_t node_bytes = static_cast<size_t>(rows * buffer.stride) * sizeof(float);
    std::vector<Tensor> nodes;
    for (size_t i = 0; i < all.nodes.size(); ++i) nodes.push_back(buffer.row_range(static_cast<int64_t>(i) * rows, rows));

    std::vector<int> roots;
    for (const SliceRange& node : owned_nodes(slices, mine)) roots.push_back(static_cast<int>(node.first - first));
    const size_t my_first = static_cast<size_t>(all.offsets[static_cast<size_t>(communicator_->rank())]);
    device_.fold(partials, fold_plan(slices, mine), roots, std::span(nodes).subspan(my_first, roots.size()));
    std::vector<size_t> sizes;
    for (size_t rank = 0; rank < static_cast<size_t>(world); ++rank) {
      sizes.push_back(static_cast<size_t>(all.offsets[rank + 1] - all.offsets[rank]) * node_bytes);
    }
    const absl::Status sent = exchange_->all_gather(device_.stream(), nodes[my_first].data, sizes, buffer.data);
    if (!sent.ok()) return sent;
    ops_.sum_tree(nodes, finish_plan(slices, world), residual);
    return absl::OkStatus();
  }

 private:
  Ops& ops_;
  CudaStreamOps& device_;
  Communicator* communicator_ = nullptr;
  std::unique_ptr<DeviceExchange> exchange_;
};

}  // namespace

std::unique_ptr<WorldSum> make_device_sum(Ops& ops) {
  CudaStreamOps* device = cuda_stream_ops(ops);
  if (device == nullptr) return nullptr;
  return std::make_unique<DeviceSum>(ops, *device);
}

}  // namespace tensorfold
