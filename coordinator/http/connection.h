// Internal to the server: one client's connection, a state machine on its own strand. Only connection.cc and server.cc
// include Beast and Asio.
#pragma once

#include <atomic>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "coordinator/http/generation_job.h"
#include "coordinator/http/http_reply.h"
#include "coordinator/http/route.h"
#include "coordinator/http/server.h"

namespace tensorfold {

/// What all connections of a server share. Outlives them.
struct ConnectionHost {
  const HttpOptions& options;
  ModelService& service;
  ServiceMetrics& metrics;
  std::atomic<bool> draining{false};
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  using tcp = boost::asio::ip::tcp;

  /// The socket's executor is a strand. `on_gone` is called last of all, when everything else is destroyed.
  Connection(tcp::socket socket, ConnectionHost& host, std::function<void()> on_gone);
  ~Connection();

  // From any thread.
  void start();
  /// Over the limit of connections: says so and closes.
  void refuse();
  /// Closes now if no request is under way, else after it.
  void drain();
  void abort();

 private:
  using ErrorCodeOf = const boost::system::error_code&;
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;
  enum class State : uint8_t { kIdle, kHead, kBody, kWorking, kGenerating, kReplying, kLingering, kClosed };

  // Reading a request.
  void read_next();
  void read_head();
  void on_head(ErrorCodeOf ec);
  void read_head_fields();
  void continue_then_read_body();
  void read_body();
  void on_body(ErrorCodeOf ec);
  void refuse_message(ErrorCodeOf ec, bool in_body);
  // Answering it.
  void dispatch();
  void run_plain();
  void run_generation();
  void on_admitted(ApiOr<std::shared_ptr<GenerationJob>> admitted);
  void on_events();
  void reply(const HttpReply& made);
  void fail(const ApiError& error, bool close_after);
  void fail_timeout(std::chrono::milliseconds allowed);
  // A client that leaves is noticed by reading while it waits.
  void watch();
  void on_client_left();
  // Writing.
  void send(std::string_view bytes);
  void flush();
  void on_written(ErrorCodeOf ec);
  void comment_later();
  void end_request();
  // Ending.
  void linger();
  void discard();
  void close();
  void arm(std::chrono::milliseconds timeout);
  void disarm();
  void on_timeout();

  double elapsed_s() const;
  ReplyContext reply_context() const;

  // Destroyed last: once it has run, the server may take the io_context away.
  struct Farewell {
    std::function<void()> call;
    ~Farewell() { call(); }
  };
  Farewell farewell_;
  tcp::socket socket_;
  boost::asio::steady_timer deadline_;
  boost::asio::steady_timer comment_timer_;
  uint64_t deadline_number_ = 0;  // of the deadline that is armed
  boost::beast::flat_buffer buffer_;
  std::optional<Parser> parser_;
  ConnectionHost& host_;

  State state_ = State::kIdle;
  bool first_request_ = true;
  bool timed_out_ = false;  // the read of a head or body that is under way
  bool watching_ = false;   // a read is under way that looks for the client's leaving
  size_t discarded_ = 0;    // bytes, while lingering

  // The request at hand.
  Route route_;
  std::string method_;
  std::string path_;
  std::string request_id_;
  bool keep_alive_ = true;
  bool trusted_ = true;
  bool background_ = false;  // the client's key makes its requests background
  bool chunked_reply_ = true;
  std::optional<ApiError> refusal_;  // found in the head; said once the body is drained
  std::chrono::steady_clock::time_point arrived_;
  std::shared_ptr<std::atomic<bool>> gone_;
  std::shared_ptr<GenerationJob> job_;
  int status_ = 0;

  std::string pending_;    // to be written next
  std::string in_flight_;  // being written
  bool writing_ = false;
  bool reply_complete_ = false;  // all of the reply is in pending_, in_flight_ or written
  size_t events_sent_ = 0;
};

}  // namespace tensorfold
