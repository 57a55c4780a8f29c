// nemotron_h's part of config.json.
#pragma once

#include "worker/checkpoint/json_fields.h"
#include "worker/checkpoint/model_config.h"

namespace tensorfold {

/// Blocks, experts, Mamba2 and the MTP layer of a nemotron_h configuration whose dimensions have been read. Errors stay
/// in `fields`.
void parse_nemotron_h(FieldReader& fields, ModelConfig& config);

}  // namespace tensorfold
