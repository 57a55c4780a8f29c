// The small endpoints' bodies: /tokenize, /detokenize, /v1/models. Pure functions, any thread.
#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/api/chat_request.h"
#include "coordinator/api/error.h"

namespace tensorfold {

// {"prompt": text} or {"messages": […]}, with "model", "add_special_tokens" (default true; for a prompt), and for
// messages "tools", "add_generation_prompt" (default true), "enable_thinking", "reasoning_effort",
// "chat_template_kwargs".
struct TokenizeRequest {
  std::string model;
  std::optional<std::string> prompt;  // exactly when there are no messages
  std::vector<ChatMessage> messages;
  boost::json::array tools;
  boost::json::object chat_template_kwargs;
  bool add_special_tokens = true;
  bool add_generation_prompt = true;
};
ApiOr<TokenizeRequest> parse_tokenize_request(std::string_view body);
// {"tokens":[…],"count":…,"max_model_len":…}
std::string tokenize_body(std::span<const uint32_t> ids, uint32_t context);

// {"tokens":[…]}, with "model".
struct DetokenizeRequest {
  std::string model;
  std::vector<uint32_t> tokens;
};
ApiOr<DetokenizeRequest> parse_detokenize_request(std::string_view body);
// {"prompt":"…"}
std::string detokenize_body(std::string_view text);

struct ServedModel {
  std::string id;
  int64_t created = 0;      // seconds since 1970
  uint32_t context = 0;     // tokens of prompt and reply
  std::string fingerprint;  // numeric fingerprint, 16 hex characters
};
std::string models_body(std::span<const ServedModel> models);
std::string model_body(const ServedModel& model);

// An empty name means the model that is served; any other must be in the list, or model_not_found.
std::optional<ApiError> check_model(std::string_view name, std::span<const std::string> served);

}  // namespace tensorfold
