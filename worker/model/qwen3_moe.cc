// Qwen3 with experts (model_type "qwen3_moe"): qwen3 whose layers, or some of them, have a softmax router and experts
// in place of the MLP. No shared expert, no MTP layer.
#include "worker/model/qwen3.h"

namespace tensorfold {

const FamilyEntry kQwen3MoeEntry = {Family::kQwen3Moe, "qwen3_moe", qwen3_shape, load_qwen3};

}  // namespace tensorfold
