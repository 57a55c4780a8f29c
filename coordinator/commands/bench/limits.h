// What the machine can do, measured in the same run as what it did. The one place where `bench` knows of backends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/runtime/backend.h"

namespace tensorfold {

struct MachineLimits {
  double bandwidth = 0;    // bytes a second read from the memory that holds the weights
  double matrix_rate = 0;  // floating-point operations a second, a multiply-add is two
};

/// Thread-safety: one thread.
class LimitMeter {
 public:
  virtual ~LimitMeter() = default;
  /// Measures for about `seconds`, at least one turn. Errors: the device's.
  virtual absl::Status measure(double seconds) = 0;
  /// The best so far.
  virtual MachineLimits limits() const = 0;
};

/// The GPU that a rank uses: the one that the options state, or its number modulo the GPUs there are. 0 on the CPU.
int gpu_of_rank(const BackendOptions& backend, int rank);

/// The limits of all ranks together: on the CPU of `threads` threads, on GPUs of rank 0's times `gpus`. InvalidArgument
/// for a backend that this build lacks.
absl::StatusOr<std::unique_ptr<LimitMeter>> make_limit_meter(const BackendOptions& backend, int threads, int gpus);

/// What the matrix rate counts: "fp32 fma", "bf16 mma".
std::string matrix_rate_name(const std::string& backend);

/// Bytes of memory that rank 0 could still take on its device.
absl::StatusOr<int64_t> memory_available(const BackendOptions& backend);

/// Bytes of a key's or value's number in the cache; on GPUs by the format, whose scales are not counted.
int64_t kv_value_bytes(const BackendOptions& backend);

}  // namespace tensorfold
