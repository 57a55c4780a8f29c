#pragma once

#include <string_view>

namespace tensorfold {

// The chat template of families whose checkpoints carry none, because their makers format prompts in a program of their
// own: DeepSeek V4 ("deepseek_v4") and V4.1 ("deepseek_v41"). Turns, thinking and the markup of calls and results are
// the family's; how the tools are introduced to the model is ours. A template in the model folder comes first. Empty
// for other values of model_type.
//
// Variables: enable_thinking (or thinking), true unless given.
std::string_view builtin_chat_template(std::string_view model_type);

}  // namespace tensorfold
