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

// The dim (of dims / 2, fractional) whose wavelength fits `turns` times into yarn's original context.
double yarn_dim(const RopeConfig& rope, double turns) {
  const double wavelength = static_cast<double>(rope.original_max_positions) / turns;
  return static_cast<double>(rope.dims) * log64(wavelength / kTwoPi) / (2.0 * log64(rope.theta));
}

// Yarn's bounds: dims up to `low` are kept, dims from `high` are slowed by the factor.
struct YarnRange {
  double low = 0;
  double high = 0;
};

YarnRange yarn_range(const RopeConfig& rope) {
  YarnRange range = {yarn_dim(rope, rope.beta_fast), yarn_dim(rope, rope.beta_slow)};
  if (rope.truncate) range = {std::floor(range.low), std::ceil(range.high)};
  range.low = std::max(range.low, 0.0);
  range.high = std::min(range.high, static_cast<double>(rope.dims - 1));
  if (range.low == range.high) range.high += 0.001;
  return range;
}

double yarn_frequency(const RopeConfig& rope, const YarnRange& range, int64_t dim, double frequency) {
  const double slowed = std::clamp((static_cast<double>(dim) - range.low) / (range.high - range.low), 0.0, 1.0);
  return frequency / rope.factor * slowed + frequency * (1.0 - slowed);
}

double yarn_scale(double factor, double weight) { return factor <= 1.0 ? 1.0 : 0.1 * weight * log64(factor) + 1.0; }

}  // namespace

double rope_attention_factor(const ModelConfig& config) {
  const RopeConfig& rope = config.rope;
  if (rope.type != RopeType::kYarn) return 1.0;
  if (rope.attention_factor > 0.0) return rope.attention_factor;
  if (rope.mscale > 0.0 && rope.mscale_all_dim > 0.0) {
    return yarn_scale(rope.factor, rope.mscale) / yarn_scale(rope.factor, rope.mscale_all_dim);
  }
  return yarn_scale(rope.factor, 1.0);
}

std::vector<float> inverse_frequencies(const RopeConfig& rope) {
  const YarnRange range = rope.type == RopeType::kYarn ? yarn_range(rope) : YarnRange{};
  std::vector<float> frequencies;
  for (int64_t i = 0; i < rope.dims / 2; ++i) {
    double frequency = pow64(rope.theta, -2.0 * static_cast<double>(i) / static_cast<double>(rope.dims));
    if (rope.type == RopeType::kLinear) frequency /= rope.factor;
    if (rope.type == RopeType::kLlama3) frequency = llama3_frequency(rope, frequency);
    if (rope.type == RopeType::kYarn) frequency = yarn_frequency(rope, range, i, frequency);
    frequencies.push_back(static_cast<float>(frequency));
  }
  return frequencies;
}

}  // namespace tensorfold
