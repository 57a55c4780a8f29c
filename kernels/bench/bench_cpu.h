// Measures what the CPU can do and what the kernels make of it, in the same run.
//
// Limits: read bandwidth of memory (all threads sum an array far larger than the caches) and the fp32 FMA rate (all
// threads, chains in registers). A product's roofline time is the larger of bytes over bandwidth and operations over
// rate. Limits and products take turns and the best turn of each counts, so that a machine busy with other things slows
// both.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_ops.h"

namespace tensorfold {

struct KernelTable;

struct CpuLimits {
  double bandwidth = 0;  // bytes a second
  double fma_rate = 0;   // floating-point operations a second; an fma is two
};

/// `copies` different weights [out, cols], each times [rows, cols].
struct MatmulShape {
  std::string name;
  int64_t out = 0;
  int64_t cols = 0;
  int64_t copies = 1;
};

/// How a case's weights are stored: `source` without data, rows and columns.
struct StoredFormat {
  const char* name = "bf16";
  MatrixSource source = {.format = WeightFormat::kBf16};
};
/// Those that the CPU reads as they are stored: bf16, f32, MLX affine 4-bit, FP8 and FP4 of several layouts.
std::vector<StoredFormat> stored_formats();

/// All products of a pass with `rows` input rows.
struct MatmulCase {
  std::string name;
  std::vector<MatmulShape> shapes;
  int64_t rows = 1;
  StoredFormat format = {};
};

struct MatmulTimes {
  double seconds = 0;     // best pass
  double bytes = 0;       // weights read
  double operations = 0;  // floating-point operations
  /// Shares of the limits; 1 is the limit itself.
  double of_bandwidth(const CpuLimits& limits) const { return bytes / seconds / limits.bandwidth; }
  double of_fma_rate(const CpuLimits& limits) const { return operations / seconds / limits.fma_rate; }
  /// The roofline's time over the measured time.
  double of_roofline(const CpuLimits& limits) const;
};

/// Measures the limits in turns between other work. Holds 256 MiB of memory.
class LimitProbe {
 public:
  /// The options must be ones that make_cpu_ops accepts; their pool is used if set.
  explicit LimitProbe(const CpuOptions& options);
  ~LimitProbe();
  /// One turn of each limit, a few tens of milliseconds.
  void turn();
  /// The best turns so far; at least one turn must have been.
  CpuLimits limits() const { return limits_; }

 private:
  class Bandwidth;

  const KernelTable* kernels_;
  std::shared_ptr<ThreadPool> pool_;
  std::unique_ptr<Bandwidth> bandwidth_;
  std::vector<double> operations_;  // of one call, written by the worker that made it
  CpuLimits limits_;
};

struct CpuReport {
  CpuLimits limits;
  std::vector<MatmulTimes> times;  // one a case
};

/// Runs limits and cases in turn for about `seconds` altogether, at least three turns. The options must
/// be ones that make_cpu_ops accepts.
CpuReport measure_cpu(const CpuOptions& options, std::span<const MatmulCase> cases, double seconds);

/// The matrix products of a 135M-parameter llama (hidden 576, 9 heads of 64, 3 key/value heads, 1536, `layers` of its
/// 30 layers, 49152 words), with down_proj in the slices that the contract prescribes.
std::vector<MatmulShape> small_llama_shapes(int64_t layers, bool head);

}  // namespace tensorfold
