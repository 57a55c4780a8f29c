#include "coordinator/api/error.h"

#include <algorithm>
#include <array>

#include "coordinator/api/json_writer.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

constexpr std::string_view kBad = "invalid_request_error";
constexpr std::string_view kServer = "server_error";

// gRPC's numbers: 1 cancelled, 3 invalid argument, 4 deadline exceeded, 5 not found, 8 resource exhausted, 11 out of
// range, 12 unimplemented, 13 internal, 14 unavailable, 16 unauthenticated.
constexpr std::array<ErrorInfo, 25> kCatalogue = {{
    {ErrorCode::kInvalidJson, ErrorGroup::kRequest, "invalid_json", 400, kBad, 3,
     "the body is not valid JSON: {1} at byte {0}", "The body is not one JSON object, or is nested too deeply."},
    {ErrorCode::kInvalidType, ErrorGroup::kRequest, "invalid_type", 400, kBad, 3, "{}: expected {}, found {}",
     "A field has the wrong JSON type."},
    {ErrorCode::kInvalidValue, ErrorGroup::kRequest, "invalid_value", 400, kBad, 3, "{}: {}",
     "A field has the right type and a value that is not allowed."},
    {ErrorCode::kMissingField, ErrorGroup::kRequest, "missing_required_parameter", 400, kBad, 3,
     "{}: missing; it must be {}", "A field that must be there is not."},
    {ErrorCode::kUnknownField, ErrorGroup::kRequest, "unknown_parameter", 400, kBad, 3,
     "{}: unknown field{}; it is refused because ignoring it could change what you get",
     "A field that this server does not know. Fields that cannot matter are accepted by name instead."},
    {ErrorCode::kUnsupported, ErrorGroup::kRequest, "unsupported_parameter", 400, kBad, 12, "{}: not supported: {}",
     "A known field or value that this server does not offer."},
    {ErrorCode::kContextLengthExceeded, ErrorGroup::kRequest, "context_length_exceeded", 400, kBad, 11,
     "the context is {} tokens, but the request needs {} ({} of prompt, {} of reply)",
     "Prompt and reply do not fit the model's context. Said before any work."},
    {ErrorCode::kCacheTooSmall, ErrorGroup::kRequest, "cache_too_small", 400, kBad, 11,
     "the request needs cache pages for {} tokens, and the whole pool holds {}; ask for a shorter reply or a larger "
     "pool",
     "The request could never be admitted, however empty the server."},
    {ErrorCode::kUnauthorized, ErrorGroup::kRequest, "invalid_api_key", 401, "authentication_error", 16,
     "missing or wrong API key; send 'Authorization: Bearer KEY'", "No key, or one that is not in the profile."},
    {ErrorCode::kModelNotFound, ErrorGroup::kRequest, "model_not_found", 404, kBad, 5,
     "model '{}' is not served here; there is {}", "The model's name is not one that this server serves."},
    {ErrorCode::kUnknownUrl, ErrorGroup::kRequest, "unknown_url", 404, kBad, 5, "no such endpoint: {} {}",
     "The path is not part of the API."},
    {ErrorCode::kMethodNotAllowed, ErrorGroup::kRequest, "method_not_allowed", 405, kBad, 12,
     "{} is not allowed on {}; use {}", "The path exists with another method."},
    {ErrorCode::kRequestTimeout, ErrorGroup::kRequest, "request_timeout", 408, kBad, 4,
     "the request did not arrive whole within {} s", "Headers or body came too slowly."},
    {ErrorCode::kBodyTooLarge, ErrorGroup::kRequest, "body_too_large", 413, kBad, 8,
     "the body is over the limit of {} bytes", "The body is longer than the profile allows."},
    {ErrorCode::kUnsupportedMediaType, ErrorGroup::kRequest, "unsupported_media_type", 415, kBad, 3,
     "the body must be application/json, not '{}'", "The Content-Type is not JSON."},
    {ErrorCode::kHeadersTooLarge, ErrorGroup::kRequest, "headers_too_large", 431, kBad, 8,
     "the headers are over the limit of {} bytes", "The headers are longer than the profile allows."},
    {ErrorCode::kCancelled, ErrorGroup::kRequest, "cancelled", 499, kBad, 1,
     "the client left before the reply was complete", "Seen in logs and metrics; nobody is left to read it."},
    {ErrorCode::kRankFailed, ErrorGroup::kRank, "rank_failed", 503, kServer, 14,
     "rank {} ({}) failed during this request: {}",
     "A rank was lost and did not come back before the parking deadline."},
    {ErrorCode::kModelOutputBroken, ErrorGroup::kRank, "model_output_broken", 500, kServer, 13, "{}",
     "The model gave a logit that is not a number; the checkpoint or a machine is damaged."},
    {ErrorCode::kQueueFull, ErrorGroup::kCluster, "queue_full", 429, "rate_limit_error", 8,
     "{} requests are waiting and the queue holds {}; try again in {} s", "Said before headers, with Retry-After."},
    {ErrorCode::kClusterDown, ErrorGroup::kCluster, "cluster_down", 503, kServer, 14,
     "the cluster is not serving: rank {} ({}): {}; try again in {} s",
     "A rank is down or stalled; the message names it. With Retry-After."},
    {ErrorCode::kStarting, ErrorGroup::kCluster, "starting", 503, kServer, 14,
     "the cluster is starting and waits for {}; try again in {} s", "Not ready yet. With Retry-After."},
    {ErrorCode::kDraining, ErrorGroup::kCluster, "draining", 503, kServer, 14,
     "the server is shutting down and takes no new requests; try again in {} s", "After SIGTERM. With Retry-After."},
    {ErrorCode::kTimeout, ErrorGroup::kCluster, "timeout", 504, kServer, 4, "the reply was not complete within {} s",
     "The profile's request_timeout passed."},
    {ErrorCode::kInternal, ErrorGroup::kCluster, "internal_error", 500, kServer, 13, "internal error: {}",
     "A fault of the server's own."},
}};

