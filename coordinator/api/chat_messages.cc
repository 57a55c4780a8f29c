#include <boost/json.hpp>

#include "coordinator/api/chat_request.h"
#include "coordinator/api/request_fields.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

using boost::json::array;
using boost::json::object;
using boost::json::value;

std::string text_of(const boost::json::string& text) { return std::string(text.data(), text.size()); }

std::string member_text(const object& members, std::string_view name) {
  const value* member = members.if_contains(name);
  const boost::json::string* text = member != nullptr ? member->if_string() : nullptr;
  return text != nullptr ? text_of(*text) : std::string();
}

std::optional<ChatRole> role_of(std::string_view name) {
  if (name == "system") return ChatRole::kSystem;
  if (name == "developer") return ChatRole::kDeveloper;
  if (name == "user") return ChatRole::kUser;
  if (name == "assistant") return ChatRole::kAssistant;
  if (name == "tool" || name == "function") return ChatRole::kTool;  // function: the older name
  return std::nullopt;
}

// One part of a content array; its text is appended.
std::optional<ApiError> append_part(const value& part, const std::string& path, std::string* out) {
  if (const boost::json::string* text = part.if_string()) {
    out->append(text->data(), text->size());
    return std::nullopt;
  }
  const object* members = part.if_object();
  if (members == nullptr) return invalid_type_error(path, "a text part", json_type_name(part));
  const std::string type = member_text(*members, "type");
  const bool refusal = type == "refusal";  // what an assistant answered once; text for the model
  if (type != "text" && type != "input_text" && type != "output_text" && !refusal) {
    if (type.empty()) return missing_field_error(path + ".type", "\"text\"");
    return unsupported_error(path, fmt::format("'{}' parts; this server reads text only", type.substr(0, 64)));
  }
  const std::string field = refusal ? "refusal" : "text";
  const value* text = members->if_contains(field);
  if (text == nullptr || !text->is_string()) {
    return invalid_type_error(path + "." + field, "a string", text == nullptr ? "nothing" : json_type_name(*text));
  }
  out->append(text->get_string().data(), text->get_string().size());
  return std::nullopt;
}

std::optional<ApiError> read_content(const value* content, ChatRole role, const std::string& path, std::string* out) {
  const bool may_be_empty = role == ChatRole::kAssistant || role == ChatRole::kTool;
  if (content == nullptr || content->is_null()) {
    if (may_be_empty) return std::nullopt;
    return missing_field_error(path, "a string or an array of text parts");
  }
  if (const boost::json::string* text = content->if_string()) {
    *out = text_of(*text);
    return std::nullopt;
  }
  if (const array* parts = content->if_array()) {
    if (parts->size() > kMaxContentParts) {
      return invalid_value_error(path, fmt::format("{} parts; at most {}", parts->size(), kMaxContentParts));
    }
    for (size_t i = 0; i < parts->size(); ++i) {
      if (auto error = append_part((*parts)[i], fmt::format("{}[{}]", path, i), out)) return error;
    }
    return std::nullopt;
  }
  if (role == ChatRole::kTool) {  // a tool's result that was not turned into text by the client
    *out = boost::json::serialize(*content);
    return std::nullopt;
  }
  return invalid_type_error(path, "a string or an array of text parts", json_type_name(*content));
}

// Arguments as the template wants them: an object where there is one.
value arguments_of(const value* sent) {
  if (sent == nullptr || sent->is_null()) return object();
  const boost::json::string* text = sent->if_string();
  if (text == nullptr) return *sent;
  if (text->empty()) return object();
  ApiOr<value> parsed = parse_json_body(std::string_view(text->data(), text->size()));
  if (parsed.ok() && parsed->is_object()) return std::move(*parsed);
  return *sent;
}

// A past call that cannot be read as one becomes text: the model sees what it said, and the conversation goes on.
void append_as_text(const value& call, std::string* content) {
  if (!content->empty()) content->push_back('\n');
  content->append(boost::json::serialize(call));
}

void read_call(const value& call, const object* function, ChatMessage* message) {
  const std::string name = function != nullptr ? member_text(*function, "name") : std::string();
  if (name.empty()) return append_as_text(call, &message->content);
  const object* outer = call.if_object();
  message->tool_calls.push_back(
      {outer != nullptr ? member_text(*outer, "id") : "", name, arguments_of(function->if_contains("arguments"))});
}

std::optional<ApiError> read_tool_calls(const object& members, const std::string& path, ChatMessage* message) {
  if (const value* calls = members.if_contains("tool_calls"); calls != nullptr && !calls->is_null()) {
    const array* items = calls->if_array();
    if (items == nullptr) {
      append_as_text(*calls, &message->content);
    } else if (items->size() > kMaxToolCalls) {
      return invalid_value_error(path + ".tool_calls",
                                 fmt::format("{} items; at most {}", items->size(), kMaxToolCalls));
    } else {
      for (const value& call : *items) {
        const object* outer = call.if_object();
        const value* function = outer != nullptr ? outer->if_contains("function") : nullptr;
        // Some clients keep name and arguments beside the id instead of under "function".
        read_call(call, function != nullptr ? function->if_object() : outer, message);
      }
    }
  }
  if (const value* call = members.if_contains("function_call"); call != nullptr && !call->is_null()) {
    read_call(*call, call->if_object(), message);  // the older form: one call, no id
  }
  return std::nullopt;
}

std::optional<std::string> optional_text(const object& members, std::string_view name) {
  const value* member = members.if_contains(name);
  if (member == nullptr || !member->is_string()) return std::nullopt;
  return text_of(member->get_string());
}

