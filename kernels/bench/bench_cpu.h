// Measures what the CPU can do and what the kernels make of it, in the same run.
//
// Limits: read bandwidth of memory (all threads sum an array far larger than the caches) and the fp32 FMA rate (all
// threads, chains in registers). A matmul's roofline time is the larger of bytes over bandwidth and operations over rate.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_ops.h"

namespace tensorfold {

struct CpuLimits {
  double bandwidth = 0;  // bytes a second, best of several
  double fma_rate = 0;   // floating-point operations a second (an fma is two), best of several
};
/// `seconds`: about how long to measure each limit.
CpuLimits measure_limits(const CpuOptions& options, double seconds);

/// One product [rows, cols] x [out, cols]^T, `copies` different weights of that shape a pass.
struct MatmulShape {
  std::string name;
  int64_t out = 0;
  int64_t cols = 0;
  int64_t copies = 1;
};

struct MatmulTimes {
  double seconds = 0;   // best pass
  double bytes = 0;     // weights read
  double operations = 0;
  /// The roofline's time over the measured time: 1 is the limit.
  double of_roofline(const CpuLimits& limits) const;
  double of_bandwidth(const CpuLimits& limits) const { return bytes / seconds / limits.bandwidth; }
  double of_fma_rate(const CpuLimits& limits) const { return operations / seconds / limits.fma_rate; }
};
/// All shapes one after another with random bf16 weights, `rows` input rows; the best of passes run for about `seconds`.
MatmulTimes measure_matmuls(const CpuOptions& options, std::span<const MatmulShape> shapes, int64_t rows, double seconds);

/// The matrix products of a 135M-parameter llama (hidden 576, 9 heads of 64, 3 key/value heads, 1536, 30 layers, 49152
/// words), with down_proj in the slices that the contract prescribes.
std::vector<MatmulShape> small_llama_shapes();

}  // namespace tensorfold
