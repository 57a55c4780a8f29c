#include "transport/device/choose_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "transport/device/cuda_support.h"
#include "transport/device/nccl_exchange.h"
#include "transport/device/peer_exchange.h"
#include "transport/device/pinned_exchange.h"

namespace tensorfold {
namespace {

using std::chrono::seconds;

constexpr auto kSetUpTime = seconds(60);
constexpr auto kMeasureTime = seconds(20);
constexpr size_t kShort = size_t{64} << 10;
constexpr size_t kLong = size_t{1} << 20;

struct Graph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;

  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    if (executable != nullptr) cudaGraphExecDestroy(executable);
    if (graph != nullptr) cudaGraphDestroy(graph);
  }
};

struct Events {
  std::vector<cudaEvent_t> events;

  ~Events() {
    for (cudaEvent_t event : events) cudaEventDestroy(event);
  }
  absl::Status record(cudaStream_t stream) {
    cudaEvent_t event = nullptr;
    if (absl::Status status = cuda_status(cudaEventCreate(&event), "measuring"); !status.ok()) return status;
    events.push_back(event);
    return cuda_status(cudaEventRecord(event, stream), "measuring");
  }
};

absl::Status capture(DeviceExchange& exchange, cudaStream_t stream, std::span<const size_t> sizes, const void* mine,
                     void* out, int operations, Graph* graph) {
  absl::Status status = cuda_status(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing");
  if (!status.ok()) return status;
  for (int i = 0; i < operations && status.ok(); ++i) status = exchange.all_gather(stream, mine, sizes, out);
  const absl::Status ended = cuda_status(cudaStreamEndCapture(stream, &graph->graph), "ending a capture");
  if (!status.ok()) return status;
  if (!ended.ok()) return ended;
  return cuda_status(cudaGraphInstantiate(&graph->executable, graph->graph, 0), "instantiating a graph");
}

absl::StatusOr<double> launch(cudaStream_t stream, const Graph& graph, int operations, int launches,
                              Deadline deadline) {
  Events events;
  // One launch more than is counted: the first finds the ranks apart.
  for (int i = 0; i <= launches; ++i) {
    if (absl::Status status = cuda_status(cudaGraphLaunch(graph.executable, stream), "launching"); !status.ok()) {
      return status;
    }
    if (absl::Status status = events.record(stream); !status.ok()) return status;
  }
  if (absl::Status status = wait_for_stream(stream, deadline, "measuring"); !status.ok()) return status;
  std::vector<double> times;
  for (int i = 0; i < launches; ++i) {
    float ms = 0;
    const size_t at = static_cast<size_t>(i);
    absl::Status status = cuda_status(cudaEventElapsedTime(&ms, events.events[at], events.events[at + 1]), "measuring");
    if (!status.ok()) return status;
    times.push_back(1000.0 * ms / operations);
  }
  std::nth_element(times.begin(), times.begin() + launches / 2, times.end());
  return times[static_cast<size_t>(launches / 2)];
}

struct Way {
  std::string name;
  std::unique_ptr<DeviceExchange> exchange;
  double short_us = 0;
  double long_us = 0;
};

// Streams of one process that wait for each other's ranks may share a hardware queue, and then none goes on. With four
// and more ranks this was seen, so it is refused for any number: `staged` in the runtime does without waiting streams.
absl::Status one_gpu_a_process(Communicator& communicator, int device, Deadline deadline) {
  const absl::StatusOr<DeviceIdentity> mine = device_identity(device);
  const DeviceIdentity own = mine.ok() ? *mine : DeviceIdentity{};
  std::vector<DeviceIdentity> all(static_cast<size_t>(communicator.world()));
  const std::vector<size_t> sizes(all.size(), sizeof(DeviceIdentity));
  const absl::Status gathered = communicator.all_gather(std::as_bytes(std::span(&own, 1)), sizes,
                                                        std::as_writable_bytes(std::span(all)), deadline);
  if (!gathered.ok()) return gathered;
  if (!mine.ok()) return mine.status();
  for (size_t a = 0; a < all.size(); ++a) {
    for (size_t b = a + 1; b < all.size(); ++b) {
      if (all[a].process != all[b].process || !same_gpu(all[a], all[b])) continue;
      return absl::FailedPreconditionError(fmt::format(
          "ranks {} and {} are threads of one process on one GPU, whose streams would keep each other waiting", a, b));
    }
  }
  return absl::OkStatus();
}

// Not agreed upon yet: each rank's own outcome.
absl::StatusOr<std::unique_ptr<DeviceExchange>> create(const std::string& name, Communicator& communicator,
                                                       int device) {
  const Deadline deadline = Deadline::after(kSetUpTime);
  if (name == "peer") return create_peer_exchange(communicator, deadline);
  if (name == "nccl") return create_nccl_exchange(communicator, deadline);
  if (absl::Status status = one_gpu_a_process(communicator, device, deadline); !status.ok()) return status;
  return PinnedExchange::create(communicator);
}

// Sets one way up and measures it. The error is the same on all ranks, unless the communicator itself has failed.
absl::Status try_way(Communicator& communicator, int device, Way* way) {
  absl::StatusOr<std::unique_ptr<DeviceExchange>> made = create(way->name, communicator, device);
  absl::Status status = agree(communicator, made.status(), Deadline::after(kSetUpTime));
  if (!status.ok()) return status;
  way->exchange = *std::move(made);
  const absl::Status room = way->exchange->reserve(kLong, Deadline::after(kSetUpTime));
  status = agree(communicator, room, Deadline::after(kSetUpTime));
  if (!status.ok()) return status;
  if (communicator.world() == 1) return absl::OkStatus();
  absl::StatusOr<double> time =
      measure_all_gather(*way->exchange, communicator, kShort, 16, 15, Deadline::after(kMeasureTime));
  if (!time.ok()) return time.status();
  way->short_us = *time;
  time = measure_all_gather(*way->exchange, communicator, kLong, 4, 15, Deadline::after(kMeasureTime));
  if (!time.ok()) return time.status();
  way->long_us = *time;
  return absl::OkStatus();
}

// Rank 0's choice, told to all.
absl::StatusOr<size_t> decide(Communicator& communicator, const std::vector<Way>& ways) {
  uint32_t best = 0;
  for (uint32_t i = 1; i < ways.size(); ++i) {
    if (ways[i].short_us < ways[best].short_us) best = i;
  }
  std::vector<std::byte> message(sizeof(best));
  std::memcpy(message.data(), &best, sizeof(best));
  absl::Status status = communicator.broadcast(0, message, sizeof(best), Deadline::after(kSetUpTime));
  if (!status.ok()) return status;
  if (message.size() == sizeof(best)) std::memcpy(&best, message.data(), sizeof(best));
  if (best >= ways.size()) return absl::DataLossError("rank 0 chose an exchange that this rank does not have");
  return best;
}

}  // namespace

