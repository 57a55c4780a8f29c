// qwen4_exp's part of config.json: indexer, gated streams, n-grams.
#pragma once

#include "worker/checkpoint/json_fields.h"
#include "worker/checkpoint/model_config.h"

namespace tensorfold {

/// Reads them into a configuration whose layers and rotary settings have been read. Errors stay in `fields`.
void parse_qwen4_exp(FieldReader& fields, ModelConfig& config);

/// Lines of canonical_text, or nothing for other families.
std::string qwen4_text(const ModelConfig& config);

}  // namespace tensorfold
