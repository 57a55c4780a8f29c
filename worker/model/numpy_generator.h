// numpy.random.default_rng(seed).integers(0, bound): models whose tables were hashed with its numbers need the same
// ones.
//
// Sources: O'Neill, "PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms" (2014), the 128-bit
// generator with XSL-RR output; NumPy's documentation of SeedSequence; Lemire, "Fast Random Integer Generation in an
// Interval" (2019).
#pragma once

#include <cstdint>

namespace tensorfold {

/// One stream of numbers. Not thread-safe.
class NumpyGenerator {
 public:
  explicit NumpyGenerator(uint64_t seed);
  /// 64 random bits.
  uint64_t next();
  /// Uniform in [0, bound). NumPy takes another way for bounds up to 2^32; those are not drawn here.
  uint64_t below(uint64_t bound);

 private:
  __extension__ using Wide = unsigned __int128;
  Wide state_ = 0;
  Wide increment_ = 0;
};

}  // namespace tensorfold
