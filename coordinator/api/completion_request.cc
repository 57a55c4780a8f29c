#include "coordinator/api/completion_request.h"

#include <algorithm>
#include <boost/json.hpp>

#include "coordinator/api/request_fields.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

using boost::json::array;
using boost::json::value;

ApiOr<CompletionPrompt> prompt_of_ids(const array& ids, const std::string& path) {
  if (ids.empty()) return invalid_value_error(path, "it has no token ids; at least one is needed");
  if (ids.size() > kMaxPromptIds) {
    return invalid_value_error(path, fmt::format("{} token ids; at most {}", ids.size(), kMaxPromptIds));
  }
  ApiOr<std::vector<uint32_t>> parsed = json_ids(ids, path);
  if (!parsed.ok()) return parsed.error();
  return CompletionPrompt(std::move(*parsed));
}

// A string, token ids, or an array of either.
std::optional<ApiError> read_prompt(const value& prompt, std::vector<CompletionPrompt>* prompts) {
  if (const boost::json::string* text = prompt.if_string()) {
    prompts->emplace_back(std::string(text->data(), text->size()));
    return std::nullopt;
  }
  const array* items = prompt.if_array();
  if (items == nullptr) {
    return invalid_type_error("prompt", "a string, token ids, or an array of these", json_type_name(prompt));
  }
  if (items->empty()) return invalid_value_error("prompt", "the array is empty");
  if (items->front().is_number()) {
    ApiOr<CompletionPrompt> ids = prompt_of_ids(*items, "prompt");
    if (!ids.ok()) return ids.error();
    prompts->push_back(std::move(*ids));
    return std::nullopt;
  }
  if (items->size() > kMaxPrompts) {
    return invalid_value_error("prompt", fmt::format("{} prompts; at most {}", items->size(), kMaxPrompts));
  }
  const bool texts = items->front().is_string();
  for (size_t i = 0; i < items->size(); ++i) {
    const value& item = (*items)[i];
    const std::string path = fmt::format("prompt[{}]", i);
    if (texts && item.is_string()) {
      prompts->emplace_back(std::string(item.get_string().data(), item.get_string().size()));
    } else if (!texts && item.is_array()) {
      ApiOr<CompletionPrompt> ids = prompt_of_ids(item.get_array(), path);
      if (!ids.ok()) return ids.error();
      prompts->push_back(std::move(*ids));
    } else {
      return invalid_type_error(path, texts ? "a string, as the first" : "an array of token ids", json_type_name(item));
    }
  }
  return std::nullopt;
}

}  // namespace

ApiOr<CompletionRequest> parse_completion_request(std::string_view body, const RequestDefaults& defaults) {
  ApiOr<value> root = parse_json_body(body);
  if (!root.ok()) return root.error();
  if (!root->is_object()) return invalid_type_error("body", "an object", json_type_name(*root));
  Fields fields(root->get_object(), "");
  CompletionRequest request;
  request.model = fields.string("model", kMaxNameBytes).value_or("");
  request.options = read_options(fields, defaults);
  if (auto top = fields.integer("logprobs", 0, kMaxTopLogprobs)) {
    request.options.logprobs = static_cast<uint32_t>(*top);
  }
  if (const value* prompt = fields.get("prompt")) {
    if (auto error = read_prompt(*prompt, &request.prompts)) fields.fail(*error);
  } else {
    fields.fail(missing_field_error("prompt", "a string, token ids, or an array of these"));
  }
  const auto is_false = [](const value& v) { return v.is_bool() && !v.get_bool(); };
  fields.refuse("echo", "a reply never repeats its prompt; put the two together yourself", is_false);
  fields.refuse("suffix", "text is not filled into the middle",
                [](const value& v) { return v.is_string() && v.get_string().empty(); });
  fields.refuse("best_of", "choices are not ranked; use n",
                [&](const value& v) { return v.is_int64() && v.get_int64() == int64_t{request.options.n}; });
  fields.refuse("messages", "this is the completions endpoint; send prompt, or use /v1/chat/completions");
  fields.refuse("response_format", "replies are not constrained");
  if (auto error = fields.finish()) return *error;
  return request;
}

}  // namespace tensorfold
