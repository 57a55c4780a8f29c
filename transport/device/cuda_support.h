// CUDA errors as statuses, and waits that end.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/communicator.h"
#include "transport/base/deadline.h"

namespace tensorfold {

/// Internal with `what` and CUDA's words; ResourceExhausted if it is memory that is lacking. Clears CUDA's own last
/// error.
absl::Status cuda_status(cudaError_t error, const std::string& what);

/// The same from cuda_failure(): what a launch function of kernels/cuda has remembered on this thread.
absl::Status launch_status();

/// Waits for the stream until the deadline.
absl::Status wait_for_stream(cudaStream_t stream, Deadline deadline, const std::string& what);

struct FreeDevice {
  void operator()(void* memory) const { cudaFree(memory); }
};
struct FreePinned {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};
template <typename T>
using DevicePointer = std::unique_ptr<T, FreeDevice>;
template <typename T>
using PinnedPointer = std::unique_ptr<T, FreePinned>;

/// Pinned memory mapped into all devices of this process, zeroed.
absl::StatusOr<PinnedPointer<std::byte>> allocate_pinned(size_t bytes, const std::string& what);

/// A stream for a scope.
class OwnStream {
 public:
  static absl::StatusOr<OwnStream> create();
  OwnStream(OwnStream&& other) noexcept : stream_(other.stream_) { other.stream_ = nullptr; }
  OwnStream& operator=(OwnStream&&) = delete;
  ~OwnStream() {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  cudaStream_t get() const { return stream_; }

 private:
  explicit OwnStream(cudaStream_t stream) : stream_(stream) {}
  cudaStream_t stream_;
};

/// Which machine, process and GPU a rank has, to be sent to the other ranks as bytes.
struct DeviceIdentity {
  std::array<char, 64> host{};  // the kernel's boot id: equal in all containers of a machine
  std::array<char, 24> pci{};   // "0000:1b:00.0"
  uint64_t process = 0;         // random for each process, and not inherited by a fork
};
absl::StatusOr<DeviceIdentity> device_identity(int device);
inline bool same_host(const DeviceIdentity& a, const DeviceIdentity& b) { return a.host == b.host; }
inline bool same_gpu(const DeviceIdentity& a, const DeviceIdentity& b) { return a.host == b.host && a.pci == b.pci; }

/// Every rank tells how it went: OK if all are OK, else FailedPrecondition with the first failed rank's words, the same
/// on all ranks. An error of the communicator itself is returned as it is.
absl::Status agree(Communicator& communicator, const absl::Status& mine, Deadline deadline);

/// InvalidArgument unless there are `world` sizes.
absl::Status check_sizes(std::span<const size_t> sizes, int world, const char* what);

}  // namespace tensorfold
