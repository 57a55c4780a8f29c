// Internal to worker/checkpoint: config.json of families of latent attention and streams (is_latent).
#pragma once

#include <string>

#include "worker/checkpoint/json_fields.h"
#include "worker/checkpoint/model_config.h"

namespace tensorfold {

/// Everything of such a family between quantisation and tokens: dimensions, layers, experts, rotations. Errors go to
/// `fields`.
void parse_latent(FieldReader& fields, ModelConfig& config);

/// Lines of canonical_text, or nothing for other families.
std::string latent_text(const ModelConfig& config);

}  // namespace tensorfold
