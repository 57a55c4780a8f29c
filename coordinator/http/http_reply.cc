#include "coordinator/http/http_reply.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <ctime>

namespace tensorfold {
namespace {

std::string_view status_text(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Content Too Large";
    case 415:
      return "Unsupported Media Type";
    case 417:
      return "Expectation Failed";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 499:
      return "Client Closed Request";
    case 500:
      return "Internal Server Error";
    case 503:
      return "Service Unavailable";
    case 504:
      return "Gateway Timeout";
    default:
      return "Error";
  }
}

std::string common_head(int status, const ReplyContext& context) {
  // C's locale, which the process never changes, names days and months in English.
  std::string out = fmt::format("HTTP/1.1 {} {}\r\nServer: tensorfold\r\nDate: {:%a, %d %b %Y %H:%M:%S} GMT\r\n",
                                status, status_text(status), fmt::gmtime(std::time(nullptr)));
  if (!context.request_id.empty()) out += fmt::format("X-Request-Id: {}\r\n", context.request_id);
  if (!context.cors_origin.empty()) {
    out +=
        fmt::format("Access-Control-Allow-Origin: {}\r\nAccess-Control-Expose-Headers: X-Request-Id, Retry-After\r\n",
                    context.cors_origin);
    if (context.cors_origin != "*") out += "Vary: Origin\r\n";
  }
  out += context.keep_alive ? "Connection: keep-alive\r\n" : "Connection: close\r\n";
  return out;
}

}  // namespace

HttpReply error_reply(const ApiError& error) {
  HttpReply reply;
  reply.status = error.http_status();
  reply.body = error_body(error);
  if (error.retry_after_s) reply.headers.emplace_back("Retry-After", std::to_string(*error.retry_after_s));
  if (error.code == ErrorCode::kUnauthorized) reply.headers.emplace_back("WWW-Authenticate", "Bearer");
  return reply;
}

std::string reply_text(const HttpReply& reply, const ReplyContext& context) {
  std::string out = common_head(reply.status, context);
  for (const auto& [name, value] : reply.headers) out += fmt::format("{}: {}\r\n", name, value);
  if (reply.status != 204) {
    out += fmt::format("Content-Type: {}\r\nContent-Length: {}\r\n", reply.content_type, reply.body.size());
  }
  out += "\r\n";
  if (!context.head_only) out += reply.body;
  return out;
}

std::string stream_head(const ReplyContext& context, bool chunked) {
  std::string out = common_head(200, context);
  out += "Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n";
  if (chunked) out += "Transfer-Encoding: chunked\r\n";
  return out + "\r\n";
}

std::string chunk_text(std::string_view data) {
  if (data.empty()) return "";
  return fmt::format("{:x}\r\n{}\r\n", data.size(), data);
}

std::string last_chunk() { return "0\r\n\r\n"; }

}  // namespace tensorfold
