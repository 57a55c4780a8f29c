#include "transport/device/cuda_support.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>
#include <thread>
#include <vector>

#include "kernels/cuda/device.h"

namespace tensorfold {

absl::Status cuda_status(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  const std::string message = fmt::format("{}: {} ({})", what, cudaGetErrorName(error), cudaGetErrorString(error));
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

absl::Status launch_status() {
  const std::string failure = cuda_failure();
  if (failure.empty()) return absl::OkStatus();
  cudaGetLastError();
  return absl::InternalError(failure);
}

absl::Status wait_for_stream(cudaStream_t stream, Deadline deadline, const std::string& what) {
  for (int polls = 0;; ++polls) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state == cudaSuccess) return absl::OkStatus();
    if (state != cudaErrorNotReady) return cuda_status(state, what);
    if (deadline.passed()) return absl::DeadlineExceededError(fmt::format("{}: the GPU was not done in time", what));
    if (polls > 2000) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

absl::StatusOr<PinnedPointer<std::byte>> allocate_pinned(size_t bytes, const std::string& what) {
  void* memory = nullptr;
  absl::Status status = cuda_status(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
                                    fmt::format("{}: {} bytes of pinned memory", what, bytes));
  if (!status.ok()) return status;
  std::memset(memory, 0, bytes);
  return PinnedPointer<std::byte>(static_cast<std::byte*>(memory));
}

absl::StatusOr<OwnStream> OwnStream::create() {
  cudaStream_t stream = nullptr;
  if (absl::Status status = cuda_status(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
      !status.ok()) {
    return status;
  }
  return OwnStream(stream);
}

absl::StatusOr<DeviceIdentity> device_identity(int device) {
  DeviceIdentity identity;
  std::string host;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> host;
  if (host.empty()) {
    char name[64] = {};
    gethostname(name, sizeof(name) - 1);
    host = name;
  }
  host.copy(identity.host.data(), identity.host.size() - 1);
  absl::Status status =
      cuda_status(cudaDeviceGetPCIBusId(identity.pci.data(), static_cast<int>(identity.pci.size()), device),
                  fmt::format("asking for the PCI address of device {}", device));
  if (!status.ok()) return status;
  // CUDA does not survive a fork, so a process that gets here has its own life; the process id tells forks apart.
  static const uint64_t chance = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  identity.process = chance ^ (static_cast<uint64_t>(getpid()) * 0x9E3779B97F4A7C15ULL);
  return identity;
}

absl::Status agree(Communicator& communicator, const absl::Status& mine, Deadline deadline) {
  struct Record {
    char failed = 0;
    char message[511] = {};
  };
  Record record;
  if (!mine.ok()) {
    record.failed = 1;
    std::string(mine.message()).copy(record.message, sizeof(record.message) - 1);
  }
  const size_t world = static_cast<size_t>(communicator.world());
  std::vector<Record> all(world);
  const std::vector<size_t> sizes(world, sizeof(Record));
  absl::Status gathered = communicator.all_gather(std::as_bytes(std::span(&record, 1)), sizes,
                                                  std::as_writable_bytes(std::span(all)), deadline);
  if (!gathered.ok()) return gathered;
  for (size_t r = 0; r < world; ++r) {
    if (all[r].failed == 0) continue;
    all[r].message[sizeof(all[r].message) - 1] = 0;
    return absl::FailedPreconditionError(
        fmt::format("rank {} ({}): {}", r, communicator.label(static_cast<int>(r)), all[r].message));
  }
  return absl::OkStatus();
}

absl::Status check_sizes(std::span<const size_t> sizes, int world, const char* what) {
  if (sizes.size() == static_cast<size_t>(world)) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format("{}: {} sizes for {} ranks", what, sizes.size(), world));
}

}  // namespace tensorfold
