#include "worker/model/rope.h"

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

}  // namespace

std::vector<float> inverse_frequencies(const ModelConfig& config) {
  const RopeConfig& rope = config.rope;
  std::vector<float> frequencies;
  for (int64_t i = 0; i < rope.dims / 2; ++i) {
    double frequency = pow64(rope.theta, -2.0 * static_cast<double>(i) / static_cast<double>(rope.dims));
    if (rope.type == RopeType::kLinear) frequency /= rope.factor;
    if (rope.type == RopeType::kLlama3) frequency = llama3_frequency(rope, frequency);
    frequencies.push_back(static_cast<float>(frequency));
  }
  return frequencies;
}

}  // namespace tensorfold
