// Many HTTP requests at once from one thread: plain ones and streams of server-sent events, with the time of everything
// that came. Every wait has a deadline.
//
// Thread-safety: none; all of it runs on the thread that runs the io_context, which outlives the client.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/load/streamed_reply.h"

namespace tensorfold {

using LoadClock = std::chrono::steady_clock;

/// When a client goes before it has its reply: after so many events that show something, or, when that is 0, after a
/// time.
struct LeavePlan {
  uint64_t after_events = 0;
  std::chrono::microseconds after{0};
  bool reset = false;  // the connection is reset, not closed
};

struct ClientRequest {
  std::string bytes;        // from the request line to the end of the body
  bool ends_after = false;  // our half of the connection ends after them
  bool keeps = true;        // a kept connection may be used and kept again
  std::optional<LeavePlan> leave;
};

enum class ExchangeEnd : uint8_t {
  kReply,         // the whole response came; what it says is in status, body and reply
  kLeft,          // we left, as planned
  kNotConnected,  // nobody took the connection
  kTimeout,
  kDisconnected,  // the server ended the connection in the middle
  kBroken,        // no HTTP, no events, no JSON, or a stream without its end
};

struct Exchange {
  ExchangeEnd end = ExchangeEnd::kReply;
  std::string message;  // unless kReply or kLeft: what happened
  int status = 0;       // 0: none came
  int retry_after_s = 0;
  bool streamed = false;
  std::string body;     // of a response that is no stream, at most 1 MiB
  StreamedReply reply;  // of a stream
  LoadClock::time_point started, ended;
  std::vector<LoadClock::time_point> shown;  // when each event came that shows something
};

struct ClientSettings {
  std::string authority;  // for messages: "127.0.0.1:8000"
  std::vector<boost::asio::ip::tcp::endpoint> endpoints;
  std::chrono::milliseconds connect_timeout{5000};
  std::chrono::milliseconds idle_timeout{60000};
  std::chrono::milliseconds timeout{300000};
};

class LoadClient {
 public:
  using Done = std::function<void(Exchange)>;

  LoadClient(boost::asio::io_context& io, ClientSettings settings);
  ~LoadClient();
  LoadClient(const LoadClient&) = delete;
  LoadClient& operator=(const LoadClient&) = delete;

  /// `done` is called once, from the io_context, never from inside send().
  void send(ClientRequest request, Done done);
  /// Sends, and runs the io_context until the exchange is over. Not while others are under way.
  Exchange ask(ClientRequest request);
  const ClientSettings& settings() const { return *settings_; }

 private:
  class Running;
  struct Kept;
  struct Pool;

  boost::asio::io_context& io_;
  std::shared_ptr<const ClientSettings> settings_;
  std::shared_ptr<Pool> pool_;
};

}  // namespace tensorfold
