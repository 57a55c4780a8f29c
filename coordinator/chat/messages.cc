#include "coordinator/chat/messages.h"

#include <string>

#include "fmt/format.h"

namespace tensorfold {
namespace {

namespace json = boost::json;

json::object arguments_object(std::string_view text) {
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) return {};
  json::error_code error;
  json::value parsed = json::parse(json::string_view(text.data(), text.size()), error);
  if (!error && parsed.is_object()) return std::move(parsed.as_object());
  json::object wrapped;
  wrapped["arguments"] = json::string_view(text.data(), text.size());
  return wrapped;
}

// The arguments of a call: in "function", or in the call itself.
json::value* call_arguments(json::value& call) {
  json::object* object = call.if_object();
  if (object == nullptr) return nullptr;
  if (json::value* function = object->if_contains("function")) {
    if (function->is_object()) object = &function->as_object();
  }
  return object->if_contains("arguments");
}

bool has_text_arguments(const json::object& message) {
  const json::value* calls = message.if_contains("tool_calls");
  if (calls == nullptr || !calls->is_array()) return false;
  for (const json::value& call : calls->as_array()) {
    const json::value* arguments = call_arguments(const_cast<json::value&>(call));  // only looked at
    if (arguments != nullptr && arguments->is_string()) return true;
  }
  return false;
}

bool has_parts(const json::object& message) {
  const json::value* content = message.if_contains("content");
  return content != nullptr && content->is_array();
}

absl::StatusOr<json::string> joined_parts(const json::array& parts, size_t index) {
  json::string out;
  for (size_t i = 0; i < parts.size(); ++i) {
    const json::value* text = &parts[i];
    if (parts[i].is_object()) text = parts[i].as_object().if_contains("text");
    if (text == nullptr || !text->is_string()) {
      return absl::InvalidArgumentError(
          fmt::format("messages[{}].content[{}] has no text; this model reads only text", index, i));
    }
    if (i != 0) out.push_back('\n');
    out.append(text->as_string());
  }
  return out;
}

}  // namespace

bool keeps_argument_text(std::string_view source) {
  for (const std::string_view sign : {"arguments is string", "arguments is not string"}) {
    if (source.find(sign) != std::string_view::npos) return true;
  }
  return false;
}

bool reads_content_parts(std::string_view source) {
  for (const std::string_view sign : {".text", "['text']", "[\"text\"]", "'text'", "\"text\""}) {
    if (source.find(sign) != std::string_view::npos) return true;
  }
  return false;
}

absl::StatusOr<std::optional<json::array>> adapt_messages(const json::array& messages, bool keep_argument_text,
                                                          bool keep_parts) {
  bool adapt = false;
  for (size_t i = 0; i < messages.size(); ++i) {
    if (!messages[i].is_object()) return absl::InvalidArgumentError(fmt::format("messages[{}] must be an object", i));
    const json::object& message = messages[i].as_object();
    adapt |= (!keep_argument_text && has_text_arguments(message)) || (!keep_parts && has_parts(message));
  }
  if (!adapt) return std::optional<json::array>();
  json::array out = messages;
  for (size_t i = 0; i < out.size(); ++i) {
    json::object& message = out[i].as_object();
    if (!keep_parts && has_parts(message)) {
      absl::StatusOr<json::string> text = joined_parts(message["content"].as_array(), i);
      if (!text.ok()) return text.status();
      message["content"] = *std::move(text);
    }
    if (keep_argument_text || !has_text_arguments(message)) continue;
    for (json::value& call : message["tool_calls"].as_array()) {
      json::value* arguments = call_arguments(call);
      if (arguments == nullptr || !arguments->is_string()) continue;
      const json::string text = arguments->as_string();
      *arguments = arguments_object(std::string_view(text.data(), text.size()));
    }
  }
  return std::optional<json::array>(std::move(out));
}

}  // namespace tensorfold
