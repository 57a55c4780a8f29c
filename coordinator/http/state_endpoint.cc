#include "coordinator/http/state_endpoint.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>

#include "coordinator/api/json_writer.h"
#include "coordinator/api/request_fields.h"

namespace tensorfold {
namespace {

constexpr std::chrono::seconds kLongestWait{5};

// Runs `call` on the scheduler's thread; nothing if it does not come to it.
template <typename Result>
std::optional<Result> on_scheduler(Engine& engine, std::function<Result(StateKeeper&)> call) {
  const auto result = std::make_shared<std::promise<Result>>();
  std::future<Result> future = result->get_future();
  engine.with_states([result, call = std::move(call)](StateKeeper& states) { result->set_value(call(states)); });
  if (future.wait_for(kLongestWait) != std::future_status::ready) return std::nullopt;
  return future.get();
}

HttpReply busy() { return error_reply(starting_error("the scheduler", 1)); }

HttpReply list_reply(Engine& engine) {
  const auto all = on_scheduler<std::vector<StoredSegment>>(engine, [](StateKeeper& states) { return states.list(); });
  if (!all.has_value()) return busy();
  JsonWriter json;
  json.begin_object().field("object", "list").key("data").begin_array();
  for (const StoredSegment& segment : *all) {
    json.begin_object().field("key", key_text(segment.key)).key("parent");
    if (segment.first_position == 0) {
      json.null();
    } else {
      json.string(key_text(segment.parent));
    }
    json.field("first_position", segment.first_position).field("tokens", static_cast<uint64_t>(segment.tokens.size()));
    json.field("snapshot", segment.committed).field("bytes", segment.bytes).key("pinned").begin_array();
    for (const std::string& name : segment.names) json.string(name);
    json.end_array().end_object();
  }
  HttpReply reply;
  reply.body = json.end_array().end_object().take();
  return reply;
}

bool plain_name(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(),
                                      [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_'; });
}

}  // namespace

HttpReply states_reply(std::string_view method, std::string_view body, const ModelService& service) {
  Engine& engine = service.engine();
  if (method != "POST") return list_reply(engine);
  ApiOr<boost::json::value> root = parse_json_body(body);
  if (!root.ok()) return error_reply(root.error());
  if (!root->is_object()) return error_reply(invalid_type_error("body", "an object", json_type_name(*root)));
  Fields fields(root->get_object(), "");
  const std::string action = fields.string("action", 16).value_or("");
  const std::string key_argument = fields.string("key", 64).value_or("");
  const std::string name = fields.string("name", kMaxPinName).value_or("");
  if (auto error = fields.finish()) return error_reply(*error);
  const bool pins = action == "pin", unpins = action == "unpin", drops = action == "drop";
  if (!pins && !unpins && !drops) return error_reply(invalid_value_error("action", "there are pin, unpin and drop"));
  if ((pins || unpins) && !plain_name(name)) {
    return error_reply(invalid_value_error("name", "1 to 64 letters, digits, - and _"));
  }
  const absl::StatusOr<StateKey> key = parse_key(key_argument);
  if (!unpins && !key.ok()) return error_reply(invalid_value_error("key", "the 32 hex digits of a state in the list"));
  const auto done = on_scheduler<bool>(engine, [=, key = key.value_or(StateKey())](StateKeeper& states) {
    return pins ? states.pin(key, name) : unpins ? states.unpin(name) : states.drop(key);
  });
  if (!done.has_value()) return busy();
  if (!*done) return error_reply(invalid_value_error(unpins ? "name" : "key", "there is no such state"));
  HttpReply reply;
  reply.body = "{\"done\":true}";
  return reply;
}

}  // namespace tensorfold
