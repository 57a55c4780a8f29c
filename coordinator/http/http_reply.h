// A reply's bytes on the wire (HTTP/1.1, RFC 9112). Pure functions, any thread.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "coordinator/api/error.h"

namespace tensorfold {

struct HttpReply {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;
};

/// The catalogue's body, with Retry-After and WWW-Authenticate where they belong.
HttpReply error_reply(const ApiError& error);

/// The same on every reply of one request.
struct ReplyContext {
  std::string request_id;  // X-Request-Id; empty: none
  std::string cors_origin;
  bool keep_alive = true;
  bool head_only = false;  // the answer to HEAD: the length of the body, and no body
};

std::string reply_text(const HttpReply& reply, const ReplyContext& context);
/// The head of a stream of server-sent events. `chunked`: false for HTTP/1.0 clients, whose stream ends with the
/// connection.
std::string stream_head(const ReplyContext& context, bool chunked);
/// `data` as one chunk; nothing for no data, since an empty chunk ends the body.
std::string chunk_text(std::string_view data);
std::string last_chunk();

}  // namespace tensorfold
