#include "worker/runtime/device_sum.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/peer_exchange.h"
#include "kernels/numerics/check.h"
#include "kernels/numerics/slices.h"
#include "kernels/numerics/tree.h"
#include "transport/device/choose_exchange.h"
#include "transport/device/cuda_support.h"
#include "transport/device/device_exchange.h"

namespace tensorfold {
namespace {

class DeviceSum : public WorldSum {
 public:
  DeviceSum(Ops& ops, CudaStreamOps& device) : ops_(ops), device_(device) {}
  ~DeviceSum() override { ops_.forget_runs(); }

  void use(Communicator* communicator) override {
    ops_.forget_runs();  // they hold operations of the exchange
    exchange_.reset();
    room_ = size_t{1} << 20;
    communicator_ = communicator;
    decided_ = false;
  }

  absl::Status begin_pass(Deadline deadline) override {
    if (communicator_ == nullptr || communicator_->world() == 1) return absl::OkStatus();
    if (absl::Status status = decide_staged(deadline); !status.ok()) return status;
    if (staged_) {
      deadline_ = deadline;
      return absl::OkStatus();
    }
    if (exchange_ == nullptr) {
      std::vector<std::string> report;
      auto chosen = choose_exchange(*communicator_, device_.exchange(), device_.device(), &report);
      if (communicator_->rank() == 0) {
        for (const std::string& line : report) spdlog::info("exchange between GPUs: {}", line);
      }
      if (!chosen.ok()) return chosen.status();
      exchange_ = *std::move(chosen);
    }
    // status() ends what a pass before began, so it comes first.
    if (absl::Status status = exchange_->status(); !status.ok()) return status;
    exchange_->set_deadline(deadline);
    deadline_ = deadline;
    return absl::OkStatus();
  }

  absl::Status finish_pass() override {
    if (staged_) return std::exchange(staged_failure_, absl::OkStatus());
    return exchange_ == nullptr ? absl::OkStatus() : exchange_->status();
  }
  std::string describe() const override {
    return staged_ ? "staged" : exchange_ == nullptr ? std::string() : exchange_->name();
  }

  absl::Status add(int64_t slices, int64_t first, std::span<const Tensor> partials, Tensor residual) override {
    const SliceRange mine = {first, static_cast<int64_t>(partials.size())};
    if (mine.count == slices) {
      ops_.sum_tree(partials, fold_plan(slices, mine), residual);
      return absl::OkStatus();
    }
    const int world = communicator_->world();
    if (!staged_ && add_fused(slices, first, partials, residual)) return absl::OkStatus();
    const WorldNodes all = world_nodes(slices, world);
    const int64_t rows = residual.rows;
    const Tensor buffer = ops_.scratch(static_cast<int64_t>(all.nodes.size()) * rows, residual.cols);
    const size_t node_bytes = static_cast<size_t>(rows * buffer.stride) * sizeof(float);
    std::vector<Tensor> nodes;
    for (size_t i = 0; i < all.nodes.size(); ++i)
      nodes.push_back(buffer.row_range(static_cast<int64_t>(i) * rows, rows));

    std::vector<int> roots;
    for (const SliceRange& node : owned_nodes(slices, mine)) roots.push_back(static_cast<int>(node.first - first));
    const size_t my_first = static_cast<size_t>(all.offsets[static_cast<size_t>(communicator_->rank())]);
    device_.fold(partials, fold_plan(slices, mine), roots, std::span(nodes).subspan(my_first, roots.size()));
    std::vector<size_t> sizes;
    for (size_t rank = 0; rank < static_cast<size_t>(world); ++rank) {
      sizes.push_back(static_cast<size_t>(all.offsets[rank + 1] - all.offsets[rank]) * node_bytes);
    }
    if (staged_) {
      stage(nodes[my_first].data, std::move(sizes), buffer.data);
      ops_.sum_tree(nodes, finish_plan(slices, world), residual);
      return absl::OkStatus();
    }
    if (absl::Status status = make_room(*std::max_element(sizes.begin(), sizes.end())); !status.ok()) return status;
    const absl::Status sent = exchange_->all_gather(device_.stream(), nodes[my_first].data, sizes, buffer.data);
    if (!sent.ok()) return sent;
    ops_.sum_tree(nodes, finish_plan(slices, world), residual);
    return absl::OkStatus();
  }

