// Which endpoint a request is for, and whether its head may pass: everything that can be said before a body is read.
// Pure functions, any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "coordinator/api/error.h"

namespace tensorfold {

enum class Endpoint : uint8_t {
  kChat,
  kCompletions,
  kModels,
  kModel,
  kTokenize,
  kDetokenize,
  kHealth,
  kReady,
  kMetrics,
  kStates,
  kUnknown,
};

/// The path, as metrics and logs name it: "/v1/models/{id}" for any model, "other" for an unknown path.
std::string_view endpoint_name(Endpoint endpoint);
/// For the Allow header, as "GET, HEAD, OPTIONS"; empty for an unknown path.
std::string_view allowed_methods(Endpoint endpoint);
/// Whether it generates, so that it watches for clients that leave.
bool endpoint_generates(Endpoint endpoint);
/// Whether it is served without a key where keys are required.
bool endpoint_is_open(Endpoint endpoint);

struct Route {
  Endpoint endpoint = Endpoint::kUnknown;
  std::string argument;  // the model's name of kModel, decoded
};
/// `target` as in the request line; a query is ignored.
Route find_route(std::string_view target, bool metrics_enabled);

/// What is read off a request's head.
struct RequestHead {
  std::string method;
  std::string target;
  std::string content_type;
  bool authorized = true;
};
/// 404, 405, 401 or 415; nothing when the body may come.
std::optional<ApiError> check_head(const RequestHead& head, Endpoint endpoint);

/// For logs: printable ASCII, at most 128 characters, without the query.
std::string loggable_path(std::string_view target);

}  // namespace tensorfold