absl::StatusOr<double> measure_all_gather(DeviceExchange& exchange, Communicator& communicator, size_t bytes,
                                          int operations, int launches, Deadline deadline) {
  const std::vector<size_t> sizes(static_cast<size_t>(communicator.world()), bytes);
  absl::StatusOr<OwnStream> stream = OwnStream::create();
  absl::Status mine = stream.status();
  void* memory = nullptr;
  if (mine.ok()) mine = cuda_status(cudaMalloc(&memory, bytes * (sizes.size() + 1)), "measuring: device memory");
  const DevicePointer<std::byte> holder(static_cast<std::byte*>(memory));
  Graph graph;
  if (mine.ok()) {
    mine = cuda_status(cudaMemsetAsync(memory, 0, bytes * (sizes.size() + 1), stream->get()), "measuring");
  }
  if (mine.ok()) mine = wait_for_stream(stream->get(), deadline, "measuring");
  if (mine.ok()) {
    mine = capture(exchange, stream->get(), sizes, holder.get(), holder.get() + bytes, operations, &graph);
  }
  // Nobody launches unless everybody can.
  if (absl::Status status = agree(communicator, mine, deadline); !status.ok()) return status;
  exchange.set_deadline(deadline);
  absl::StatusOr<double> time = launch(stream->get(), graph, operations, launches, deadline);
  mine = time.status();
  if (!mine.ok()) {
    exchange.abort(mine);
    cudaStreamSynchronize(stream->get());
  }
  const absl::Status ran = exchange.status();
  if (!ran.ok()) mine = ran;
  if (absl::Status status = agree(communicator, mine, Deadline::after(kMeasureTime)); !status.ok()) return status;
  return time;
}

absl::StatusOr<std::unique_ptr<DeviceExchange>> choose_exchange(Communicator& communicator, const std::string& wanted,
                                                                int device, std::vector<std::string>* report) {
  std::vector<std::string> names = {"peer", "nccl", "pinned"};
  if (wanted != "auto") {
    if (std::find(names.begin(), names.end(), wanted) == names.end()) {
      return absl::InvalidArgumentError(
          fmt::format("there is no device exchange '{}'; there are auto, peer, nccl and pinned", wanted));
    }
    names = {wanted};
  } else if (communicator.world() == 1) {
    names = {"pinned"};
  }
  auto tell = [&](std::string line) {
    if (report != nullptr) report->push_back(std::move(line));
  };
  const absl::Status current = cuda_status(cudaSetDevice(device), fmt::format("taking GPU {}", device));
  if (absl::Status status = agree(communicator, current, Deadline::after(kSetUpTime)); !status.ok()) return status;

  std::vector<Way> ways;
  for (const std::string& name : names) {
    Way way;
    way.name = name;
    absl::Status status = try_way(communicator, device, &way);
    if (status.ok()) {
      tell(fmt::format("{}: 64 KiB {:.1f} us, 1 MiB {:.1f} us", name, way.short_us, way.long_us));
      ways.push_back(std::move(way));
      continue;
    }
    if (names.size() == 1) return status;
    tell(fmt::format("{}: out: {}", name, std::string(status.message())));
  }
  if (ways.empty()) return absl::FailedPreconditionError("no way to exchange device memory between these ranks");
  const absl::StatusOr<size_t> best = decide(communicator, ways);
  if (!best.ok()) return best.status();
  tell(fmt::format("taken: {}", ways[*best].name));
  std::unique_ptr<DeviceExchange> taken = std::move(ways[*best].exchange);
  // Nobody goes on while another rank still gives the other ways back: freeing mapped memory waits for all kernels of
  // the process, and a kernel of a rank that went on waits for this one.
  ways.clear();
  if (absl::Status status = communicator.barrier(Deadline::after(kSetUpTime)); !status.ok()) return status;
  return taken;
}

}  // namespace tensorfold
