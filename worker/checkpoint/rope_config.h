// Internal to worker/checkpoint: the rotary part of config.json, in its old flat and its new nested form.
#pragma once

#include "worker/checkpoint/json_fields.h"
#include "worker/checkpoint/model_config.h"

namespace tensorfold {

/// Reads rope_parameters, or rope_theta and rope_scaling. Needs family, head_dim and max_position_embeddings. Errors go
/// to `fields`.
RopeConfig parse_rope(FieldReader& fields, Family family, int64_t head_dim, int64_t max_positions,
                      const std::string& label);

}  // namespace tensorfold
