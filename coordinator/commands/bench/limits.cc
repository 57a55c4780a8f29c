#include "coordinator/commands/bench/limits.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "kernels/bench/bench_cpu.h"
#include "kernels/cpu/cpu_ops.h"
#if TENSORFOLD_WITH_CUDA
#include <cuda_runtime.h>

#include "kernels/bench/bench_cuda.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#endif

namespace tensorfold {
namespace {

class CpuMeter : public LimitMeter {
 public:
  explicit CpuMeter(const CpuOptions& options) : probe_(options) {}

  absl::Status measure(double seconds) override {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    do {
      probe_.turn();
    } while (std::chrono::steady_clock::now() < end);
    return absl::OkStatus();
  }
  MachineLimits limits() const override { return {probe_.limits().bandwidth, probe_.limits().fma_rate}; }

 private:
  LimitProbe probe_;
};

#if TENSORFOLD_WITH_CUDA
class CudaMeter : public LimitMeter {
 public:
  CudaMeter(int device, int gpus) : device_(device), gpus_(gpus) {}

  absl::Status measure(double seconds) override {
    cuda_ok(cudaSetDevice(device_), "choosing the GPU");
    const CudaLimits now = measure_cuda_limits(seconds);
    const std::string failure = cuda_failure();
    if (!failure.empty() || now.bandwidth <= 0 || now.mma_rate <= 0) {
      return absl::InternalError(
          fmt::format("limits of GPU {}: {}", device_, failure.empty() ? "not measured" : failure));
    }
    best_.bandwidth = std::max(best_.bandwidth, now.bandwidth * gpus_);
    best_.matrix_rate = std::max(best_.matrix_rate, now.mma_rate * gpus_);
    return absl::OkStatus();
  }
  MachineLimits limits() const override { return best_; }

 private:
  int device_;
  int gpus_;
  MachineLimits best_;
};
#endif

// What the kernel thinks can be had without swapping.
int64_t host_memory_available() {
  std::ifstream in("/proc/meminfo");
  std::string key, unit;
  int64_t kib = 0;
  while (in >> key >> kib) {
    if (key == "MemAvailable:") return kib * 1024;
    std::getline(in, unit);
  }
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

}  // namespace

int gpu_of_rank(const BackendOptions& backend, [[maybe_unused]] int rank) {
  if (backend.backend == "cpu") return 0;
#if TENSORFOLD_WITH_CUDA
  if (backend.device < 0) return rank % std::max(1, cuda_device_count());
#endif
  return std::max(0, backend.device);
}

absl::StatusOr<std::unique_ptr<LimitMeter>> make_limit_meter(const BackendOptions& backend, int threads,
                                                             [[maybe_unused]] int gpus) {
  if (backend.backend == "cpu") {
    CpuOptions options;
    options.isa = backend.isa;
    options.threads = threads;
    return std::make_unique<CpuMeter>(options);
  }
#if TENSORFOLD_WITH_CUDA
  if (backend.backend == "cuda") return std::make_unique<CudaMeter>(gpu_of_rank(backend, 0), gpus);
#endif
  return absl::InvalidArgumentError(fmt::format("backend \"{}\" is not in this build", backend.backend));
}

std::string matrix_rate_name(const std::string& backend) { return backend == "cpu" ? "fp32 fma" : "bf16 mma"; }

absl::StatusOr<int64_t> memory_available(const BackendOptions& backend) {
  if (backend.backend == "cpu") return host_memory_available();
#if TENSORFOLD_WITH_CUDA
  size_t free_bytes = 0, all_bytes = 0;
  const int device = gpu_of_rank(backend, 0);
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaMemGetInfo(&free_bytes, &all_bytes);
  if (error != cudaSuccess) {
    return absl::UnavailableError(fmt::format("GPU {}: {}", device, cudaGetErrorString(error)));
  }
  return static_cast<int64_t>(free_bytes);
#else
  return absl::InvalidArgumentError(fmt::format("backend \"{}\" is not in this build", backend.backend));
#endif
}

int64_t kv_value_bytes(const BackendOptions& backend) {
  if (backend.backend == "cpu") return 4;
  return backend.kv_format == "fp8" ? 1 : 2;
}

}  // namespace tensorfold