ApiOr<ChatMessage> read_message(const value& item, const std::string& path) {
  const object* members = item.if_object();
  if (members == nullptr) return invalid_type_error(path, "an object", json_type_name(item));
  const value* role_value = members->if_contains("role");
  if (role_value == nullptr) return missing_field_error(path + ".role", "system, developer, user, assistant or tool");
  if (!role_value->is_string()) return invalid_type_error(path + ".role", "a string", json_type_name(*role_value));
  const std::string role_text = text_of(role_value->get_string());
  const std::optional<ChatRole> role = role_of(role_text);
  if (!role) {
    return invalid_value_error(
        path + ".role", fmt::format("'{}' is not system, developer, user, assistant or tool", role_text.substr(0, 64)));
  }
  ChatMessage message;
  message.role = *role;
  if (auto error = read_content(members->if_contains("content"), *role, path + ".content", &message.content)) {
    return *error;
  }
  message.name = optional_text(*members, "name");
  if (message.name && message.name->size() > kMaxNameBytes) {
    return invalid_value_error(path + ".name",
                               fmt::format("{} bytes; at most {}", message.name->size(), kMaxNameBytes));
  }
  message.tool_call_id = optional_text(*members, "tool_call_id");
  if (*role == ChatRole::kAssistant) {
    message.reasoning_content = optional_text(*members, "reasoning_content");
    if (!message.reasoning_content) message.reasoning_content = optional_text(*members, "reasoning");
    if (auto error = read_tool_calls(*members, path, &message)) return *error;
  }
  return message;
}

std::optional<ApiError> check_tool(const value& tool, const std::string& path) {
  const object* members = tool.if_object();
  if (members == nullptr) return invalid_type_error(path, "an object", json_type_name(tool));
  const std::string type = member_text(*members, "type");
  if (type.empty()) return missing_field_error(path + ".type", "\"function\"");
  if (type != "function") {
    return unsupported_error(path + ".type", fmt::format("'{}' tools; only \"function\" is", type.substr(0, 64)));
  }
  const value* function = members->if_contains("function");
  if (function == nullptr || function->is_null()) return missing_field_error(path + ".function", "an object");
  if (!function->is_object()) return invalid_type_error(path + ".function", "an object", json_type_name(*function));
  Fields inner(function->get_object(), path + ".function");
  const std::optional<std::string> name = inner.string("name", kMaxNameBytes);
  if (!inner.failed() && (!name || name->empty())) inner.fail(missing_field_error(path + ".function.name", "a string"));
  if (const value* text = inner.get("description"); text != nullptr && !text->is_string()) {
    inner.fail(invalid_type_error(path + ".function.description", "a string", json_type_name(*text)));
  }
  inner.object("parameters");
  inner.refuse("strict", "calls are not forced to their schema; send false or leave it out",
               [](const value& v) { return v.is_bool() && !v.get_bool(); });
  if (inner.failed()) return inner.finish();
  return std::nullopt;  // what else a tool says of itself is for the template
}

}  // namespace

std::string_view chat_role_name(ChatRole role) {
  switch (role) {
    case ChatRole::kSystem:
      return "system";
    case ChatRole::kDeveloper:
      return "developer";
    case ChatRole::kUser:
      return "user";
    case ChatRole::kAssistant:
      return "assistant";
    case ChatRole::kTool:
      return "tool";
  }
  return "user";
}

std::string_view template_role_name(ChatRole role) {
  return chat_role_name(role == ChatRole::kDeveloper ? ChatRole::kSystem : role);
}

boost::json::array template_messages(std::span<const ChatMessage> messages) {
  array out;
  for (const ChatMessage& message : messages) {
    object item;
    item["role"] = template_role_name(message.role);
    item["content"] = message.content;
    if (message.reasoning_content) item["reasoning_content"] = *message.reasoning_content;
    if (message.name) item["name"] = *message.name;
    if (message.tool_call_id) item["tool_call_id"] = *message.tool_call_id;
    if (!message.tool_calls.empty()) {
      array calls;
      for (const HistoryToolCall& call : message.tool_calls) {
        object function;
        function["name"] = call.name;
        function["arguments"] = call.arguments;
        object entry;
        if (!call.id.empty()) entry["id"] = call.id;
        entry["type"] = "function";
        entry["function"] = std::move(function);
        calls.push_back(std::move(entry));
      }
      item["tool_calls"] = std::move(calls);
    }
    out.push_back(std::move(item));
  }
  return out;
}

std::vector<ChatMessage> read_messages(Fields& fields) {
  std::vector<ChatMessage> messages;
  const array* items = fields.array("messages", kMaxMessages);
  if (items == nullptr || items->empty()) {
    fields.fail(items == nullptr ? missing_field_error("messages", "an array of messages")
                                 : invalid_value_error("messages", "it is empty; at least one message is needed"));
    return messages;
  }
  for (size_t i = 0; i < items->size(); ++i) {
    ApiOr<ChatMessage> message = read_message((*items)[i], fmt::format("messages[{}]", i));
    if (!message.ok()) {
      fields.fail(message.error());
      return {};
    }
    messages.push_back(std::move(*message));
  }
  return messages;
}

boost::json::array read_tools(Fields& fields) {
  const array* items = fields.array("tools", kMaxTools);
  if (items == nullptr) return {};
  for (size_t i = 0; i < items->size(); ++i) {
    if (auto error = check_tool((*items)[i], fmt::format("tools[{}]", i))) {
      fields.fail(*error);
      return {};
    }
  }
  return *items;
}

}  // namespace tensorfold
