// Latency of exchanges between two GPUs inside a graph, by size: two forked processes, a GPU each. Microseconds an
// operation, medians; bytes are those of one rank. "sum" is cuda_peer_sum: four slices a rank folded, exchanged, the
// tree finished and added. NCCL's all-reduce stands beside it for comparison only: its order is not ours.
//
//   exchange_times [first GPU of rank 0, of rank 1: default 0 1]
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "tests/transport/ucx_processes.h"
#include "transport/device/choose_exchange.h"
#include "transport/device/cuda_support.h"
#include "transport/device/nccl_exchange.h"
#include "transport/device/peer_exchange.h"
#include "transport/device/pinned_exchange.h"

#if TENSORFOLD_HAVE_NCCL
#include <dlfcn.h>
#include <nccl.h>
#endif

namespace tensorfold {
namespace {

using std::chrono::seconds;

constexpr int kOperations = 16;
constexpr int kLaunches = 25;

std::string cell(const absl::StatusOr<double>& time) {
  return time.ok() ? fmt::format("{:12.2f}", *time) : fmt::format("{:>12}", "-");
}

// Median microseconds of an operation that `enqueue` puts on the stream, kOperations of them in a graph.
absl::StatusOr<double> measure(Communicator& communicator, const std::function<absl::Status(cudaStream_t)>& enqueue) {
  absl::StatusOr<OwnStream> own = OwnStream::create();
  if (!own.ok()) return own.status();
  cudaStream_t stream = own->get();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  absl::Status status = cuda_status(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < kOperations && status.ok(); ++i) status = enqueue(stream);
  const absl::Status ended = cuda_status(cudaStreamEndCapture(stream, &graph), "end of capture");
  if (status.ok()) status = ended;
  if (status.ok()) status = cuda_status(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  if (absl::Status all = agree(communicator, status, Deadline::after(seconds(30))); !all.ok()) return all;
  std::vector<cudaEvent_t> events(kLaunches + 1);
  for (cudaEvent_t& event : events) cudaEventCreate(&event);
  for (cudaEvent_t event : events) {
    cudaGraphLaunch(executable, stream);
    cudaEventRecord(event, stream);
  }
  status = wait_for_stream(stream, Deadline::after(seconds(30)), "launches");
  std::vector<double> times;
  for (size_t i = 0; i < kLaunches && status.ok(); ++i) {
    float ms = 0;
    status = cuda_status(cudaEventElapsedTime(&ms, events[i], events[i + 1]), "events");
    times.push_back(1000.0 * ms / kOperations);
  }
  for (cudaEvent_t event : events) cudaEventDestroy(event);
  if (absl::Status all = agree(communicator, status, Deadline::after(seconds(60))); !all.ok()) return all;
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  std::nth_element(times.begin(), times.begin() + kLaunches / 2, times.end());
  return times[kLaunches / 2];
}

absl::StatusOr<double> measure_sum(Communicator& communicator, DeviceExchange* exchange, std::byte* memory,
                                   size_t bytes) {
  if (exchange == nullptr) return absl::UnavailableError("no peer memory");
  const PeerView& view = *exchange->peer_view();
  PeerSum sum = peer_sum_plan(8, communicator.world(), communicator.rank());
  const int64_t cols = std::min<int64_t>(static_cast<int64_t>(bytes / sizeof(float)), 4096);
  const int64_t rows = static_cast<int64_t>(bytes / sizeof(float)) / cols;
  float* const floats = reinterpret_cast<float*>(memory);
  for (int p = 0; p < sum.mine.part_count; ++p) sum.mine.parts[p] = floats + (p + 1) * rows * cols;
  sum.mine.part_stride = cols;
  const DeviceMatrix residual = {floats, rows, cols, cols};
  if (!cuda_peer_sum_fits(view, sum, residual)) return absl::OutOfRangeError("too long for the fused sum");
  exchange->set_deadline(Deadline::after(seconds(30)));
  absl::StatusOr<double> time = measure(communicator, [&](cudaStream_t stream) {
    cuda_peer_sum(stream, view, sum, residual);
    return launch_status();
  });
  if (absl::Status status = exchange->status(); !status.ok()) return status;
  return time;
}

absl::StatusOr<double> measure_gather(Communicator& communicator, DeviceExchange* exchange, size_t bytes) {
  if (exchange == nullptr) return absl::UnavailableError("not there");
  return measure_all_gather(*exchange, communicator, bytes, kOperations, kLaunches, Deadline::after(seconds(60)));
}

#if TENSORFOLD_HAVE_NCCL
// NCCL's own sum of fp32, which the product never calls.
class AllReduce {
 public:
  explicit AllReduce(Communicator& communicator) {
    void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    const auto get_id = reinterpret_cast<decltype(&ncclGetUniqueId)>(dlsym(library, "ncclGetUniqueId"));
    const auto init = reinterpret_cast<decltype(&ncclCommInitRank)>(dlsym(library, "ncclCommInitRank"));
    all_reduce_ = reinterpret_cast<decltype(&ncclAllReduce)>(dlsym(library, "ncclAllReduce"));
    ncclUniqueId id;
    std::vector<std::byte> message(sizeof(id));
    if (communicator.rank() == 0 && get_id(&id) == ncclSuccess) std::memcpy(message.data(), &id, sizeof(id));
    if (!communicator.broadcast(0, message, sizeof(id), Deadline::after(seconds(30))).ok()) return;
    std::memcpy(&id, message.data(), sizeof(id));
    if (init(&comm_, communicator.world(), id, communicator.rank()) != ncclSuccess) comm_ = nullptr;
    // First uses set up connections, which a capture forbids.
    float* memory = nullptr;
    if (comm_ == nullptr || cudaMalloc(&memory, 4 << 20) != cudaSuccess) return;
    for (size_t count : {size_t{1024}, size_t{1} << 20})
      all_reduce_(memory, memory, count, ncclFloat, ncclSum, comm_, 0);
    cudaDeviceSynchronize();
    cudaFree(memory);
  }

  absl::StatusOr<double> time(Communicator& communicator, std::byte* memory, size_t bytes) {
    if (comm_ == nullptr) return absl::UnavailableError("no NCCL");
    return measure(communicator, [&](cudaStream_t stream) {
      const bool ok =
          all_reduce_(memory, memory, bytes / sizeof(float), ncclFloat, ncclSum, comm_, stream) == ncclSuccess;
      return ok ? absl::OkStatus() : absl::InternalError("ncclAllReduce");
    });
  }

 private:
  ncclComm_t comm_ = nullptr;
  decltype(&ncclAllReduce) all_reduce_ = nullptr;
};
#else
class AllReduce {
 public:
  explicit AllReduce(Communicator&) {}
  absl::StatusOr<double> time(Communicator&, std::byte*, size_t) { return absl::UnavailableError("no NCCL"); }
};
#endif

absl::Status times(Communicator& communicator, int device) {
  absl::Status status = cuda_status(cudaSetDevice(device), fmt::format("GPU {}", device));
  if (absl::Status all = agree(communicator, status, Deadline::after(seconds(60))); !all.ok()) return all;
  constexpr size_t kMost = size_t{4} << 20;
  void* memory = nullptr;
  status = cuda_status(cudaMalloc(&memory, 5 * kMost), "memory");
  if (status.ok()) status = cuda_status(cudaMemset(memory, 0, 5 * kMost), "memory");
  if (status.ok()) status = cuda_status(cudaDeviceSynchronize(), "memory");
  if (absl::Status all = agree(communicator, status, Deadline::after(seconds(60))); !all.ok()) return all;
  const bool tells = communicator.rank() == 0;
  auto take = [&](absl::StatusOr<std::unique_ptr<DeviceExchange>> made) -> std::unique_ptr<DeviceExchange> {
    absl::Status ready = made.status();
    if (absl::Status all = agree(communicator, ready, Deadline::after(seconds(60))); !all.ok()) {
      if (tells) fmt::print("{}\n", std::string(all.message()));
      return nullptr;
    }
    ready = (*made)->reserve(kMost, Deadline::after(seconds(60)));
    if (!agree(communicator, ready, Deadline::after(seconds(60))).ok()) return nullptr;
    if (tells) fmt::print("{}\n", (*made)->describe());
    return *std::move(made);
  };
  const auto peer = take(create_peer_exchange(communicator, Deadline::after(seconds(60)), int64_t{2} << 20));
  const auto nccl = take(create_nccl_exchange(communicator, Deadline::after(seconds(60))));
  const auto pinned = take(PinnedExchange::create(communicator));
  AllReduce all_reduce(communicator);
  if (tells) {
    fmt::print("{:>10} {:>12} {:>12} {:>12} {:>12} {:>12}\n", "bytes", "peer gather", "peer sum", "nccl gather",
               "pinned", "nccl reduce");
  }
  for (size_t bytes = 4096; bytes <= kMost; bytes *= 2) {
    const auto gather = measure_gather(communicator, peer.get(), bytes);
    const auto sum = measure_sum(communicator, peer.get(), static_cast<std::byte*>(memory), bytes);
    const auto library = measure_gather(communicator, nccl.get(), bytes);
    const auto host = measure_gather(communicator, pinned.get(), bytes);
    const auto reduce = all_reduce.time(communicator, static_cast<std::byte*>(memory), bytes);
    if (tells) {
      fmt::print("{:>10} {} {} {} {} {}\n", bytes, cell(gather), cell(sum), cell(library), cell(host), cell(reduce));
    }
  }
  return communicator.barrier(Deadline::after(seconds(30)));
}

}  // namespace
}  // namespace tensorfold

int main(int argc, char** argv) {
  using namespace tensorfold;
  const int devices[2] = {argc > 2 ? std::atoi(argv[1]) : 0, argc > 2 ? std::atoi(argv[2]) : 1};
  ProcessWorld processes;
  processes.world = 2;
  processes.options = {"posix,cma,self", "", true, {}};
  const std::vector<absl::Status> results = run_ucx_processes(
      processes, [&](Communicator& communicator) { return times(communicator, devices[communicator.rank()]); });
  int failed = 0;
  for (size_t r = 0; r < results.size(); ++r) {
    if (results[r].ok()) continue;
    failed = 1;
    fmt::print(stderr, "rank {}: {}\n", r, results[r].ToString());
  }
  return failed;
}
