// A client that sends exactly the bytes it is given, and reads HTTP/1.1 replies strictly.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tensorfold {

struct RawReply {
  int status = 0;                              // 0: the connection ended before a reply
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;                            // chunks joined
  bool well_formed = true;                     // framing as the headers promise
};

class RawClient {
 public:
  explicit RawClient(uint16_t port, int receive_buffer = 0);
  ~RawClient();
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  bool connected() const { return fd_ >= 0; }
  /// False once the other end has closed.
  bool send(std::string_view bytes);
  /// One reply. `head_only`: the answer to HEAD.
  RawReply read_reply(bool head_only = false);
  /// Reads until `text` has come; false at the end of the stream or after the time-out.
  bool read_until(std::string_view text);
  /// Whether the other end closes within the time-out.
  bool ends();
  void close();
  /// Ends with a reset instead of a FIN.
  void reset();
  const std::string& buffered() const { return buffer_; }
  int fd() const { return fd_; }

 private:
  bool fill();  // reads more; false at the end or after ten seconds
  std::optional<std::string> line();

  int fd_ = -1;
  std::string buffer_;
};

/// "POST PATH HTTP/1.1" with a JSON body and more header lines ("Name: value\r\n").
std::string post_text(std::string_view path, std::string_view body, std::string_view headers = "");
std::string get_text(std::string_view path, std::string_view headers = "");

/// One request on a connection of its own.
RawReply post(uint16_t port, std::string_view path, std::string_view body, std::string_view headers = "");
RawReply get(uint16_t port, std::string_view path, std::string_view headers = "");

/// The data of a stream's events, comments left out. Nothing if the text is not exactly a sequence of events that are
/// one "data: …" line or one comment each.
std::optional<std::vector<std::string>> sse_data(std::string_view body);

}  // namespace tensorfold
