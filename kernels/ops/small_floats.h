// The small number formats of weights, decoded: e4m3, e2m1, e8m0, and the halves f16 and bf16; and bf16 rounding.
//
// Sources: OCP 8-bit Floating Point Specification (e4m3: bias 7, no infinities, S.1111.111 is NaN); OCP Microscaling
// Formats specification (e2m1: bias 1, no NaN; e8m0: 2^(code - 127), 255 is NaN). Every value is exact in fp32.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace tensorfold {

inline float float_of_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude =
      exponent == 0
          ? static_cast<float>(mantissa) * 0x1p-9f
          : std::bit_cast<float>(static_cast<uint32_t>(exponent + 120) << 23 | static_cast<uint32_t>(mantissa) << 20);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

/// Of the low 4 bits.
inline float float_of_e2m1(uint8_t code) {
  constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float magnitude = kMagnitudes[code & 7];
  return (code & 8) != 0 ? -magnitude : magnitude;
}

/// 2^(code - 127); code 0 is the subnormal 2^-127.
inline float float_of_e8m0(uint8_t code) {
  if (code == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(code == 0 ? 0x400000u : static_cast<uint32_t>(code) << 23);
}

inline float float_of_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline float float_of_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
}

/// Nearest even, once, from a double: through fp32 rounded to odd, which leaves the second rounding nothing to double.
inline uint16_t bf16_of_double(double value) {
  if (std::isnan(value)) return 0x7fc0;
  float near = static_cast<float>(value);
  uint32_t bits = std::bit_cast<uint32_t>(near);
  if (std::isfinite(near) && static_cast<double>(near) != value) {
    // Towards zero, and then the last bit says that something was cut off.
    if (std::fabs(static_cast<double>(near)) > std::fabs(value)) --bits;
    bits |= 1;
  } else if (std::isinf(near) && !std::isinf(value)) {
    bits = (bits & 0x80000000u) | 0x7f7fffffu;
  }
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/// Nearest even.
inline uint16_t bf16_of_float(float value) { return bf16_of_double(static_cast<double>(value)); }

}  // namespace tensorfold
