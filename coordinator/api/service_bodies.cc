#include "coordinator/api/service_bodies.h"

#include <algorithm>
#include <boost/json.hpp>

#include "coordinator/api/json_writer.h"
#include "coordinator/api/request_fields.h"

namespace tensorfold {
namespace {

void write_model(JsonWriter& json, const ServedModel& model) {
  json.begin_object().field("id", model.id).field("object", "model").field("created", model.created);
  json.field("owned_by", "tensorfold").field("max_model_len", model.context).field("fingerprint", model.fingerprint);
  json.end_object();
}

}  // namespace

ApiOr<TokenizeRequest> parse_tokenize_request(std::string_view body) {
  ApiOr<boost::json::value> root = parse_json_body(body);
  if (!root.ok()) return root.error();
  if (!root->is_object()) return invalid_type_error("body", "an object", json_type_name(*root));
  Fields fields(root->get_object(), "");
  TokenizeRequest request;
  request.model = fields.string("model", kMaxNameBytes).value_or("");
  request.prompt = fields.string("prompt", body.size());
  request.add_special_tokens = fields.boolean("add_special_tokens").value_or(true);
  if (root->get_object().contains("messages")) {
    if (request.prompt) fields.fail(invalid_value_error("messages", "send either prompt or messages"));
    request.messages = read_messages(fields);
  } else if (!request.prompt && !fields.failed()) {
    fields.fail(missing_field_error("prompt", "a string, unless messages are given"));
  }
  fields.ignore({"messages"});
  request.tools = read_tools(fields);
  request.chat_template_kwargs = read_template_kwargs(fields);
  request.add_generation_prompt = fields.boolean("add_generation_prompt").value_or(true);
  if (auto error = fields.finish()) return *error;
  return request;
}

std::string tokenize_body(std::span<const uint32_t> ids, uint32_t context) {
  JsonWriter json;
  json.begin_object().key("tokens").ids(ids);
  json.field("count", static_cast<uint64_t>(ids.size())).field("max_model_len", context);
  return json.end_object().take();
}

ApiOr<DetokenizeRequest> parse_detokenize_request(std::string_view body) {
  ApiOr<boost::json::value> root = parse_json_body(body);
  if (!root.ok()) return root.error();
  if (!root->is_object()) return invalid_type_error("body", "an object", json_type_name(*root));
  Fields fields(root->get_object(), "");
  DetokenizeRequest request;
  request.model = fields.string("model", kMaxNameBytes).value_or("");
  if (auto ids = fields.ids("tokens", kMaxPromptIds)) {
    request.tokens = std::move(*ids);
  } else {
    fields.fail(missing_field_error("tokens", "an array of token ids"));
  }
  if (auto error = fields.finish()) return *error;
  return request;
}

std::string detokenize_body(std::string_view text) {
  JsonWriter json;
  return json.begin_object().field("prompt", text).end_object().take();
}

std::string models_body(std::span<const ServedModel> models) {
  JsonWriter json;
  json.begin_object().field("object", "list").key("data").begin_array();
  for (const ServedModel& model : models) write_model(json, model);
  return json.end_array().end_object().take();
}

std::string model_body(const ServedModel& model) {
  JsonWriter json;
  write_model(json, model);
  return json.take();
}

std::optional<ApiError> check_model(std::string_view name, std::span<const std::string> served) {
  if (name.empty() || std::find(served.begin(), served.end(), name) != served.end()) return std::nullopt;
  return model_not_found_error(name, served);
}

}  // namespace tensorfold
