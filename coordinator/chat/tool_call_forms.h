// The forms of calls that have files of their own. Private to this folder.
#pragma once

#include <optional>
#include <string_view>

#include "coordinator/chat/tool_call_parser.h"

namespace tensorfold {

inline constexpr std::string_view kArgumentValueClose = "</arg_value>";

// As begins_tool_call(), for text without leading space.
std::optional<bool> begins_keyed_tool_call(std::string_view rest);
// As begins_tool_call(): `text` follows kDsmlOpen.
std::optional<bool> begins_dsml(std::string_view text);

}  // namespace tensorfold
