#include "tests/transport/device/exchange_checks.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cuda/peer_exchange.h"
#include "kernels/numerics/tree.h"
#include "transport/device/cuda_support.h"

namespace tensorfold {
namespace {

using std::chrono::seconds;
using Bytes = std::vector<unsigned char>;

constexpr size_t kGuard = 64;
constexpr unsigned char kPoison = 0xA5;

#define TF_RETURN_IF_ERROR(expression)                                      \
  do {                                                                      \
    if (absl::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

// Device memory of which all has been allocated before anybody exchanges: freeing waits for the device.
struct Memory {
  DevicePointer<unsigned char> holder;

  static absl::StatusOr<Memory> create(size_t bytes) {
    void* memory = nullptr;
    absl::Status status = cuda_status(cudaMalloc(&memory, bytes), "test memory");
    if (!status.ok()) return status;
    return Memory{DevicePointer<unsigned char>(static_cast<unsigned char*>(memory))};
  }
  unsigned char* at(size_t offset = 0) const { return holder.get() + offset; }
};

// The bytes that `from` sends to `to` in round `round`; all_gather sends the same to everybody (to = 0).
Bytes message(int from, int to, int round, size_t bytes) {
  std::mt19937 engine(static_cast<uint32_t>(from * 1000003 + to * 10007 + round * 101 + 1));
  Bytes content(bytes);
  size_t i = 0;
  for (; i + 4 <= bytes; i += 4) {
    const uint32_t word = engine();
    std::memcpy(content.data() + i, &word, 4);
  }
  for (; i < bytes; ++i) content[i] = static_cast<unsigned char>(engine());
  return content;
}

absl::Status put(cudaStream_t stream, unsigned char* to, const Bytes& bytes) {
  if (bytes.empty()) return absl::OkStatus();
  TF_RETURN_IF_ERROR(
      cuda_status(cudaMemcpyAsync(to, bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream), "put"));
  return wait_for_stream(stream, Deadline::after(seconds(60)), "put");
}

absl::Status get(cudaStream_t stream, const unsigned char* from, size_t count, Bytes* bytes) {
  bytes->assign(count, 0);
  if (count == 0) return absl::OkStatus();
  TF_RETURN_IF_ERROR(cuda_status(cudaMemcpyAsync(bytes->data(), from, count, cudaMemcpyDeviceToHost, stream), "get"));
  return wait_for_stream(stream, Deadline::after(seconds(60)), "get");
}

absl::Status same(const std::string& what, std::span<const unsigned char> seen, std::span<const unsigned char> wanted) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (seen[i] == wanted[i]) continue;
    return absl::InternalError(
        fmt::format("{}: byte {} of {} is {}, not {}", what, i, wanted.size(), seen[i], wanted[i]));
  }
  return absl::OkStatus();
}

size_t sum_of(std::span<const size_t> sizes) {
  size_t total = 0;
  for (size_t size : sizes) total += size;
  return total;
}

// Waits for the stream, then for all ranks: nobody goes on to something else while another still exchanges.
absl::Status finish(Communicator& communicator, DeviceExchange& exchange, cudaStream_t stream, const char* what) {
  const absl::Status waited = wait_for_stream(stream, Deadline::after(seconds(60)), what);
  if (!waited.ok()) {
    exchange.abort(waited);
    cudaStreamSynchronize(stream);
  }
  const absl::Status status = exchange.status();
  TF_RETURN_IF_ERROR(status);
  TF_RETURN_IF_ERROR(waited);
  return communicator.barrier(Deadline::after(seconds(60)));
}

struct Setting {
  OwnStream stream;
  Memory send;
  Memory out;
};

absl::StatusOr<Setting> set_up(size_t bytes) {
  absl::StatusOr<OwnStream> stream = OwnStream::create();
  if (!stream.ok()) return stream.status();
  absl::StatusOr<Memory> send = Memory::create(bytes);
  if (!send.ok()) return send.status();
  absl::StatusOr<Memory> out = Memory::create(bytes);
  if (!out.ok()) return out.status();
  return Setting{*std::move(stream), *std::move(send), *std::move(out)};
}

// `shift` moves the pointers off their alignment; in place: `mine` is the own place in `out`.
absl::Status gather_once(Communicator& communicator, DeviceExchange& exchange, const Setting& setting,
                         const std::vector<size_t>& sizes, size_t shift, bool in_place, int round) {
  const int me = communicator.rank();
  const size_t total = sum_of(sizes);
  size_t before = 0;
  for (int r = 0; r < me; ++r) before += sizes[static_cast<size_t>(r)];
  unsigned char* const out = setting.out.at(kGuard + shift);
  cudaStream_t stream = setting.stream.get();
  TF_RETURN_IF_ERROR(put(stream, setting.out.at(), Bytes(total + shift + 2 * kGuard, kPoison)));
  const unsigned char* const mine = in_place ? out + before : setting.send.at(shift);
  TF_RETURN_IF_ERROR(
      put(stream, const_cast<unsigned char*>(mine), message(me, 0, round, sizes[static_cast<size_t>(me)])));
  TF_RETURN_IF_ERROR(communicator.barrier(Deadline::after(seconds(60))));
  exchange.set_deadline(Deadline::after(seconds(60)));
  TF_RETURN_IF_ERROR(exchange.all_gather(stream, mine, sizes, out));
  TF_RETURN_IF_ERROR(finish(communicator, exchange, stream, "all_gather"));
  Bytes seen;
  TF_RETURN_IF_ERROR(get(stream, setting.out.at(), total + shift + 2 * kGuard, &seen));
  Bytes wanted(kGuard + shift, kPoison);
  for (int r = 0; r < communicator.world(); ++r) {
    const Bytes part = message(r, 0, round, sizes[static_cast<size_t>(r)]);
    wanted.insert(wanted.end(), part.begin(), part.end());
  }
  wanted.insert(wanted.end(), kGuard, kPoison);
  return same(fmt::format("rank {} all_gather of {} bytes, round {}, shift {}, {} (with guards)", me, total, round,
                          shift, in_place ? "in place" : "apart"),
              seen, wanted);
}

absl::Status to_all_once(Communicator& communicator, DeviceExchange& exchange, const Setting& setting,
                         const std::vector<std::vector<size_t>>& sizes, size_t shift, int round) {
  const int me = communicator.rank();
  const size_t world = sizes.size();
  const std::vector<size_t>& send_sizes = sizes[static_cast<size_t>(me)];
  std::vector<size_t> receive_sizes;
  Bytes send;
  Bytes wanted(kGuard + shift, kPoison);
  for (size_t r = 0; r < world; ++r) {
    const Bytes out = message(me, static_cast<int>(r) + 1, round, send_sizes[r]);
    send.insert(send.end(), out.begin(), out.end());
    receive_sizes.push_back(sizes[r][static_cast<size_t>(me)]);
    const Bytes in = message(static_cast<int>(r), me + 1, round, receive_sizes[r]);
    wanted.insert(wanted.end(), in.begin(), in.end());
  }
  wanted.insert(wanted.end(), kGuard, kPoison);
  cudaStream_t stream = setting.stream.get();
  TF_RETURN_IF_ERROR(put(stream, setting.send.at(shift), send));
  TF_RETURN_IF_ERROR(put(stream, setting.out.at(), Bytes(wanted.size(), kPoison)));
  TF_RETURN_IF_ERROR(communicator.barrier(Deadline::after(seconds(60))));
  exchange.set_deadline(Deadline::after(seconds(60)));
  TF_RETURN_IF_ERROR(
      exchange.all_to_all(stream, setting.send.at(shift), send_sizes, setting.out.at(kGuard + shift), receive_sizes));
  TF_RETURN_IF_ERROR(finish(communicator, exchange, stream, "all_to_all"));
  Bytes seen;
  TF_RETURN_IF_ERROR(get(stream, setting.out.at(), wanted.size(), &seen));
  return same(fmt::format("rank {} all_to_all, round {}, shift {} (with guards)", me, round, shift), seen, wanted);
}

}  // namespace

absl::Status check_sizes_of_all(Communicator& communicator, DeviceExchange& exchange) {
  const size_t world = static_cast<size_t>(communicator.world());
  absl::StatusOr<Setting> setting = set_up(kLargestMessage * world + 1024);
  if (!setting.ok()) return setting.status();
  const std::vector<size_t> some = {0, 1, 15, 16, 17, 64, 1000, 4096, 65536, 100003, size_t{1} << 20};
  std::mt19937 engine(7);
  int round = 0;
  for (; round < 12; ++round) {
    std::vector<size_t> sizes;
    for (size_t r = 0; r < world; ++r)
      sizes.push_back(round < 4 ? some[4 + static_cast<size_t>(round) * 2] : some[engine() % some.size()]);
    const size_t shift = round % 3 == 2 ? 4 : 0;
    TF_RETURN_IF_ERROR(gather_once(communicator, exchange, *setting, sizes, shift, round % 2 == 1, round));
    std::vector<std::vector<size_t>> pairs(world);
    for (auto& row : pairs) {
      for (size_t r = 0; r < world; ++r) row.push_back(some[engine() % (some.size() - 1)]);
    }
    TF_RETURN_IF_ERROR(to_all_once(communicator, exchange, *setting, pairs, shift, round));
  }
  std::vector<size_t> large(world, kLargestMessage);
  if (world > 1) large[1] = kLargestMessage - 16;
  TF_RETURN_IF_ERROR(gather_once(communicator, exchange, *setting, large, 0, true, round++));
  TF_RETURN_IF_ERROR(gather_once(communicator, exchange, *setting, std::vector<size_t>(world, 0), 0, false, round++));
  std::vector<size_t> only(world, 0);
  only.back() = 4096;
  return gather_once(communicator, exchange, *setting, only, 0, false, round++);
}

absl::Status check_graph(Communicator& communicator, DeviceExchange& exchange, int launches) {
  const int me = communicator.rank();
  const size_t world = static_cast<size_t>(communicator.world());
  constexpr size_t kBytes = 2048;
  absl::StatusOr<Setting> setting = set_up(2 * kBytes * world + 1024);
  if (!setting.ok()) return setting.status();
  cudaStream_t stream = setting->stream.get();
  unsigned char* const mine = setting->send.at();
  unsigned char* const gathered = setting->send.at(kBytes);
  unsigned char* const back = setting->out.at();
  unsigned char* const again = setting->out.at(kBytes * world);
  const std::vector<size_t> sizes(world, kBytes);
  std::vector<size_t> unequal;
  for (size_t r = 0; r < world; ++r) unequal.push_back(kBytes - 16 * r);

  // Everybody's bytes, then the own copy of rank r's bytes to rank r, then the first of those again with other sizes.
  absl::Status status = cuda_status(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  TF_RETURN_IF_ERROR(status);
  status = exchange.all_gather(stream, mine, sizes, gathered);
  if (status.ok()) status = exchange.all_to_all(stream, gathered, sizes, back, sizes);
  if (status.ok()) status = exchange.all_gather(stream, back, unequal, again);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  const absl::Status ended = cuda_status(cudaStreamEndCapture(stream, &graph), "end of capture");
  TF_RETURN_IF_ERROR(status);
  TF_RETURN_IF_ERROR(ended);
  TF_RETURN_IF_ERROR(cuda_status(cudaGraphInstantiate(&executable, graph, 0), "instantiate"));
  TF_RETURN_IF_ERROR(communicator.barrier(Deadline::after(seconds(60))));
  for (int launch = 0; launch < launches && status.ok(); ++launch) {
    const Bytes content = message(me, 0, launch, kBytes);
    Bytes seen_back(kBytes * world);
    Bytes seen_again(sum_of(unequal));
    exchange.set_deadline(Deadline::after(seconds(30)));
    TF_RETURN_IF_ERROR(put(stream, mine, content));
    TF_RETURN_IF_ERROR(cuda_status(cudaGraphLaunch(executable, stream), "launch"));
    // No barrier between launches: a fast rank may be a launch ahead.
    status = wait_for_stream(stream, Deadline::after(seconds(60)), "graph");
    if (!status.ok()) exchange.abort(status);
    const absl::Status ran = exchange.status();
    if (!ran.ok()) status = ran;
    if (status.ok()) status = get(stream, back, seen_back.size(), &seen_back);
    if (status.ok()) status = get(stream, again, seen_again.size(), &seen_again);
    for (size_t r = 0; r < world && status.ok(); ++r) {
      status = same(fmt::format("rank {} launch {}: all_to_all from rank {}", me, launch, r),
                    std::span(seen_back).subspan(r * kBytes, kBytes), content);
    }
    size_t at = 0;
    for (size_t r = 0; r < world && status.ok(); ++r) {
      const Bytes wanted = message(static_cast<int>(r), 0, launch, kBytes);
      status = same(fmt::format("rank {} launch {}: second all_gather from rank {}", me, launch, r),
                    std::span(seen_again).subspan(at, unequal[r]), std::span(wanted).first(unequal[r]));
      at += unequal[r];
    }
  }
  TF_RETURN_IF_ERROR(status);
  TF_RETURN_IF_ERROR(communicator.barrier(Deadline::after(seconds(60))));
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  return absl::OkStatus();
}

namespace {

float tree_value(int slice, int64_t row, int64_t col, int round) {
  uint32_t state = static_cast<uint32_t>(slice * 7919 + row * 104729 + col * 1299709 + round * 15485863 + 12345);
  state ^= state >> 16;
  state *= 0x7feb352dU;
  state ^= state >> 15;
  state *= 0x846ca68bU;
  state ^= state >> 16;
  if (state % 1021 == 0) return -0.0f;
  if (state % 4093 == 1) return std::ldexp(1.0f, 126);
  const int exponent = static_cast<int>(state % 40) - 20;  // wide, so that another order has other bits
  return std::ldexp(static_cast<float>(static_cast<int32_t>(state)), exponent - 31);
}

// The contract's tree over all slices, as world 1 does it.
float tree_sum(int64_t slices, int64_t row, int64_t col, int round) {
  std::vector<float> part;
  for (int s = 0; s < slices; ++s) part.push_back(tree_value(s, row, col, round));
  run_plan(fold_plan(slices, {0, slices}),
           [&](int dst, int src) { part[static_cast<size_t>(dst)] += part[static_cast<size_t>(src)]; });
  return part[0];
}

absl::Status sum_once(Communicator& communicator, DeviceExchange& exchange, const Setting& setting, int64_t slices,
                      int64_t rows, int64_t cols, int round) {
  const int me = communicator.rank();
  const PeerView& view = *exchange.peer_view();
  PeerSum sum = peer_sum_plan(slices, communicator.world(), me);
  const SliceRange mine = owned_slices(slices, communicator.world(), me);
  const int64_t stride = cols + 8;
  const size_t part_floats = static_cast<size_t>(rows * stride);
  cudaStream_t stream = setting.stream.get();
  std::vector<float> host(part_floats * static_cast<size_t>(mine.count), 0.0f);
  for (int64_t p = 0; p < mine.count; ++p) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        host[static_cast<size_t>(p) * part_floats + static_cast<size_t>(r * stride + c)] =
            tree_value(static_cast<int>(mine.first + p), r, c, round);
      }
    }
    sum.mine.parts[p] = reinterpret_cast<float*>(setting.send.at()) + static_cast<size_t>(p) * part_floats;
  }
  sum.mine.part_stride = stride;
  std::vector<float> residual(part_floats);
  for (size_t i = 0; i < residual.size(); ++i) residual[i] = tree_value(99, 0, static_cast<int64_t>(i), round);
  auto bytes_of = [](const std::vector<float>& values) {
    const unsigned char* const first = reinterpret_cast<const unsigned char*>(values.data());
    return Bytes(first, first + values.size() * sizeof(float));
  };
  TF_RETURN_IF_ERROR(put(stream, setting.send.at(), bytes_of(host)));
  TF_RETURN_IF_ERROR(put(stream, setting.out.at(), bytes_of(residual)));
  const DeviceMatrix target = {reinterpret_cast<float*>(setting.out.at()), rows, cols, stride};
  if (!cuda_peer_sum_fits(view, sum, target)) {
    return absl::InternalError(fmt::format("a sum of {} x {} does not fit", rows, cols));
  }
  // The same by the long way, on a second copy of the residual: fold, all_gather, finish.
  const size_t node_floats = static_cast<size_t>(rows * cols);
  float* const second = target.data + part_floats;
  float* const nodes = second + part_floats;
  TF_RETURN_IF_ERROR(put(stream, reinterpret_cast<unsigned char*>(second), bytes_of(residual)));
  std::vector<size_t> sizes(static_cast<size_t>(communicator.world()), 0);
  for (int g = 0; g < sum.node_count; ++g) sizes[static_cast<size_t>(sum.owner[g])] += node_floats * sizeof(float);
  std::vector<DeviceMatrix> own;
  CudaTreeSum all;
  all.part_stride = cols;
  all.part_count = sum.node_count;
  for (int g = 0; g < sum.node_count; ++g) {
    all.parts[g] = nodes + static_cast<size_t>(g) * node_floats;
    if (sum.owner[g] == me) own.push_back({nodes + static_cast<size_t>(g) * node_floats, rows, cols, cols});
  }
  for (int s = 0; s < sum.finish_count; ++s) all.steps[all.step_count++] = sum.finish[s];

