#include "kernels/numerics/math64.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/numerics/log64.h"

namespace tensorfold {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Adding and subtracting 1.5 * 2^52 rounds to the nearest integer, ties to even, for |x| < 2^51.
constexpr double kRoundMagic = 0x1.8p52;

double round_to_integer(double x) { return (x + kRoundMagic) - kRoundMagic; }

// pi/2 as a sum of doubles, largest first.
constexpr double kLog2E = 0x1.71547652b82fep0;
constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;
constexpr double kHalfPi1 = 0x1.921fb54442d18p0;
constexpr double kHalfPi2 = 0x1.1a62633145c07p-54;
constexpr double kHalfPi3 = -0x1.f1976b7ed8fbcp-110;

double power_of_two(int64_t n) { return std::bit_cast<double>(static_cast<uint64_t>(n + 1023) << 52); }

// x * 2^n in two exact factors, so that a subnormal result is rounded once.
double scale(double x, int64_t n) {
  const int64_t half = n / 2;
  return x * power_of_two(half) * power_of_two(n - half);
}

// Horner's rule from the highest coefficient, one fma a step.
template <int N>
double horner(const double (&coefficients)[N], double x) {
  double sum = coefficients[0];
  for (int i = 1; i < N; ++i) sum = std::fma(sum, x, coefficients[i]);
  return sum;
}

// (sin(hi + lo) - hi) and cos(hi + lo) for |hi| <= 0.79, from the Taylor series.
double sin_kernel(double hi, double lo) {
  static constexpr double kC[] = {
      1.0 / 355687428096000.0, -1.0 / 1307674368000.0, 1.0 / 6227020800.0, -1.0 / 39916800.0,
      1.0 / 362880.0,          -1.0 / 5040.0,          1.0 / 120.0,        -1.0 / 6.0};
  const double z = hi * hi;
  const double lo_term = std::fma(-0.5 * z, lo, lo);  // lo * cos(hi), to the precision that lo deserves
  return hi + std::fma(hi * z, horner(kC, z), lo_term);
}

double cos_kernel(double hi, double lo) {
  static constexpr double kC[] = {
      -1.0 / 6402373705728000.0, 1.0 / 20922789888000.0, -1.0 / 87178291200.0, 1.0 / 479001600.0,
      -1.0 / 3628800.0,          1.0 / 40320.0,          -1.0 / 720.0,         1.0 / 24.0};
  const double z = hi * hi;
  const double half = 0.5 * z;
  const double head = 1.0 - half;
  const double head_error = (1.0 - head) - half;
  const double half_error = std::fma(hi, hi, -z) * -0.5;
  return head + (head_error + half_error + std::fma(z * z, horner(kC, z), -hi * lo));
}

}  // namespace

double exp64(double x) {
  if (x != x) return x;
  if (x > 709.79) return kInf;
  if (x < -745.2) return 0.0;
  static constexpr double kC[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                  1.0 / 362880.0,     1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,
                                  1.0 / 120.0,        1.0 / 24.0,        1.0 / 6.0,        0.5};
  const double n = round_to_integer(x * kLog2E);
  const double r = std::fma(-n, kLn2Lo, std::fma(-n, kLn2Hi, x));
  const double p = 1.0 + std::fma(r * r, horner(kC, r), r);
  return scale(p, static_cast<int64_t>(n));
}

double log64(double x) { return log64_inline(x); }

void sincos64(double x, double* sine, double* cosine) {
  if (!(x >= -0x1p31 && x <= 0x1p31)) {
    *sine = *cosine = kNan;
    return;
  }
  // x - n * pi/2 as hi + lo. The first fma is exact: both sides are multiples of 2^-53 and the result is below 1.
  const double n = round_to_integer(x * kTwoOverPi);
  const double r = std::fma(-n, kHalfPi1, x);
  const double w = n * kHalfPi2;
  const double w_error = std::fma(n, kHalfPi2, -w);
  const double hi0 = r - w;
  const double back = r - hi0;
  const double difference_error = (r - (hi0 + back)) + (back - w);
  const double lo0 = std::fma(-n, kHalfPi3, difference_error - w_error);
  const double hi = hi0 + lo0;
  const double lo = (hi0 - hi) + lo0;
  const double s = sin_kernel(hi, lo);
  const double c = cos_kernel(hi, lo);
  switch (static_cast<int64_t>(n) & 3) {
    case 0:
      *sine = s, *cosine = c;
      break;
    case 1:
      *sine = c, *cosine = -s;
      break;
    case 2:
      *sine = -s, *cosine = -c;
      break;
    default:
      *sine = -c, *cosine = s;
      break;
  }
}

double pow64(double base, double exponent) { return exp64(exponent * log64(base)); }

}  // namespace tensorfold
