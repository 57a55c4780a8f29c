// A streamed chat reply as a client puts it together from its events (docs/api.md, "Streams"). What a server sends is
// checked: wrong types are errors, and no more than kMaxReplyBytes are kept.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tensorfold {

inline constexpr size_t kMaxReplyBytes = size_t{16} << 20;

struct StreamedCall {
  std::string name;
  std::string arguments;  // JSON text
};

struct StreamedReply {
  std::string content;
  std::string reasoning;
  std::vector<StreamedCall> calls;
  std::string finish_reason;
  bool done = false;          // "[DONE]" has come
  std::string error_code;     // of an error inside the stream
  std::string error_message;  // the same
  // Of the usage, or 0.
  uint64_t prompt_tokens = 0;
  uint64_t completion_tokens = 0;
  // Of the `tensorfold` block; token_sha is empty for a server that has none.
  std::string token_sha;
  uint64_t cached = 0;
  uint64_t drafted = 0;
  uint64_t accepted = 0;
  uint64_t rounds = 0;

  /// Everything came that makes a reply.
  bool complete() const { return done && error_code.empty() && !finish_reason.empty(); }
};

/// Takes the data of one event into `reply`. Returns whether the event shows something of the reply (text, reasoning or
/// a call). InvalidArgument: no JSON, a wrong type, something after the end, more than kMaxReplyBytes.
absl::StatusOr<bool> take_event(std::string_view data, StreamedReply* reply);

/// The `error` object of an error's body as "code: message", shortened; the body's beginning when it is none.
std::string error_text(std::string_view body);
/// Only the code; empty when there is none.
std::string error_code_of(std::string_view body);

}  // namespace tensorfold
