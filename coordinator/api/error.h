// The error catalogue: every failure a client can see, with its HTTP status, OpenAI-style type, gRPC code and message,
// in one table. Grouped by what is hurt: the request (the client must change it), a rank (one machine or its model),
// the cluster (the service as a whole; the same request may succeed later).
//
// Messages say what was wrong in the user's terms and what is allowed. They never carry prompt text beyond a field's
// name or a short value. Plain data, any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "absl/status/status.h"

namespace tensorfold {

class JsonWriter;

enum class ErrorGroup : uint8_t { kRequest, kRank, kCluster };

enum class ErrorCode : uint8_t {
  // request
  kInvalidJson,
  kInvalidType,
  kInvalidValue,
  kMissingField,
  kUnknownField,
  kUnsupported,
  kContextLengthExceeded,
  kCacheTooSmall,
  kUnauthorized,
  kModelNotFound,
  kUnknownUrl,
  kMethodNotAllowed,
  kRequestTimeout,
  kBodyTooLarge,
  kUnsupportedMediaType,
  kHeadersTooLarge,
  kCancelled,
  // rank
  kRankFailed,
  kModelOutputBroken,
  // cluster
  kQueueFull,
  kClusterDown,
  kStarting,
  kDraining,
  kTimeout,
  kInternal,
};

struct ErrorInfo {
  ErrorCode code;
  ErrorGroup group;
  std::string_view name;  // "code" in the body
  int http_status;
  std::string_view type;    // "type" in the body
  int grpc_code;            // google.rpc.Code
  std::string_view format;  // of the message, for fmt
  std::string_view help;    // one line for the docs
};

// One entry a code, in the order of ErrorCode.
std::span<const ErrorInfo> error_catalogue();
const ErrorInfo& error_info(ErrorCode code);
std::string_view error_group_name(ErrorGroup group);

struct ApiError {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
  std::string param;                 // the field at fault, as "messages[2].content"; empty: null in the body
  std::optional<int> retry_after_s;  // the Retry-After header, seconds

  const ErrorInfo& info() const { return error_info(code); }
  int http_status() const { return info().http_status; }
};

// "error": {"message","type","param","code"}; always valid UTF-8.
void write_error(JsonWriter& json, const ApiError& error);
// An object of that alone.
std::string error_body(const ApiError& error);

// One maker a code: the only places where messages are put together.
ApiError invalid_json_error(size_t byte, std::string_view why);
ApiError invalid_type_error(std::string_view param, std::string_view expected, std::string_view found);
ApiError invalid_value_error(std::string_view param, std::string_view why);
ApiError missing_field_error(std::string_view param, std::string_view what);
ApiError unknown_field_error(std::string_view param, std::string_view suggestion);  // suggestion may be empty
ApiError unsupported_error(std::string_view param, std::string_view why);
// Before any work: `limit` is the context in tokens, `prompt` the prompt's length, `reply` the tokens asked for (0:
// none named).
ApiError context_length_error(uint64_t limit, uint64_t prompt, uint64_t reply);
ApiError cache_too_small_error(uint64_t needed_tokens, uint64_t pool_tokens);
ApiError unauthorized_error();
ApiError model_not_found_error(std::string_view model, std::span<const std::string> served);
ApiError unknown_url_error(std::string_view method, std::string_view path);
ApiError method_not_allowed_error(std::string_view method, std::string_view path, std::string_view allowed);
ApiError request_timeout_error(double seconds);
ApiError body_too_large_error(uint64_t limit_bytes);
ApiError unsupported_media_type_error(std::string_view found);
ApiError headers_too_large_error(uint64_t limit_bytes);
ApiError cancelled_error();
ApiError rank_failed_error(int rank, std::string_view host, std::string_view cause, int retry_after_s);
ApiError model_output_broken_error(std::string_view detail);
ApiError queue_full_error(uint64_t waiting, uint64_t limit, int retry_after_s);
// The same code, where the bound on waiting prompt tokens is the one that is met.
ApiError queue_tokens_full_error(uint64_t waiting_tokens, uint64_t limit, uint64_t tokens, int retry_after_s);
ApiError cluster_down_error(int rank, std::string_view host, std::string_view cause, int retry_after_s);
ApiError starting_error(std::string_view waits_for, int retry_after_s);
ApiError draining_error(int retry_after_s);
ApiError timeout_error(double seconds);
ApiError internal_error(std::string_view detail);

// For statuses that come from deeper layers without an error of their own.
ApiError error_from_status(const absl::Status& status);

// A value or an ApiError.
template <typename T>
class [[nodiscard]] ApiOr {
 public:
  ApiOr(T value) : state_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  ApiOr(ApiError error) : state_(std::move(error)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return std::holds_alternative<T>(state_); }
  const ApiError& error() const { return std::get<ApiError>(state_); }  // only when !ok()
  T& operator*() { return std::get<T>(state_); }                        // only when ok()
  const T& operator*() const { return std::get<T>(state_); }
  T* operator->() { return &std::get<T>(state_); }
  const T* operator->() const { return &std::get<T>(state_); }

 private:
  std::variant<T, ApiError> state_;
};

}  // namespace tensorfold
