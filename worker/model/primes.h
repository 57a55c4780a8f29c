// Primes, for tables of hashed n-grams.
#pragma once

#include <cstdint>

namespace tensorfold {

/// The smallest prime above `n`; n below 2^31.
inline int64_t next_prime(int64_t n) {
  const auto is_prime = [](int64_t x) {
    if (x < 2 || x % 2 == 0) return x == 2;
    for (int64_t d = 3; d * d <= x; d += 2) {
      if (x % d == 0) return false;
    }
    return true;
  };
  do ++n;
  while (!is_prime(n));
  return n;
}

}  // namespace tensorfold
