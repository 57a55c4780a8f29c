#include "kernels/cuda/device.h"

#include <algorithm>
#include <array>
#include <mutex>

namespace tensorfold {
namespace {

thread_local std::string first_failure;

constexpr int kMostDevices = 64;

// The stream on which a device's memory is handed out, in the order of nothing else; null without memory pools.
cudaStream_t allocation_stream(int device) {
  static std::mutex mutex;
  static std::array<cudaStream_t, kMostDevices> streams{};
  static std::array<bool, kMostDevices> asked{};
  const std::lock_guard lock(mutex);
  const size_t index = static_cast<size_t>(device);
  if (!asked[index]) {
    asked[index] = true;
    int pools = 0;
    cudaMemPool_t pool = nullptr;
    if (cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, device) == cudaSuccess && pools != 0 &&
        cudaDeviceGetDefaultMemPool(&pool, device) == cudaSuccess) {
      uint64_t keep = UINT64_MAX;  // what was freed once is given out again, not to the system and back
      cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep);
      if (cudaStreamCreateWithFlags(&streams[index], cudaStreamNonBlocking) != cudaSuccess) streams[index] = nullptr;
    }
  }
  return streams[index];
}

}  // namespace

bool cuda_ok(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return true;
  if (first_failure.empty()) {
    first_failure = std::string(what) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")";
  }
  return false;
}

std::string cuda_failure() {
  std::string failure;
  failure.swap(first_failure);
  return failure;
}

void* device_allocate(int64_t bytes, const char* what) {
  int device = 0;
  void* memory = nullptr;
  if (!cuda_ok(cudaGetDevice(&device), what)) return nullptr;
  const size_t size = static_cast<size_t>(std::max<int64_t>(bytes, 16));
  const cudaStream_t stream = device < kMostDevices ? allocation_stream(device) : nullptr;
  if (stream == nullptr) return cuda_ok(cudaMalloc(&memory, size), what) ? memory : nullptr;
  if (!cuda_ok(cudaMallocAsync(&memory, size, stream), what)) return nullptr;
  return cuda_ok(cudaStreamSynchronize(stream), what) ? memory : nullptr;
}

void device_free(void* memory) {
  if (memory != nullptr) cudaFree(memory);
}

}  // namespace tensorfold
