#include "coordinator/load/streamed_reply.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/json.hpp>

namespace tensorfold {
namespace {

namespace json = boost::json;

constexpr size_t kMaxCalls = 1024;
constexpr size_t kShown = 300;  // bytes of a server's words in a message

std::string_view view(const json::string& text) { return {text.data(), text.size()}; }

json::value parse(std::string_view text, json::error_code* error) {
  json::parse_options options;
  options.max_depth = 32;
  return json::parse(json::string_view(text.data(), text.size()), *error, {}, options);
}

// The rest of what an event may hold, read without exceptions. The first wrong type is kept.
class EventFields {
 public:
  explicit EventFields(StreamedReply* reply) : reply_(reply) {}

  absl::Status status() const { return status_; }
  void fail(std::string what) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(std::move(what));
  }

  // A member that is missing or null is nullptr without an error.
  const json::value* member(const json::object& from, const char* name) {
    const json::value* found = from.if_contains(name);
    return found == nullptr || found->is_null() ? nullptr : found;
  }
  const json::object* object(const json::object& from, const char* name) {
    const json::value* found = member(from, name);
    if (found != nullptr && !found->is_object()) fail(fmt::format("\"{}\" of an event is not an object", name));
    return found == nullptr ? nullptr : found->if_object();
  }
  const json::array* array(const json::object& from, const char* name) {
    const json::value* found = member(from, name);
    if (found != nullptr && !found->is_array()) fail(fmt::format("\"{}\" of an event is not an array", name));
    return found == nullptr ? nullptr : found->if_array();
  }
  std::string_view text(const json::object& from, const char* name) {
    const json::value* found = member(from, name);
    if (found == nullptr) return {};
    if (!found->is_string()) {
      fail(fmt::format("\"{}\" of an event is not a string", name));
      return {};
    }
    return view(found->get_string());
  }
  void count(const json::object& from, const char* name, uint64_t* out) {
    const json::value* found = member(from, name);
    if (found == nullptr) return;
    json::error_code error;
    const auto value = found->to_number<uint64_t>(error);
    if (error) return fail(fmt::format("\"{}\" of an event is not a count", name));
    *out = value;
  }
  // Returns whether there was some.
  bool append(const json::object& from, const char* name, std::string* to) {
    const std::string_view more = text(from, name);
    bytes_ += more.size();
    if (reply_->content.size() + reply_->reasoning.size() + bytes_ > kMaxReplyBytes) {
      fail(fmt::format("the reply is longer than {} bytes", kMaxReplyBytes));
      return false;
    }
    *to += more;
    return !more.empty();
  }

 private:
  StreamedReply* reply_;
  absl::Status status_;
  size_t bytes_ = 0;
};

bool take_calls(const json::array& calls, EventFields* fields, StreamedReply* reply) {
  for (const json::value& item : calls) {
    const json::object* call = item.if_object();
    if (call == nullptr) {
      fields->fail("a tool call is not an object");
      return false;
    }
    uint64_t index = 0;
    fields->count(*call, "index", &index);
    if (index > reply->calls.size() || index >= kMaxCalls) {
      fields->fail(fmt::format("tool call {} after {} calls", index, reply->calls.size()));
      return false;
    }
    if (index == reply->calls.size()) reply->calls.emplace_back();
    if (const json::object* function = fields->object(*call, "function"); function != nullptr) {
      fields->append(*function, "name", &reply->calls[index].name);
      fields->append(*function, "arguments", &reply->calls[index].arguments);
    }
  }
  return !calls.empty();
}

bool take_choice(const json::value& item, EventFields* fields, StreamedReply* reply) {
  const json::object* choice = item.if_object();
  if (choice == nullptr) {
    fields->fail("a choice is not an object");
    return false;
  }
  bool shows = false;
  if (const json::object* delta = fields->object(*choice, "delta"); delta != nullptr) {
    shows |= fields->append(*delta, "content", &reply->content);
    shows |= fields->append(*delta, "reasoning_content", &reply->reasoning);
    if (const json::array* calls = fields->array(*delta, "tool_calls"); calls != nullptr) {
      shows |= take_calls(*calls, fields, reply);
    }
  }
  if (const std::string_view reason = fields->text(*choice, "finish_reason"); !reason.empty()) {
    reply->finish_reason = std::string(reason.substr(0, kShown));
  }
  return shows;
}

void take_figures(const json::object& event, EventFields* fields, StreamedReply* reply) {
  if (const json::object* usage = fields->object(event, "usage"); usage != nullptr) {
    fields->count(*usage, "prompt_tokens", &reply->prompt_tokens);
    fields->count(*usage, "completion_tokens", &reply->completion_tokens);
  }
  if (const json::object* block = fields->object(event, "tensorfold"); block != nullptr) {
    reply->token_sha = std::string(fields->text(*block, "token_sha").substr(0, kShown));
    fields->count(*block, "cached", &reply->cached);
    fields->count(*block, "drafted", &reply->drafted);
    fields->count(*block, "accepted", &reply->accepted);
    fields->count(*block, "rounds", &reply->rounds);
  }
  if (const json::object* error = fields->object(event, "error"); error != nullptr) {
    reply->error_code = std::string(fields->text(*error, "code").substr(0, kShown));
    reply->error_message = std::string(fields->text(*error, "message").substr(0, kShown));
    if (reply->error_code.empty()) reply->error_code = "error";
  }
}

std::string printable(std::string_view text) {
  std::string out(text.substr(0, kShown));
  std::replace_if(
      out.begin(), out.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; }, ' ');
  return out;
}

}  // namespace

absl::StatusOr<bool> take_event(std::string_view data, StreamedReply* reply) {
  if (reply->done) return absl::InvalidArgumentError("an event after [DONE]");
  if (data == "[DONE]") {
    reply->done = true;
    return false;
  }
  json::error_code error;
  const json::value root = parse(data, &error);
  if (error) return absl::InvalidArgumentError(fmt::format("an event is not JSON: {}", error.message()));
  const json::object* event = root.if_object();
  if (event == nullptr) return absl::InvalidArgumentError("an event is not a JSON object");
  EventFields fields(reply);
  bool shows = false;
  if (const json::array* choices = fields.array(*event, "choices"); choices != nullptr) {
    for (const json::value& choice : *choices) shows |= take_choice(choice, &fields, reply);
  }
  take_figures(*event, &fields, reply);
  if (!fields.status().ok()) return fields.status();
  return shows;
}

std::string error_code_of(std::string_view body) {
  json::error_code error;
  const json::value root = parse(body, &error);
  if (error || !root.is_object()) return "";
  const json::value* inner = root.get_object().if_contains("error");
  if (inner == nullptr || !inner->is_object()) return "";
  const json::value* code = inner->get_object().if_contains("code");
  return code != nullptr && code->is_string() ? printable(view(code->get_string())) : "";
}

std::string error_text(std::string_view body) {
  json::error_code error;
  const json::value root = parse(body, &error);
  if (!error && root.is_object()) {
    const json::value* inner = root.get_object().if_contains("error");
    if (inner != nullptr && inner->is_object()) {
      const json::value* message = inner->get_object().if_contains("message");
      const std::string code = error_code_of(body);
      if (message != nullptr && message->is_string()) {
        return code.empty() ? printable(view(message->get_string()))
                            : fmt::format("{}: {}", code, printable(view(message->get_string())));
      }
    }
  }
  return printable(body);
}

}  // namespace tensorfold
