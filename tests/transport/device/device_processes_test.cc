// Ranks as forked processes. The parent never touches CUDA or UCX: neither survives a fork. So it is the children that
// look for GPUs, and a child without one says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "tests/transport/device/exchange_checks.h"
#include "tests/transport/ucx_processes.h"
#include "transport/device/choose_exchange.h"
#include "transport/device/cuda_support.h"

namespace tensorfold {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

constexpr const char* kSkip = "skipped: ";

absl::Status need_gpus(int wanted) {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count >= wanted) return absl::OkStatus();
  return absl::UnimplementedError(std::string(kSkip) + "wants " + std::to_string(wanted) +
                                  " CUDA devices, this machine has " + std::to_string(count));
}

struct Case {
  std::string exchange;
  int world;
  std::string tls;
};

class DeviceProcesses : public testing::TestWithParam<Case> {
 protected:
  // Every rank takes the exchange through the chooser, as workers do, and runs `body`.
  std::vector<absl::Status> run(const std::function<absl::Status(Communicator&, DeviceExchange&)>& body) {
    const bool shared = GetParam().exchange == "pinned";
    ProcessWorld processes;
    processes.world = GetParam().world;
    processes.options = {GetParam().tls, GetParam().tls == "tcp" ? "lo" : "", true, {}};
    return run_ucx_processes(processes, [&](Communicator& communicator) -> absl::Status {
      if (absl::Status status = need_gpus(shared ? 1 : GetParam().world); !status.ok()) return status;
      auto exchange = choose_exchange(communicator, GetParam().exchange, shared ? 0 : communicator.rank(), nullptr);
      if (!exchange.ok()) return exchange.status();
      absl::Status status = (*exchange)->reserve(kLargestMessage, Deadline::after(seconds(60)));
      if (!status.ok()) return status;
      return body(communicator, **exchange);
    });
  }

  static bool skipped(const std::vector<absl::Status>& results) {
    const std::string message(results[0].message());
    return message.rfind(kSkip, 0) == 0 || message.find("libnccl.so.2 cannot be loaded") != std::string::npos;
  }
};

// The same checks as between threads, with memory handles and sockets between the ranks.
TEST_P(DeviceProcesses, AllChecks) {
  const std::vector<absl::Status> results = run([](Communicator& communicator, DeviceExchange& exchange) {
    absl::Status status = check_sizes_of_all(communicator, exchange);
    if (status.ok()) status = check_graph(communicator, exchange, 1000);
    if (status.ok() && exchange.peer_view() != nullptr) status = check_sum(communicator, exchange);
    return status;
  });
  if (skipped(results)) GTEST_SKIP() << results[0].message();
  for (size_t r = 0; r < results.size(); ++r) EXPECT_TRUE(results[r].ok()) << "rank " << r << ": " << results[r];
}

// A process that dies while another waits for it on the GPU ends that wait by the deadline, by name.
TEST_P(DeviceProcesses, DeadPeerIsNamed) {
  if (GetParam().world != 2) GTEST_SKIP() << "two ranks are enough";
  const std::vector<absl::Status> results =
      run([](Communicator& communicator, DeviceExchange& exchange) -> absl::Status {
        absl::StatusOr<OwnStream> stream = OwnStream::create();
        if (!stream.ok()) return stream.status();
        void* memory = nullptr;
        if (cudaMalloc(&memory, 3 * 4096) != cudaSuccess) return absl::InternalError("no memory");
        const std::vector<size_t> sizes(2, 4096);
        if (absl::Status status = communicator.barrier(Deadline::after(seconds(60))); !status.ok()) return status;
        if (communicator.rank() == 1) {
          std::this_thread::sleep_for(milliseconds(300));
          kill(getpid(), SIGKILL);
        }
        exchange.set_deadline(Deadline::after(seconds(3)));
        absl::Status status = exchange.all_gather(stream->get(), memory, sizes, static_cast<std::byte*>(memory) + 4096);
        if (!status.ok()) return status;
        status = wait_for_stream(stream->get(), Deadline::after(seconds(20)), "stream");
        if (!status.ok()) return absl::InternalError("the stream hung: " + std::string(status.message()));
        return exchange.status();
      });
  if (skipped(results)) GTEST_SKIP() << results[0].message();
  EXPECT_FALSE(results[0].ok());
  EXPECT_THAT(std::string(results[0].message()), HasSubstr("rank 1"));
  EXPECT_FALSE(results[1].ok());
}

INSTANTIATE_TEST_SUITE_P(Ways, DeviceProcesses,
                         testing::Values(Case{"pinned", 2, "posix,cma,self"}, Case{"pinned", 3, "posix,cma,self"},
                                         Case{"pinned", 2, "tcp"}, Case{"peer", 2, "posix,cma,self"},
                                         Case{"peer", 4, "posix,cma,self"}, Case{"nccl", 2, "posix,cma,self"}),
                         [](const testing::TestParamInfo<Case>& info) {
                           return info.param.exchange + "_" + std::to_string(info.param.world) + "_" +
                                  (info.param.tls == "tcp" ? "tcp" : "shm");
                         });

}  // namespace
}  // namespace tensorfold
