// What a DeepSeek config.json says of the block drafter that the checkpoint brings along
// (DSpark, stages under `mtp.*`).
//
// Key names are those of released files: dspark_block_size, dspark_noise_token_id, dspark_target_layer_ids,
// dspark_markov_rank; in deepseek_v41 also dspark_n_routed_experts and dspark_num_experts_per_tok. The number of stages
// is num_nextn_predict_layers in deepseek_v41; deepseek_v4's files say 1 there whatever they hold, and n_mtp_layers or
// 3 counts.
#pragma once

#include <string>

#include "worker/checkpoint/json_fields.h"
#include "worker/checkpoint/model_config.h"

namespace tensorfold {

/// After everything else of a family of DeepSeek's; leaves config.dspark at no stages where there are no such keys.
/// Errors go to `fields`.
void parse_dspark(FieldReader& fields, ModelConfig& config);

/// Every field as text: for the hash that ranks compare, not for the model's own.
std::string dspark_text(const DsparkConfig& config);

}  // namespace tensorfold
