// Rotary position frequencies of a checkpoint's rope settings.
#pragma once

#include <vector>

#include "worker/checkpoint/model_config.h"

namespace tensorfold {

/// inv_freq [rotary dims / 2]: theta^(-2i/d) in float64 with our own exp and log, scaled as the config's rope type
/// says, rounded to fp32 once as Hugging Face keeps it.
std::vector<float> inverse_frequencies(const RopeConfig& rope);
inline std::vector<float> inverse_frequencies(const ModelConfig& config) { return inverse_frequencies(config.rope); }

/// What cosines and sines are multiplied by: 1 but for yarn, whose longer contexts need sharper attention.
double rope_attention_factor(const ModelConfig& config);

}  // namespace tensorfold
