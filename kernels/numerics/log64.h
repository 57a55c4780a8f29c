// log64 (math64.h) for callers that want it inline, GPUs among them.
#pragma once

#include <cmath>

#include "kernels/numerics/host_device.h"

namespace tensorfold {

// ln 2 as a sum of doubles, the larger first.
inline constexpr double kLn2Hi = 0x1.62e42fefa39efp-1;
inline constexpr double kLn2Lo = 0x1.abc9e3b39803fp-56;

TF_HOST_DEVICE inline double log64_inline(double x) {
  if (x != x || x < 0.0) return double_of_bits(0x7ff8000000000000u);
  if (x == 0.0) return double_of_bits(0xfff0000000000000u);
  if (x == double_of_bits(0x7ff0000000000000u)) return x;
  int64_t exponent = 0;
  if (x < 0x1p-1022) {
    x *= 0x1p54;
    exponent = -54;
  }
  // x = 2^exponent * m with m in [sqrt(1/2), sqrt(2)), so that log m has no cancellation against exponent * ln 2.
  uint64_t bits = bits_of_double(x);
  const uint64_t shifted = bits + (0x3ff0000000000000u - 0x3fe6a09e667f3bcdu);
  exponent += static_cast<int64_t>(shifted >> 52) - 1023;
  bits = (shifted & 0x000fffffffffffffu) + 0x3fe6a09e667f3bcdu;
  const double f = double_of_bits(bits) - 1.0;
  // log(1 + f) = f - (f^2/2 - s * (f^2/2 + R)), s = f / (2 + f), R = 2 s^2 (1/3 + s^2/5 + s^4/7 + ...).
  constexpr double kC[] = {2.0 / 23, 2.0 / 21, 2.0 / 19, 2.0 / 17, 2.0 / 15, 2.0 / 13,
                           2.0 / 11, 2.0 / 9,  2.0 / 7,  2.0 / 5,  2.0 / 3};
  const double s = f / (2.0 + f);
  const double z = s * s;
  double series = kC[0];
  for (int i = 1; i < 11; ++i) series = std::fma(series, z, kC[i]);
  const double remainder = z * series;
  const double half_square = 0.5 * f * f;
  const double n = static_cast<double>(exponent);
  const double tail = half_square - std::fma(s, half_square + remainder, n * kLn2Lo);
  return std::fma(n, kLn2Hi, f - tail);
}

}  // namespace tensorfold
