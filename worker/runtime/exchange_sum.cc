#include "worker/runtime/exchange_sum.h"

#include <cstring>

#include "kernels/numerics/slices.h"
#include "kernels/numerics/tree.h"

namespace tensorfold {
namespace {

// Tensors of the arena with equal columns have equal strides, the same on every rank of a backend, so a block travels
// whole, the padding at the end of its rows included.
size_t tensor_bytes(int64_t rows, int64_t stride) { return static_cast<size_t>(rows * stride) * sizeof(float); }

std::span<std::byte> bytes_of(float* data, size_t size) { return {reinterpret_cast<std::byte*>(data), size}; }

}  // namespace

Tensor ExchangeSum::finish(int64_t slices, Tensor all, int64_t node_rows) {
  std::vector<AddJob> steps;
  run_plan(finish_plan(slices, communicator_->world()), [&](int dst, int src) {
    const Tensor into = all.row_range(dst * node_rows, node_rows);
    steps.push_back({into, all.row_range(src * node_rows, node_rows), into});
  });
  ops_.add_many(steps);
  return all.row_range(0, node_rows);
}

absl::Status ExchangeSum::add(int64_t slices, int64_t first, std::span<const Tensor> partials, Tensor residual) {
  const SliceRange mine = {first, static_cast<int64_t>(partials.size())};
  if (mine.count == slices) {
    ops_.sum_tree(partials, fold_plan(slices, mine), residual);
    return absl::OkStatus();
  }
  std::vector<AddJob> steps;
  run_plan(fold_plan(slices, mine), [&](int dst, int src) {
    const Tensor& into = partials[static_cast<size_t>(dst)];
    steps.push_back({into, partials[static_cast<size_t>(src)], into});
  });
  ops_.add_many(steps);
  std::vector<Tensor> nodes;
  for (const SliceRange& node : owned_nodes(slices, mine)) {
    nodes.push_back(partials[static_cast<size_t>(node.first - first)]);
  }
  const bool by_rows = communicator_->world() > 2 && residual.rows >= communicator_->world() &&
                       static_cast<int64_t>(tensor_bytes(residual.rows, residual.cols)) >= long_bytes_;
  const absl::StatusOr<Tensor> sum = by_rows ? exchange_by_rows(slices, nodes) : exchange_at_once(slices, nodes);
  if (!sum.ok()) return sum.status();
  ops_.add(residual, *sum, residual);
  return absl::OkStatus();
}

absl::StatusOr<Tensor> ExchangeSum::exchange_at_once(int64_t slices, std::span<const Tensor> nodes) {
  const int world = communicator_->world();
  const int64_t rows = nodes[0].rows;
  const int64_t cols = nodes[0].cols;
  const size_t node_bytes = tensor_bytes(rows, nodes[0].stride);
  const WorldNodes all = world_nodes(slices, world);
  const Tensor buffer = ops_.scratch(static_cast<int64_t>(all.nodes.size()) * rows, cols);
  const auto out = bytes_of(ops_.host_data(buffer), all.nodes.size() * node_bytes);
  const size_t my_first = static_cast<size_t>(all.offsets[static_cast<size_t>(communicator_->rank())]);
  const auto mine = out.subspan(my_first * node_bytes, nodes.size() * node_bytes);
  for (size_t i = 0; i < nodes.size(); ++i) {
    std::memcpy(mine.data() + i * node_bytes, ops_.host_data(nodes[i]), node_bytes);
  }
  std::vector<size_t> sizes;
  for (size_t rank = 0; rank < static_cast<size_t>(world); ++rank) {
    sizes.push_back(static_cast<size_t>(all.offsets[rank + 1] - all.offsets[rank]) * node_bytes);
  }
  if (absl::Status status = communicator_->all_gather(mine, sizes, out, deadline_); !status.ok()) return status;
  return finish(slices, buffer, rows);
}

absl::StatusOr<Tensor> ExchangeSum::exchange_by_rows(int64_t slices, std::span<const Tensor> nodes) {
  const int world = communicator_->world();
  const size_t me = static_cast<size_t>(communicator_->rank());
  const int64_t rows = nodes[0].rows;
  const int64_t cols = nodes[0].cols;
  const int64_t width = nodes[0].stride;
  const WorldNodes all = world_nodes(slices, world);
  std::vector<int64_t> share(static_cast<size_t>(world) + 1);  // rank r finishes rows [share[r], share[r + 1])
  for (int rank = 0; rank <= world; ++rank) share[static_cast<size_t>(rank)] = rows * rank / world;
  const int64_t my_rows = share[me + 1] - share[me];

  const Tensor send = ops_.scratch(rows * static_cast<int64_t>(nodes.size()), cols);
  const Tensor receive = ops_.scratch(static_cast<int64_t>(all.nodes.size()) * my_rows, cols);
  std::vector<size_t> send_sizes;
  std::vector<size_t> receive_sizes;
  std::vector<size_t> share_sizes;
  float* out = ops_.host_data(send);
  for (size_t rank = 0; rank < static_cast<size_t>(world); ++rank) {
    const size_t floats = static_cast<size_t>((share[rank + 1] - share[rank]) * width);
    for (const Tensor& node : nodes) {
      std::memcpy(out, ops_.host_data(node) + share[rank] * width, floats * sizeof(float));
      out += floats;
    }
    send_sizes.push_back(nodes.size() * floats * sizeof(float));
    receive_sizes.push_back(static_cast<size_t>(all.offsets[rank + 1] - all.offsets[rank]) *
                            tensor_bytes(my_rows, width));
    share_sizes.push_back(floats * sizeof(float));
  }
  const absl::Status sent = communicator_->all_to_all(
      bytes_of(ops_.host_data(send), tensor_bytes(send.rows, width)), send_sizes,
      bytes_of(ops_.host_data(receive), tensor_bytes(receive.rows, width)), receive_sizes, deadline_);
  if (!sent.ok()) return sent;

  const Tensor finished = finish(slices, receive, my_rows);
  const Tensor sum = ops_.scratch(rows, cols);
  float* const mine_in_sum = ops_.host_data(sum) + share[me] * width;
  std::memcpy(mine_in_sum, ops_.host_data(finished), share_sizes[me]);
  const absl::Status gathered =
      communicator_->all_gather(bytes_of(mine_in_sum, share_sizes[me]), share_sizes,
                                bytes_of(ops_.host_data(sum), tensor_bytes(rows, width)), deadline_);
  if (!gathered.ok()) return gathered;
  return sum;
}

}  // namespace tensorfold
