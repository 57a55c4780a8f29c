// Requests that a server must refuse, for soak runs: each says what is wrong with it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "coordinator/load/options.h"

namespace tensorfold {

enum class MalformedKind : uint8_t {
  kBrokenJson,
  kWrongType,
  kUnknownField,
  kUnknownModel,
  kOverlongPrompt,
  kUnknownPath,
  kNotHttp,
  kCutBody,  // half of the body it announces; then our half of the connection ends
};
inline constexpr size_t kMalformedKinds = 8;
/// "broken JSON", …
std::string_view malformed_kind_name(MalformedKind kind);

struct MalformedRequest {
  MalformedKind kind = MalformedKind::kBrokenJson;
  std::string bytes;           // the whole request, from its first line
  bool ends_after = false;     // our half of the connection ends after the bytes
  bool may_be_silent = false;  // a closed connection without an answer is right too
};

/// The one that stands for conversation `index`. Every kind must be answered with a status of 400 to 499.
MalformedRequest malformed_request(const LoadOptions& options, uint64_t index);

/// Method, path and headers of a POST of `length` bytes of JSON.
std::string post_head(const LoadOptions& options, std::string_view path, size_t length);

}  // namespace tensorfold
