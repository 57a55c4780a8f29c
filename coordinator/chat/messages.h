#pragma once

#include <optional>
#include <string_view>

#include "absl/status/statusor.h"
#include "boost/json.hpp"

namespace tensorfold {

// What a template expects of messages, read off its source.

// Whether it handles tool call arguments that are a string.
bool keeps_argument_text(std::string_view source);
// Whether it handles content that is a list of parts.
bool reads_content_parts(std::string_view source);

// Brings messages into the form that the template expects, so that a history that any client may send renders:
//   - arguments of tool calls that are a string: parsed, unless `keep_argument_text`. What is no JSON object becomes
//     {"arguments": text}: a damaged call must not make the conversation unusable.
//   - content that is a list of parts: the texts joined by newlines, unless `keep_parts`.
// Returns nothing if the messages are fine as they are. Errors: InvalidArgument for a message that is no object, and
// for a part without text.
absl::StatusOr<std::optional<boost::json::array>> adapt_messages(const boost::json::array& messages,
                                                                 bool keep_argument_text, bool keep_parts);

}  // namespace tensorfold
