// POST /v1/chat/completions (OpenAI's dialect, with the extensions in README.md): a body to a typed request, or an
// error.
//
// Options are strict: a wrong type, a value out of range, or a field that this server does not know is refused by name.
// History is lenient: what an assistant said before, however malformed, is rendered and never refused, or a
// conversation could not go on. Pure functions, any thread.
#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/value.hpp>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/api/error.h"
#include "coordinator/api/request_options.h"

namespace tensorfold {

enum class ChatRole : uint8_t { kSystem, kDeveloper, kUser, kAssistant, kTool };
std::string_view chat_role_name(ChatRole role);
// As templates know it: developer is system.
std::string_view template_role_name(ChatRole role);

struct HistoryToolCall {
  std::string id;    // may be empty
  std::string name;  // any characters, spaces included
  // An object where the arguments were one, or a string that holds one; otherwise what was sent.
  boost::json::value arguments;
};

struct ChatMessage {
  ChatRole role = ChatRole::kUser;
  std::string content;  // text parts joined without a separator; empty when null or absent
  std::optional<std::string> reasoning_content;
  std::optional<std::string> name;
  std::optional<std::string> tool_call_id;
  std::vector<HistoryToolCall> tool_calls;
};

struct ChatRequest {
  std::string model;  // empty: the one that is served
  std::vector<ChatMessage> messages;
  boost::json::array tools;                  // checked; each {"type":"function","function":{"name", …}} as sent
  bool use_tools = true;                     // false: tool_choice "none"; the template gets no tools
  boost::json::object chat_template_kwargs;  // enable_thinking and reasoning_effort are in here too when given
  RequestOptions options;
};

ApiOr<ChatRequest> parse_chat_request(std::string_view body, const RequestDefaults& defaults);

// The messages as templates take them: {"role", "content", …}; developer is system, absent members are left out, and
// calls are
// {"id", "type": "function", "function": {"name", "arguments"}}.
boost::json::array template_messages(std::span<const ChatMessage> messages);

// `messages` and `tools` of an already parsed body, for the endpoints that share them.
class Fields;
std::vector<ChatMessage> read_messages(Fields& fields);
boost::json::array read_tools(Fields& fields);
boost::json::object read_template_kwargs(Fields& fields);

}  // namespace tensorfold
