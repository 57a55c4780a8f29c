#include "coordinator/api/generation.h"

#include <algorithm>
#include <cmath>

#include "coordinator/api/request_options.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

std::optional<ApiError> check_range(std::string_view name, double value, double low, double high) {
  if (std::isfinite(value) && value >= low && value <= high) return std::nullopt;
  return invalid_value_error(name, fmt::format("{} is not between {} and {}", value, low, high));
}

std::optional<ApiError> check_ids(std::string_view name, const std::vector<uint32_t>& ids, uint32_t vocabulary) {
  if (vocabulary == 0) return std::nullopt;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= vocabulary) {
      return invalid_value_error(
          name, fmt::format("token id {} at index {} is not in the vocabulary of {} tokens", ids[i], i, vocabulary));
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<Priority> parse_priority(std::string_view name) {
  if (name == "foreground") return Priority::kForeground;
  if (name == "background") return Priority::kBackground;
  return std::nullopt;
}

std::string_view finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kToolCalls:
      return "tool_calls";
    case FinishReason::kError:
      return "error";
    case FinishReason::kCancelled:
      return "cancelled";
  }
  return "error";
}

std::optional<ApiError> check_sampling(const SamplingParams& params, uint32_t vocabulary) {
  if (auto error = check_range("temperature", params.temperature, 0.0, 2.0)) return error;
  if (auto error = check_range("top_p", params.top_p, 0.0, 1.0)) return error;
  if (auto error = check_range("min_p", params.min_p, 0.0, 1.0)) return error;
  if (params.top_k > kMaxVocabulary) {
    return invalid_value_error("top_k",
                               fmt::format("{} is over {}; leave it out for all", params.top_k, kMaxVocabulary));
  }
  if (auto error = check_range("repetition_penalty", params.repetition_penalty, 0.01, 100.0)) return error;
  if (auto error = check_range("presence_penalty", params.presence_penalty, -2.0, 2.0)) return error;
  if (auto error = check_range("frequency_penalty", params.frequency_penalty, -2.0, 2.0)) return error;
  if (params.logit_bias.size() > kMaxLogitBias) {
    return invalid_value_error("logit_bias",
                               fmt::format("{} entries; at most {}", params.logit_bias.size(), kMaxLogitBias));
  }
  for (const LogitBias& bias : params.logit_bias) {
    if (auto error = check_range(fmt::format("logit_bias.{}", bias.id), bias.bias, -100.0, 100.0)) return error;
    if (vocabulary > 0 && bias.id >= vocabulary) {
      return invalid_value_error("logit_bias",
                                 fmt::format("token id {} is not in the vocabulary of {} tokens", bias.id, vocabulary));
    }
  }
  return std::nullopt;
}

std::optional<ApiError> resolve_generation(const GenerationBounds& bounds, std::optional<uint32_t> wanted,
                                           GenerationRequest* request) {
  if (auto error = check_sampling(request->sampling, bounds.vocabulary)) return error;
  if (request->prompt.empty()) return invalid_value_error("prompt", "it has no tokens; at least one is needed");
  if (auto error = check_ids("prompt", request->prompt, bounds.vocabulary)) return error;
  if (auto error = check_ids("stop_token_ids", request->stop_ids, bounds.vocabulary)) return error;
  if (request->n < 1 || request->n > kMaxChoices) {
    return invalid_value_error("n", fmt::format("{} is not between 1 and {}", request->n, kMaxChoices));
  }
  if (request->logprobs.value_or(0) > kMaxTopLogprobs) {
    return invalid_value_error("top_logprobs", fmt::format("{} is over {}", *request->logprobs, kMaxTopLogprobs));
  }
  if (request->stop.size() > kMaxStops) {
    return invalid_value_error("stop", fmt::format("{} strings; at most {}", request->stop.size(), kMaxStops));
  }
  for (const std::string& stop : request->stop) {
    if (stop.empty() || stop.size() > kMaxStopBytes) {
      return invalid_value_error("stop", fmt::format("a stop string has between 1 and {} bytes", kMaxStopBytes));
    }
  }
  if (wanted == 0u) return invalid_value_error("max_tokens", "0 is not at least 1");

  const uint64_t prompt = request->prompt.size();
  uint64_t reply = wanted.value_or(bounds.max_tokens);
  if (bounds.context > 0) {
    if (prompt >= bounds.context || (wanted && prompt + *wanted > bounds.context)) {
      return context_length_error(bounds.context, prompt, wanted.value_or(0));
    }
    const uint64_t room = bounds.context - prompt;
    reply = reply == 0 ? room : std::min(reply, room);
  } else if (reply == 0) {
    return invalid_value_error("max_tokens", "it must be given: the model states no context length");
  }
  request->max_tokens = static_cast<uint32_t>(reply);
  if (request->min_tokens > request->max_tokens) {
    return invalid_value_error("min_tokens", fmt::format("{} is over the reply's limit of {} tokens",
                                                         request->min_tokens, request->max_tokens));
  }
  return std::nullopt;
}

}  // namespace tensorfold
