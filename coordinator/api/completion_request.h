// POST /v1/completions (OpenAI's older dialect): a body to a typed request, or an error. As strict as chat_request.h.
// Pure functions, any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "coordinator/api/error.h"
#include "coordinator/api/request_options.h"

namespace tensorfold {

// Text (never read as control tokens), or token ids as they are.
using CompletionPrompt = std::variant<std::string, std::vector<uint32_t>>;

struct CompletionRequest {
  std::string model;                      // empty: the one that is served
  std::vector<CompletionPrompt> prompts;  // at least one; choice p * n + i is choice i of prompt p
  RequestOptions options;
};

// `echo`, `suffix` and a `best_of` other than n are refused by name.
ApiOr<CompletionRequest> parse_completion_request(std::string_view body, const RequestDefaults& defaults);

}  // namespace tensorfold