 private:
  // Short nodes between GPUs that see each other's memory: one kernel from partials to sum. False: not possible here.
  bool add_fused(int64_t slices, int64_t first, std::span<const Tensor> partials, Tensor residual) {
    const PeerView* view = exchange_->peer_view();
    if (view == nullptr) return false;
    PeerSum sum = peer_sum_plan(slices, communicator_->world(), communicator_->rank());
    kernel_check(owned_slices(slices, communicator_->world(), communicator_->rank()).first == first,
                 "sum over slices: another rank's partials");
    const DeviceMatrix into = {residual.data, residual.rows, residual.cols, residual.stride};
    sum.mine.part_count = static_cast<int>(partials.size());
    sum.mine.part_stride = partials[0].stride;
    for (size_t i = 0; i < partials.size(); ++i) sum.mine.parts[i] = partials[i].data;
    if (!cuda_peer_sum_fits(*view, sum, into)) return false;
    device_.flush();
    cuda_peer_sum(device_.stream(), *view, sum, into);
    return true;
  }

  // The host in between: each rank waits for its own stream only, so that any number of ranks share a GPU.
  void stage(const float* mine, std::vector<size_t> sizes, float* out) {
    size_t total = 0;
    for (const size_t size : sizes) total += size;
    const size_t rank = static_cast<size_t>(communicator_->rank());
    const size_t before = std::accumulate(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(rank), size_t{0});
    device_.host_step([this, mine, sizes = std::move(sizes), out, total, before, rank] {
      if (!staged_failure_.ok()) return;
      if (host_.size() < total) host_.resize(total);
      const std::span<std::byte> all(host_.data(), total);
      const std::span<std::byte> own = all.subspan(before, sizes[rank]);
      cuda_ok(cudaMemcpyAsync(own.data(), mine, own.size(), cudaMemcpyDeviceToHost, device_.stream()), "nodes");
      cuda_ok(cudaStreamSynchronize(device_.stream()), "nodes");
      staged_failure_ = communicator_->all_gather(own, sizes, all, deadline_);
      if (!staged_failure_.ok()) return;
      cuda_ok(cudaMemcpyAsync(out, all.data(), total, cudaMemcpyHostToDevice, device_.stream()), "nodes");
      cuda_ok(cudaStreamSynchronize(device_.stream()), "nodes");
    });
  }

  // Ranks that share a GPU exchange through the host, and then all ranks do, also those that have one to themselves.
  absl::Status decide_staged(Deadline deadline) {
    if (decided_) return absl::OkStatus();
    const bool mine =
        device_.exchange() == "staged" || (device_.exchange() == "auto" && cuda_backends_on(device_.device()) > 1);
    const auto flag = static_cast<std::byte>(mine ? 1 : 0);
    std::vector<std::byte> all(static_cast<size_t>(communicator_->world()));
    const std::vector<size_t> sizes(all.size(), 1);
    absl::Status status = communicator_->all_gather(std::span(&flag, 1), sizes, all, deadline);
    if (!status.ok()) return status;
    staged_ = std::any_of(all.begin(), all.end(), [](std::byte other) { return other != std::byte{0}; });
    decided_ = true;
    return absl::OkStatus();
  }

  // Every rank comes here with the same number, and not while capturing: a kept run was run once before.
  absl::Status make_room(size_t bytes) {
    if (bytes <= room_) return absl::OkStatus();
    device_.flush();
    cuda_ok(cudaStreamSynchronize(device_.stream()), "the GPU");
    if (absl::Status status = exchange_->status(); !status.ok()) return status;
    ops_.forget_runs();
    // Nobody goes on while another rank gives its old room back: freeing it waits for all kernels of the process, and
    // an exchange of a rank that went on waits for this one.
    const absl::Status made = agree(*communicator_, exchange_->reserve(bytes, deadline_), deadline_);
    exchange_->set_deadline(deadline_);
    if (made.ok()) room_ = bytes;
    return made;
  }

  Ops& ops_;
  CudaStreamOps& device_;
  Communicator* communicator_ = nullptr;
  std::unique_ptr<DeviceExchange> exchange_;
  bool decided_ = false;  // staged_ is agreed upon with the other ranks
  bool staged_ = false;
  absl::Status staged_failure_;
  std::vector<std::byte> host_;
  size_t room_ = size_t{1} << 20;  // choose_exchange() reserves as much
  Deadline deadline_ = Deadline::after(std::chrono::seconds(60));
};

}  // namespace

std::unique_ptr<WorldSum> make_device_sum(Ops& ops) {
  CudaStreamOps* device = cuda_stream_ops(ops);
  if (device == nullptr) return nullptr;
  return std::make_unique<DeviceSum>(ops, *device);
}

}  // namespace tensorfold
