#include "worker/model/rope.h"

#include <algorithm>
#include <cmath>

#include "kernels/numerics/math64.h"

namespace tensorfold {
namespace {

constexpr double kTwoPi = 6.283185307179586476925286766559;

// Llama 3.1's scaling: slow wavelengths are stretched by `factor`, fast ones kept, those between mixed linearly.
double llama3_frequency(const RopeConfig& rope, double frequency) {
  const double wavelength = kTwoPi / frequency;
  const double original = static_cast<double>(rope.original_max_positions);
  if (wavelength < original / rope.high_freq_factor) return frequency;
  if (wavelength > original / rope.low_freq_factor) return frequency / rope.factor;
  const double smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return (1.0 - smooth) * frequency / rope.factor + smooth * frequency;
}

// Pair number at which a pair turns `turns` times over the original positions.
double yarn_pair(const RopeConfig& rope, double turns) {
  return static_cast<double>(rope.dims) * log64(static_cast<double>(rope.original_max_positions) / (turns * kTwoPi)) /
         (2.0 * log64(rope.theta));
}

// YaRN: pairs that turn often are kept, slow ones divided by `factor`, those between mixed linearly.
double yarn_frequency(const RopeConfig& rope, int64_t pair, double frequency) {
  const double first = std::max(std::floor(yarn_pair(rope, rope.beta_fast)), 0.0);
  double last = std::min(std::ceil(yarn_pair(rope, rope.beta_slow)), static_cast<double>(rope.dims - 1));
  if (last == first) last += 0.001;
  const double slow = std::clamp((static_cast<double>(pair) - first) / (last - first), 0.0, 1.0);
  return frequency / rope.factor * slow + frequency * (1.0 - slow);
}

}  // namespace

std::vector<float> inverse_frequencies(const RopeConfig& rope) {
  std::vector<float> frequencies;
  for (int64_t i = 0; i < rope.dims / 2; ++i) {
    double frequency = pow64(rope.theta, -2.0 * static_cast<double>(i) / static_cast<double>(rope.dims));
    if (rope.type == RopeType::kLinear) frequency /= rope.factor;
    if (rope.type == RopeType::kLlama3) frequency = llama3_frequency(rope, frequency);
    if (rope.type == RopeType::kYarn) frequency = yarn_frequency(rope, i, frequency);
    frequencies.push_back(static_cast<float>(frequency));
  }
  return frequencies;
}

}  // namespace tensorfold
