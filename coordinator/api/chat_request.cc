#include "coordinator/api/chat_request.h"

#include <algorithm>
#include <array>
#include <boost/json.hpp>
#include <string_view>

#include "coordinator/api/request_fields.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

using boost::json::value;

constexpr std::array<std::string_view, 7> kEfforts = {"none", "minimal", "low", "medium", "high", "xhigh", "max"};

// Names that the server itself gives to the template.
constexpr std::array<std::string_view, 8> kReservedKwargs = {
    "messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "chat_template", "tokenize"};

void read_tool_choice(Fields& fields, ChatRequest* request) {
  const value* choice = fields.get("tool_choice");
  if (choice == nullptr) return;
  if (choice->is_object()) {
    fields.fail(
        unsupported_error("tool_choice", "a named function; calls cannot be forced, so send \"auto\" or \"none\""));
    return;
  }
  if (!choice->is_string()) {
    fields.fail(invalid_type_error("tool_choice", "\"auto\" or \"none\"", json_type_name(*choice)));
    return;
  }
  const std::string_view text(choice->get_string().data(), choice->get_string().size());
  if (text == "none") {
    request->use_tools = false;
  } else if (text == "required") {
    fields.fail(unsupported_error("tool_choice", "\"required\"; calls cannot be forced, so send \"auto\" or \"none\""));
  } else if (text != "auto") {
    fields.fail(
        invalid_value_error("tool_choice", fmt::format("'{}' is not \"auto\" or \"none\"", text.substr(0, 64))));
  }
}

void read_response_format(Fields& fields) {
  const boost::json::object* format = fields.object("response_format");
  if (format == nullptr) return;
  Fields inner(*format, "response_format");
  const std::optional<std::string> type = inner.string("type", kMaxNameBytes);
  if (!inner.failed() && !type) inner.fail(missing_field_error("response_format.type", "\"text\""));
  if (type && *type != "text") {
    inner.fail(unsupported_error("response_format.type",
                                 fmt::format("'{}'; replies are not constrained, so only \"text\" is", *type)));
  }
  if (auto error = inner.finish()) fields.fail(*error);
}

void read_logprobs(Fields& fields, RequestOptions* options) {
  const bool wanted = fields.boolean("logprobs").value_or(false);
  const std::optional<int64_t> top = fields.integer("top_logprobs", 0, kMaxTopLogprobs);
  if (top && !wanted && *top > 0) {
    fields.fail(invalid_value_error("top_logprobs", "only allowed with \"logprobs\": true"));
  }
  if (wanted) options->logprobs = static_cast<uint32_t>(top.value_or(0));
}

bool only_text(const value& modalities) {
  const boost::json::array* items = modalities.if_array();
  return items != nullptr && std::all_of(items->begin(), items->end(), [](const value& item) {
           return item.is_string() && item.get_string() == "text";
         });
}

void refuse_foreign(Fields& fields) {
  const auto is_true = [](const value& v) { return v.is_bool() && v.get_bool(); };
  fields.refuse("parallel_tool_calls", "false; a reply may hold several calls, take the first", is_true);
  fields.refuse("modalities", "anything but [\"text\"]", only_text);
  fields.refuse("functions", "the older form; use tools");
  fields.refuse("function_call", "the older form; use tool_choice");
  fields.refuse("audio", "this server writes text only");
  fields.refuse("web_search_options", "this server fetches nothing");
  fields.refuse("chat_template", "clients do not supply templates; the checkpoint's own is used");
  fields.refuse("prompt", "this is the chat endpoint; send messages, or use /v1/completions");
  fields.refuse("verbosity", "the model has no such control; ask for it in a message");
  fields.ignore({"prediction"});  // a hint for speed; the reply is the same with and without
}

}  // namespace

boost::json::object read_template_kwargs(Fields& fields) {
  boost::json::object kwargs;
  if (const boost::json::object* given = fields.object("chat_template_kwargs")) {
    for (const auto& member : *given) {
      const std::string_view name(member.key().data(), member.key().size());
      if (std::find(kReservedKwargs.begin(), kReservedKwargs.end(), name) != kReservedKwargs.end()) {
        fields.fail(unsupported_error(fmt::format("chat_template_kwargs.{}", name), "the server sets it itself"));
        return {};
      }
    }
    kwargs = *given;
  }
  const auto merge = [&](std::string_view name, value wanted) {
    const value* other = kwargs.if_contains(name);
    if (other != nullptr && *other != wanted) {
      fields.fail(invalid_value_error(name, fmt::format("it contradicts chat_template_kwargs.{}", name)));
      return;
    }
    kwargs[name] = std::move(wanted);
  };
  if (const auto thinking = fields.boolean("enable_thinking")) merge("enable_thinking", *thinking);
  if (const auto effort = fields.string("reasoning_effort", kMaxNameBytes)) {
    if (std::find(kEfforts.begin(), kEfforts.end(), *effort) == kEfforts.end()) {
      fields.fail(invalid_value_error(
          "reasoning_effort", fmt::format("'{}' is not one of none, minimal, low, medium, high, xhigh, max", *effort)));
    } else {
      merge("reasoning_effort", value(boost::json::string(*effort)));
    }
  }
  return kwargs;
}

ApiOr<ChatRequest> parse_chat_request(std::string_view body, const RequestDefaults& defaults) {
  ApiOr<value> root = parse_json_body(body);
  if (!root.ok()) return root.error();
  if (!root->is_object()) return invalid_type_error("body", "an object", json_type_name(*root));
  Fields fields(root->get_object(), "");
  ChatRequest request;
  request.model = fields.string("model", kMaxNameBytes).value_or("");
  request.options = read_options(fields, defaults);
  read_logprobs(fields, &request.options);
  request.messages = read_messages(fields);
  request.tools = read_tools(fields);
  read_tool_choice(fields, &request);
  request.chat_template_kwargs = read_template_kwargs(fields);
  read_response_format(fields);
  refuse_foreign(fields);
  if (auto error = fields.finish()) return *error;
  return request;
}

}  // namespace tensorfold
