// Qwen3.5 with experts (model_type "qwen3_5_moe"): qwen3_5 with a softmax router, experts and a shared expert behind a
// sigmoid gate in every layer, the MTP layer's too.
#include "worker/model/qwen3_5.h"

namespace tensorfold {

const FamilyEntry kQwen35MoeEntry = {Family::kQwen3_5Moe, "qwen3_5_moe", qwen3_5_shape, load_qwen3_5};

}  // namespace tensorfold
