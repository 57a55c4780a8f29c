// Activations that a model rounds to small formats as part of its definition (deepseek_v41): the values that come back,
// in fp32. One definition for every backend.
//
// Sources: the formats are those of small_floats.h; the scales are the model's own (docs/families/deepseek_v41.md).
// Everything here is exact or rounded once, to the nearest, ties to the even code: the same bits on every machine.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/ops/small_floats.h"

namespace tensorfold {

/// kE4m3By32: e4m3 with a power of two for 32 values. kE2m1By16: e2m1 with an e4m3 scale for 16. kE2m1By32: e2m1 with a
/// power of two for 32.
enum class FakeFormat : uint8_t { kE4m3By32, kE2m1By16, kE2m1By32 };

constexpr int64_t fake_group(FakeFormat format) { return format == FakeFormat::kE2m1By16 ? 16 : 32; }

/// The nearest e4m3 number to `x`, at most 448 in magnitude. NaN stays NaN.
inline float nearest_e4m3(float x) {
  const float magnitude = std::fabs(x);
  if (!(magnitude < 448.0f)) return std::isnan(x) ? x : std::copysign(448.0f, x);
  // 3 bits after the first; below 2^-6 they are those of 2^-6. A step of 2^e is added and taken away again in a sum
  // whose unit in the last place it is: that rounds to it, ties to even.
  const int exponent = magnitude < 0x1p-6f ? -6 : static_cast<int>(std::bit_cast<uint32_t>(magnitude) >> 23) - 127;
  const float shift = std::ldexp(1.5f, exponent - 3 + 23);
  const float rounded = (magnitude + shift) - shift;
  return std::copysign(rounded, x);
}

/// The nearest e2m1 number to `x`, at most 6 in magnitude. NaN stays NaN.
inline float nearest_e2m1(float x) {
  const float magnitude = std::fabs(x);
  if (std::isnan(x)) return x;
  float rounded = 6.0f;
  if (magnitude <= 0.25f) {
    rounded = 0.0f;
  } else if (magnitude < 0.75f) {
    rounded = 0.5f;
  } else if (magnitude <= 1.25f) {
    rounded = 1.0f;
  } else if (magnitude < 1.75f) {
    rounded = 1.5f;
  } else if (magnitude <= 2.5f) {
    rounded = 2.0f;
  } else if (magnitude < 3.5f) {
    rounded = 3.0f;
  } else if (magnitude <= 5.0f) {
    rounded = 4.0f;
  }
  return std::copysign(rounded, x);
}

/// The smallest power of two that is not below `x`, a positive normal number of at most 2^127.
inline float power_of_two_above(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7fffffu) & 0xff800000u);
}

/// The scale of a group whose largest magnitude is `most`. Floors keep it from vanishing.
inline float fake_scale(FakeFormat format, float most) {
  switch (format) {
    case FakeFormat::kE4m3By32:
      return power_of_two_above((most < 1e-4f ? 1e-4f : most) / 448.0f);
    case FakeFormat::kE2m1By16: {
      constexpr float kLeast = 6.0f * 0x1p-9f;  // whose scale is the smallest e4m3 number
      return nearest_e4m3((most < kLeast ? kLeast : most) / 6.0f);
    }
    case FakeFormat::kE2m1By32: {
      constexpr float kLeast = 6.0f * 0x1p-126f;
      return power_of_two_above((most < kLeast ? kLeast : most) / 6.0f);
    }
  }
  return 1.0f;
}

/// One group of fake_group(format) values in place. A group with a value that is no finite number becomes NaN.
inline void fake_quantise_group(FakeFormat format, float* x) {
  const int64_t count = fake_group(format);
  float most = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(x[i]);
    finite = finite && magnitude <= 3.4028234e38f;
    most = magnitude > most ? magnitude : most;
  }
  if (!finite) {
    for (int64_t i = 0; i < count; ++i) x[i] = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const float scale = fake_scale(format, most);
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = x[i] / scale;
    x[i] = (format == FakeFormat::kE4m3By32 ? nearest_e4m3(scaled) : nearest_e2m1(scaled)) * scale;
  }
}

}  // namespace tensorfold
