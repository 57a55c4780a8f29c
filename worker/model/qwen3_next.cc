// Qwen3-Next (model_type "qwen3_next"), the ancestor of qwen3_5_moe: the same layers, but the delta net's inputs are
// two fused matrices whose rows go by key head (in_proj_qkvz, in_proj_ba), and some layers may have a plain MLP.
#include "worker/model/qwen3_5.h"

namespace tensorfold {

const FamilyEntry kQwen3NextEntry = {Family::kQwen3Next, "qwen3_next", qwen3_5_shape, load_qwen3_5};

}  // namespace tensorfold