template <typename... Args>
ApiError make(ErrorCode code, std::string_view param, const Args&... args) {
  ApiError error;
  error.code = code;
  error.param = std::string(param);
  error.message = fmt::format(fmt::runtime(error_info(code).format), args...);
  return error;
}

template <typename... Args>
ApiError make_retry(ErrorCode code, int retry_after_s, const Args&... args) {
  ApiError error = make(code, "", args...);
  error.retry_after_s = std::max(retry_after_s, 1);
  return error;
}

// Client text in messages is kept short.
std::string_view brief(std::string_view text) { return text.substr(0, 200); }

}  // namespace

std::span<const ErrorInfo> error_catalogue() { return kCatalogue; }

const ErrorInfo& error_info(ErrorCode code) { return kCatalogue[static_cast<size_t>(code)]; }

std::string_view error_group_name(ErrorGroup group) {
  switch (group) {
    case ErrorGroup::kRequest:
      return "request";
    case ErrorGroup::kRank:
      return "rank";
    case ErrorGroup::kCluster:
      return "cluster";
  }
  return "unknown";
}

void write_error(JsonWriter& json, const ApiError& error) {
  json.key("error").begin_object();
  json.field("message", error.message).field("type", error.info().type);
  if (error.param.empty()) {
    json.key("param").null();
  } else {
    json.field("param", error.param);
  }
  json.field("code", error.info().name).end_object();
}

std::string error_body(const ApiError& error) {
  JsonWriter json;
  json.begin_object();
  write_error(json, error);
  return json.end_object().take();
}

ApiError invalid_json_error(size_t byte, std::string_view why) { return make(ErrorCode::kInvalidJson, "", byte, why); }

ApiError invalid_type_error(std::string_view param, std::string_view expected, std::string_view found) {
  return make(ErrorCode::kInvalidType, brief(param), brief(param), expected, found);
}

ApiError invalid_value_error(std::string_view param, std::string_view why) {
  return make(ErrorCode::kInvalidValue, brief(param), brief(param), why);
}

ApiError missing_field_error(std::string_view param, std::string_view what) {
  return make(ErrorCode::kMissingField, brief(param), brief(param), what);
}

ApiError unknown_field_error(std::string_view param, std::string_view suggestion) {
  const std::string hint = suggestion.empty() ? "" : fmt::format(" (did you mean '{}'?)", suggestion);
  return make(ErrorCode::kUnknownField, brief(param), brief(param), hint);
}

ApiError unsupported_error(std::string_view param, std::string_view why) {
  return make(ErrorCode::kUnsupported, brief(param), brief(param), why);
}

ApiError context_length_error(uint64_t limit, uint64_t prompt, uint64_t reply) {
  // A prompt that fills the context alone still needs room for one token.
  const uint64_t asked = std::max<uint64_t>(reply, 1);
  return make(ErrorCode::kContextLengthExceeded, "messages", limit, prompt + asked, prompt, asked);
}

