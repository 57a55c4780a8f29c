// Internal to worker/checkpoint: what config.json says of deepseek_v41 beyond deepseek_v4: layers that share pooled
// rows and choices, and engram tables.
#pragma once

#include <string>

#include "worker/checkpoint/json_fields.h"
#include "worker/checkpoint/model_config.h"

namespace tensorfold {

/// After the dimensions of attention (latent_config.cc). Errors go to `fields`.
void parse_deepseek_v41(FieldReader& fields, ModelConfig& config);

/// Lines of canonical_text, or nothing for other families.
std::string deepseek_v41_text(const ModelConfig& config);

}  // namespace tensorfold
