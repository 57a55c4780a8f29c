// Latencies between GPU memories, by every way that a world can go.
#include <fmt/format.h>

#include "coordinator/commands/bench/link_bench.h"
#include "transport/device/choose_exchange.h"

namespace tensorfold {

absl::Status bench_device_links(Communicator& communicator, int device, std::vector<LinkFigure>* figures) {
  constexpr int kOperations = 32, kLaunches = 50;
  const auto soon = [] { return Deadline::after(std::chrono::seconds(60)); };
  for (const char* way : {"peer", "nccl", "pinned"}) {
    absl::StatusOr<std::unique_ptr<DeviceExchange>> exchange = choose_exchange(communicator, way, device, nullptr);
    // Impossible here (NCCL wants a GPU a rank), and all ranks are told so.
    if (absl::IsFailedPrecondition(exchange.status())) continue;
    if (!exchange.ok()) return exchange.status();
    for (const size_t kib : {4, 16, 64, 1024}) {
      const absl::StatusOr<double> us =
          measure_all_gather(**exchange, communicator, kib << 10, kOperations, kLaunches, soon());
      if (!us.ok()) return us.status();
      const std::string size = kib < 1024 ? fmt::format("{} KiB", kib) : "1 MiB";
      figures->push_back({fmt::format("{} between GPUs, {} a rank", way, size), *us, 0});
    }
    exchange->reset();  // before the barrier: freeing mapped memory waits for the kernels of the process's other ranks
    if (absl::Status status = communicator.barrier(soon()); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace tensorfold