ApiError cache_too_small_error(uint64_t needed_tokens, uint64_t pool_tokens) {
  return make(ErrorCode::kCacheTooSmall, "", needed_tokens, pool_tokens);
}

ApiError unauthorized_error() { return make(ErrorCode::kUnauthorized, ""); }

ApiError model_not_found_error(std::string_view model, std::span<const std::string> served) {
  std::string list;
  for (const std::string& name : served) list += fmt::format("{}'{}'", list.empty() ? "" : ", ", name);
  return make(ErrorCode::kModelNotFound, "model", brief(model), list.empty() ? std::string("none") : list);
}

ApiError unknown_url_error(std::string_view method, std::string_view path) {
  return make(ErrorCode::kUnknownUrl, "", brief(method), brief(path));
}

ApiError method_not_allowed_error(std::string_view method, std::string_view path, std::string_view allowed) {
  return make(ErrorCode::kMethodNotAllowed, "", brief(method), brief(path), allowed);
}

ApiError request_timeout_error(double seconds) { return make(ErrorCode::kRequestTimeout, "", seconds); }

ApiError body_too_large_error(uint64_t limit_bytes) { return make(ErrorCode::kBodyTooLarge, "", limit_bytes); }

ApiError unsupported_media_type_error(std::string_view found) {
  return make(ErrorCode::kUnsupportedMediaType, "", brief(found));
}

ApiError headers_too_large_error(uint64_t limit_bytes) { return make(ErrorCode::kHeadersTooLarge, "", limit_bytes); }

ApiError cancelled_error() { return make(ErrorCode::kCancelled, ""); }

ApiError rank_failed_error(int rank, std::string_view host, std::string_view cause, int retry_after_s) {
  return make_retry(ErrorCode::kRankFailed, retry_after_s, rank, host, cause);
}

ApiError model_output_broken_error(std::string_view detail) { return make(ErrorCode::kModelOutputBroken, "", detail); }

ApiError queue_full_error(uint64_t waiting, uint64_t limit, int retry_after_s) {
  return make_retry(ErrorCode::kQueueFull, retry_after_s, waiting, limit, std::max(retry_after_s, 1));
}

ApiError queue_tokens_full_error(uint64_t waiting_tokens, uint64_t limit, uint64_t tokens, int retry_after_s) {
  ApiError error = queue_full_error(0, 0, retry_after_s);
  error.message =
      fmt::format("{} prompt tokens are waiting and the queue holds {}, so {} more do not fit; try again in {} s",
                  waiting_tokens, limit, tokens, std::max(retry_after_s, 1));
  return error;
}

ApiError cluster_down_error(int rank, std::string_view host, std::string_view cause, int retry_after_s) {
  return make_retry(ErrorCode::kClusterDown, retry_after_s, rank, host, cause, std::max(retry_after_s, 1));
}

ApiError starting_error(std::string_view waits_for, int retry_after_s) {
  return make_retry(ErrorCode::kStarting, retry_after_s, waits_for, std::max(retry_after_s, 1));
}

ApiError draining_error(int retry_after_s) {
  return make_retry(ErrorCode::kDraining, retry_after_s, std::max(retry_after_s, 1));
}

ApiError timeout_error(double seconds) { return make(ErrorCode::kTimeout, "", seconds); }

ApiError internal_error(std::string_view detail) { return make(ErrorCode::kInternal, "", detail); }

ApiError error_from_status(const absl::Status& status) {
  const std::string message(status.message());
  ApiError error;
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
      error.code = ErrorCode::kInvalidValue;
      break;
    case absl::StatusCode::kOutOfRange:
      error.code = ErrorCode::kContextLengthExceeded;
      break;
    case absl::StatusCode::kUnimplemented:
      error.code = ErrorCode::kUnsupported;
      break;
    case absl::StatusCode::kCancelled:
      error.code = ErrorCode::kCancelled;
      break;
    case absl::StatusCode::kDeadlineExceeded:
      error.code = ErrorCode::kTimeout;
      break;
    case absl::StatusCode::kResourceExhausted:
      error.code = ErrorCode::kQueueFull;
      error.retry_after_s = 1;
      break;
    case absl::StatusCode::kUnavailable:
      error.code = ErrorCode::kClusterDown;
      error.retry_after_s = 1;
      break;
    default:
      return internal_error(message);
  }
  error.message = message;
  return error;
}

}  // namespace tensorfold
