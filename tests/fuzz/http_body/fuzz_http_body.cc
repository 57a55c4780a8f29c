// Fuzzes request bodies: the first byte picks the endpoint, the rest is the body. Whatever comes in gives a request
// inside its limits or an error with a 4xx status and a valid body; never a crash.
//
// Run: fuzz_http_body -max_total_time=60 -dict=tests/fuzz/http_body/http_body.dict CORPUS tests/fuzz/http_body/corpus
#include <boost/json/serialize.hpp>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/api/chat_request.h"
#include "coordinator/api/completion_request.h"
#include "coordinator/api/json_writer.h"
#include "coordinator/api/service_bodies.h"
#include "coordinator/api/stop_matcher.h"

namespace tensorfold {
namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void check_error(const ApiError& error) {
  require(error.http_status() >= 400 && error.http_status() < 500);
  const std::string body = error_body(error);
  require(json_is_utf8(body) && body.size() < 16384);
}

void check_options(const RequestOptions& options, std::string_view text) {
  require(options.n >= 1 && options.n <= kMaxChoices && options.stop.size() <= kMaxStops);
  ApiOr<GenerationRequest> request =
      make_generation(options, "id", {1, 2, 3}, {.context = 4096, .vocabulary = 0, .max_tokens = 0});
  if (!request.ok()) return check_error(request.error());
  require(request->max_tokens >= 1 && request->max_tokens <= 4093);
  StopMatcher matcher(request->stop);
  const size_t half = text.size() / 2;
  std::string shown = matcher.feed(text.substr(0, half));
  shown += matcher.feed(text.substr(half));
  shown += matcher.finish();
  require(text.substr(0, shown.size()) == shown);
}

void check_messages(const std::vector<ChatMessage>& messages) {
  for (const ChatMessage& message : messages) {
    require(json_is_utf8(message.content));
    for (const HistoryToolCall& call : message.tool_calls) {
      require(!call.name.empty());
      boost::json::serialize(call.arguments);
    }
  }
}

void one_body(uint8_t endpoint, std::string_view body) {
  RequestDefaults defaults;
  if (endpoint & 0x80) defaults.vocabulary = 1000;
  switch (endpoint & 3) {
    case 0: {
      const ApiOr<ChatRequest> request = parse_chat_request(body, defaults);
      if (!request.ok()) return check_error(request.error());
      require(!request->messages.empty());
      check_messages(request->messages);
      check_options(request->options, body);
      return;
    }
    case 1: {
      const ApiOr<CompletionRequest> request = parse_completion_request(body, defaults);
      if (!request.ok()) return check_error(request.error());
      require(!request->prompts.empty() && request->prompts.size() <= kMaxPrompts);
      check_options(request->options, body);
      return;
    }
    case 2: {
      const ApiOr<TokenizeRequest> request = parse_tokenize_request(body);
      if (!request.ok()) return check_error(request.error());
      require(request->prompt.has_value() == request->messages.empty());
      check_messages(request->messages);
      return;
    }
    default: {
      const ApiOr<DetokenizeRequest> request = parse_detokenize_request(body);
      if (!request.ok()) return check_error(request.error());
      for (uint32_t id : request->tokens) require(id < kMaxVocabulary);
      return;
    }
  }
}

}  // namespace
}  // namespace tensorfold

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  // A copy of the exact size, so that a read past the end is seen.
  const std::vector<char> body(data + 1, data + size);
  tensorfold::one_body(data[0], std::string_view(body.data(), body.size()));
  return 0;
}