  TF_RETURN_IF_ERROR(communicator.barrier(Deadline::after(seconds(60))));
  exchange.set_deadline(Deadline::after(seconds(30)));
  cuda_peer_sum(stream, view, sum, target);
  cuda_fold(stream, sum.mine, rows, cols, sum.roots, sum.root_count, own.data());
  TF_RETURN_IF_ERROR(launch_status());
  TF_RETURN_IF_ERROR(exchange.all_gather(stream, own[0].data, sizes, nodes));
  cuda_sum_norm(stream, all, {second, rows, cols, stride}, nullptr, 0.0f, {}, {});
  TF_RETURN_IF_ERROR(launch_status());
  TF_RETURN_IF_ERROR(finish(communicator, exchange, stream, "sum"));
  Bytes fused;
  Bytes apart;
  TF_RETURN_IF_ERROR(get(stream, setting.out.at(), part_floats * sizeof(float), &fused));
  TF_RETURN_IF_ERROR(get(stream, reinterpret_cast<unsigned char*>(second), part_floats * sizeof(float), &apart));
  TF_RETURN_IF_ERROR(same(fmt::format("rank {} fold, all_gather, finish (against the fused sum) of {} slices, {} x {}",
                                      me, slices, rows, cols),
                          apart, fused));
  Bytes seen;
  TF_RETURN_IF_ERROR(get(stream, setting.out.at(), part_floats * sizeof(float), &seen));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < stride; ++c) {
      const size_t i = static_cast<size_t>(r * stride + c);
      const float wanted = c < cols ? residual[i] + tree_sum(slices, r, c, round) : residual[i];
      float got = 0;
      std::memcpy(&got, seen.data() + i * sizeof(float), sizeof(got));
      if (std::memcmp(&got, &wanted, sizeof(got)) == 0 || (std::isnan(got) && std::isnan(wanted))) continue;
      return absl::InternalError(
          fmt::format("rank {} sum of {} slices, {} x {}, round {}: row {} col {} is {:a}, not {:a}", me, slices, rows,
                      cols, round, r, c, got, wanted));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status check_sum(Communicator& communicator, DeviceExchange& exchange) {
  const int64_t world = communicator.world();
  absl::StatusOr<Setting> setting = set_up(size_t{11} * 24 * 5128 * sizeof(float));
  if (!setting.ok()) return setting.status();
  struct Shape {
    int64_t rows;
    int64_t cols;
  };
  // The last wants more threads than one wave of blocks has.
  const std::vector<Shape> shapes = {{1, 4}, {1, 5120}, {3, 1000}, {16, 1024}, {16, 5120}, {24, 5120}};
  int round = 0;
  for (int64_t slices : {8, 4, 2}) {
    if (slices < world) continue;
    for (const Shape& shape : shapes) {
      // Twice, so that both halves of the double buffer come round again.
      for (int again = 0; again < 3; ++again) {
        TF_RETURN_IF_ERROR(sum_once(communicator, exchange, *setting, slices, shape.rows, shape.cols, round++));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace tensorfold
