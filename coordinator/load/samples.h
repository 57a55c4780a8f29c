// Measured values and their percentiles, in bounded memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "coordinator/load/random.h"

namespace tensorfold {

/// Of at least one value; all zero for none.
struct SampleSummary {
  uint64_t count = 0;
  double mean = 0;
  double p50 = 0;
  double p90 = 0;
  double p99 = 0;
  double max = 0;
};

/// Nearest rank: the smallest value that at least `share` (0 to 1] of all values do not exceed. Always one of the
/// values. `values` may be in any order and is sorted; not empty.
double percentile(std::span<double> values, double share);

/// Count, mean and largest are of all values. Percentiles too, up to kKept values; of more, a uniform sample of so many
/// is kept (reservoir sampling, Vitter's algorithm R). One owner.
class Samples {
 public:
  static constexpr size_t kKept = size_t{1} << 20;

  explicit Samples(size_t kept = kKept) : most_(kept) {}
  void add(double value);
  SampleSummary summary() const;

 private:
  size_t most_;
  uint64_t count_ = 0;
  double sum_ = 0;
  double max_ = 0;
  std::vector<double> kept_;
  LoadRandom random_{1};
};

}  // namespace tensorfold
