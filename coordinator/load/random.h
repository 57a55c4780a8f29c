// Random numbers of a load, the same on every machine and compiler: the standard library's distributions are not.
#pragma once

#include <cstdint>

namespace tensorfold {

/// splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014). One owner.
class LoadRandom {
 public:
  /// Streams of one seed differ from one another.
  explicit LoadRandom(uint64_t seed, uint64_t stream = 0) : state_(mix(seed + kStep) ^ mix(stream * kStep + 1)) {}

  uint64_t next() { return mix(state_ += kStep); }
  /// From 0 to n - 1; n is positive. The bias is below n / 2^64.
  uint64_t below(uint64_t n) { return next() % n; }
  /// In [0, 1).
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  static constexpr uint64_t kStep = 0x9E3779B97F4A7C15;
  static constexpr uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  }
  uint64_t state_;
};

}  // namespace tensorfold
