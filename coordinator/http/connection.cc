#include "coordinator/http/connection.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/buffers_to_string.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/rfc7230.hpp>
#include <utility>

#include "coordinator/http/plain_endpoints.h"
#include "coordinator/http/state_endpoint.h"

namespace tensorfold {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

namespace {

constexpr size_t kReadBytes = 16 << 10;
// A refused request's body up to this size is read and dropped, so that the connection can go on; a longer one ends it.
constexpr uint64_t kDrainBytes = 64 << 10;
// Bytes of pipelined requests that are taken while a reply is under way.
constexpr size_t kMaxPipelined = 256 << 10;
constexpr size_t kMaxLinger = 4 << 20;
constexpr std::chrono::milliseconds kLingerTime{2000};
constexpr int kSendBuffer = 256 << 10;

std::string_view view(beast::string_view text) { return {text.data(), text.size()}; }

// A client's own id for the request, if it is fit for a header and a log.
bool is_plain_id(std::string_view id) {
  return !id.empty() && id.size() <= 128 &&
         std::all_of(id.begin(), id.end(), [](char c) { return c > 0x20 && c < 0x7F; });
}

ApiError malformed_error(std::string_view why) {
  ApiError error;
  error.code = ErrorCode::kInvalidValue;
  error.message = fmt::format("the HTTP request is malformed: {}", why);
  return error;
}

}  // namespace

Connection::Connection(tcp::socket socket, ConnectionHost& host, std::function<void()> on_gone)
    : farewell_{std::move(on_gone)},
      socket_(std::move(socket)),
      deadline_(socket_.get_executor()),
      comment_timer_(socket_.get_executor()),
      host_(host) {
  host_.metrics.connection_opened();
}

Connection::~Connection() {
  job_.reset();
  host_.metrics.connection_closed();
}

void Connection::start() {
  asio::post(socket_.get_executor(), [self = shared_from_this()] {
    boost::system::error_code ignored;
    self->socket_.set_option(tcp::no_delay(true), ignored);
    // The kernel's buffer counts towards what a slow reader may hold, so it does not grow as it likes.
    self->socket_.set_option(asio::socket_base::send_buffer_size(kSendBuffer), ignored);
    self->read_next();
  });
}

void Connection::refuse() {
  asio::post(socket_.get_executor(), [self = shared_from_this()] {
    ApiError error;
    error.code = ErrorCode::kClusterDown;
    error.message = fmt::format("{} connections are open, which is the most that this server takes; try again in 1 s",
                                self->host_.options.max_connections);
    error.retry_after_s = 1;
    self->host_.metrics.connection_refused();
    self->arrived_ = std::chrono::steady_clock::now();
    self->fail(error, /*close_after=*/true);
  });
}

void Connection::drain() {
  asio::post(socket_.get_executor(), [self = shared_from_this()] {
    self->keep_alive_ = false;
    if (self->state_ == State::kIdle || self->state_ == State::kHead) self->close();
  });
}

void Connection::abort() {
  asio::post(socket_.get_executor(), [self = shared_from_this()] { self->close(); });
}

double Connection::elapsed_s() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - arrived_).count();
}

// ---- Reading a request. ---------------------------------------------------------------------------------------------

void Connection::read_next() {
  state_ = State::kIdle;
  if (host_.draining && !first_request_) return close();
  parser_.emplace();
  parser_->header_limit(host_.options.max_header_bytes);
  parser_->body_limit(host_.options.max_body_bytes);
  method_.clear();
  path_.clear();
  request_id_.clear();
  refusal_.reset();
  timed_out_ = false;
  reply_complete_ = false;
  keep_alive_ = true;
  status_ = 0;
  events_sent_ = 0;
  if (buffer_.size() > 0) {
    // The next request came early. A read that watches still owns the buffer: end it first.
    if (watching_) {
      boost::system::error_code ignored;
      socket_.cancel(ignored);
      return;
    }
    return read_head();
  }
  arm(first_request_ ? host_.options.header_timeout : host_.options.idle_timeout);
  watch();
}

void Connection::read_head() {
  state_ = State::kHead;
  arm(host_.options.header_timeout);
  http::async_read_header(socket_, buffer_, *parser_, [self = shared_from_this()](ErrorCodeOf ec, size_t) {
    if (self->state_ == State::kHead) self->on_head(ec);
  });
}

void Connection::on_head(ErrorCodeOf ec) {
  disarm();
  first_request_ = false;
  arrived_ = std::chrono::steady_clock::now();
  if (timed_out_) return fail_timeout(host_.options.header_timeout);
  if (ec) return refuse_message(ec, /*in_body=*/false);
  read_head_fields();
  const auto length = parser_->content_length();
  if (refusal_) {
    const bool short_body = !length || *length <= kDrainBytes;
    parser_->body_limit(kDrainBytes);
    // A client that waits for "100 Continue" sends its body or not as it likes: the connection cannot go on.
    const bool waits = parser_->get().find(http::field::expect) != parser_->get().end();
    if (!short_body || waits) return fail(*refusal_, /*close_after=*/true);
    return read_body();
  }
  continue_then_read_body();
}

void Connection::read_head_fields() {
  const auto& request = parser_->get();
  method_ = std::string(view(request.method_string()));
  path_ = loggable_path(view(request.target()));
  keep_alive_ = request.keep_alive() && !host_.draining;
  chunked_reply_ = request.version() >= 11;
  trusted_ = host_.service.authorized(view(request[http::field::authorization]));
  background_ = host_.service.background_key(view(request[http::field::authorization]));
  route_ = find_route(view(request.target()), host_.options.metrics);
  const bool admin = route_.endpoint == Endpoint::kStates;
  if (admin && !host_.service.has_admin()) route_ = {};
  const std::string_view client_id = view(request["X-Request-Id"]);
  if (is_plain_id(client_id)) request_id_ = std::string(client_id);
  RequestHead head;
  head.method = method_;
  head.target = std::string(view(request.target()));
  head.content_type = std::string(view(request[http::field::content_type]));
  // The admin's keys are for the admin's routes, and open nothing else.
  head.authorized = admin ? host_.service.is_admin(view(request[http::field::authorization])) : trusted_;
  refusal_ = check_head(head, route_.endpoint);
}

void Connection::continue_then_read_body() {
  const auto& request = parser_->get();
  const auto expect = request.find(http::field::expect);
  if (expect == request.end() || request.version() < 11) return read_body();
  if (!beast::iequals(expect->value(), "100-continue")) {
    status_ = 417;
    HttpReply unknown = error_reply(malformed_error("only 'Expect: 100-continue' is known"));
    unknown.status = 417;
    keep_alive_ = false;
    return reply(unknown);
  }
  if (parser_->is_done()) return read_body();
  state_ = State::kBody;
  arm(host_.options.body_timeout);
  static constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
  asio::async_write(socket_, asio::buffer(kContinue), [self = shared_from_this()](ErrorCodeOf ec, size_t) {
    if (self->state_ != State::kBody) return;
    if (ec) return self->close();
    self->read_body();
  });
}

void Connection::read_body() {
  state_ = State::kBody;
  arm(host_.options.body_timeout);
  http::async_read(socket_, buffer_, *parser_, [self = shared_from_this()](ErrorCodeOf ec, size_t) {
    if (self->state_ == State::kBody) self->on_body(ec);
  });
}

void Connection::on_body(ErrorCodeOf ec) {
  disarm();
  if (timed_out_) return fail_timeout(host_.options.body_timeout);
  if (ec && refusal_) return fail(*refusal_, /*close_after=*/true);
  if (ec) return refuse_message(ec, /*in_body=*/true);
  if (refusal_) return fail(*refusal_, /*close_after=*/false);
  dispatch();
}

// A message that could not be read. What follows it on the connection means nothing, so it closes.
void Connection::refuse_message(ErrorCodeOf ec, bool in_body) {
  if (ec == http::error::body_limit) {
    const bool head_known = !method_.empty();
    if (!head_known) path_ = loggable_path(view(parser_->get().target()));
    return fail(body_too_large_error(host_.options.max_body_bytes), true);
  }
  if (ec == http::error::header_limit || ec == http::error::buffer_overflow) {
    return fail(headers_too_large_error(host_.options.max_header_bytes), true);
  }
  if (ec == http::error::end_of_stream || ec == http::error::partial_message || ec == asio::error::eof) return close();
  if (ec.category() == http::make_error_code(http::error::bad_method).category()) {
    return fail(malformed_error(fmt::format("{} ({})", ec.message(), in_body ? "body" : "headers")), true);
  }
  close();  // the connection broke
}

// ---- Answering it. --------------------------------------------------------------------------------------------------

ReplyContext Connection::reply_context() const {
  ReplyContext context;
  context.request_id = request_id_;
  context.cors_origin = host_.options.cors_origin;
  context.keep_alive = keep_alive_;
  context.head_only = method_ == "HEAD";
  return context;
}

void Connection::dispatch() {
  if (method_ == "OPTIONS") return reply(options_reply(route_.endpoint, !host_.options.cors_origin.empty()));
  switch (route_.endpoint) {
    case Endpoint::kChat:
    case Endpoint::kCompletions:
      return run_generation();
    case Endpoint::kTokenize:
    case Endpoint::kDetokenize:
    case Endpoint::kStates:
      return run_plain();
    default:
      return reply(quick_reply(route_, trusted_, host_.service, host_.metrics));
  }
}

void Connection::run_plain() {
  state_ = State::kWorking;
  const Endpoint endpoint = route_.endpoint;
  const size_t bytes = parser_->get().body().size();
  auto work = [self = shared_from_this(), endpoint, body = std::move(parser_->get().body())] {
    const ModelService& service = self->host_.service;
    HttpReply made = endpoint == Endpoint::kTokenize     ? tokenize_reply(body, service)
                     : endpoint == Endpoint::kDetokenize ? detokenize_reply(body, service)
                                                         : states_reply(self->method_, body, service);
    asio::post(self->socket_.get_executor(), [self, made = std::move(made)] {
      if (self->state_ == State::kWorking) self->reply(made);
    });
  };
  host_.service.workers().post(std::move(work), bytes);
}

void Connection::run_generation() {
  state_ = State::kWorking;
  gone_ = std::make_shared<std::atomic<bool>>(false);
  const std::string id = host_.service.new_id(route_.endpoint == Endpoint::kChat ? "chatcmpl-" : "cmpl-");
  if (request_id_.empty()) request_id_ = id;
  // The engine's thread holds the connection weakly: it may still know the sink when the client is long gone.
  const std::weak_ptr<Connection> weak = weak_from_this();
  GenerationJob::Context context{.service = host_.service,
                                 .metrics = host_.metrics,
                                 .id = id,
                                 .arrived = arrived_,
                                 .background = background_,
                                 .wake =
                                     [weak, executor = socket_.get_executor()] {
                                       asio::post(executor, [weak] {
                                         if (auto self = weak.lock()) self->on_events();
                                       });
                                     },
                                 .gone = [gone = gone_] { return gone->load(); }};
  const size_t bytes = parser_->get().body().size();
  auto work = [self = shared_from_this(), endpoint = route_.endpoint, context = std::move(context),
               body = std::move(parser_->get().body())]() mutable {
    ApiOr<std::unique_ptr<GenerationJob>> made = GenerationJob::admit(endpoint, body, std::move(context));
    ApiOr<std::shared_ptr<GenerationJob>> admitted = cancelled_error();
    if (made.ok()) {
      admitted = std::shared_ptr<GenerationJob>(std::move(*made));
    } else {
      admitted = made.error();
    }
    asio::post(self->socket_.get_executor(),
               [self, admitted = std::move(admitted)]() mutable { self->on_admitted(std::move(admitted)); });
  };
  host_.service.workers().post(std::move(work), bytes);
  watch();
}

void Connection::on_admitted(ApiOr<std::shared_ptr<GenerationJob>> admitted) {
  if (state_ != State::kWorking) return;  // the client left; the job's destructor cancels
  if (!admitted.ok()) return fail(admitted.error(), /*close_after=*/false);
  job_ = std::move(*admitted);
  state_ = State::kGenerating;
  if (job_->stream()) {
    status_ = 200;
    if (!chunked_reply_) keep_alive_ = false;  // the end of the connection is the end of the stream
    const std::string begin = job_->begin();
    send(stream_head(reply_context(), chunked_reply_) + (chunked_reply_ ? chunk_text(begin) : begin));
    comment_later();
  }
  on_events();
}

void Connection::on_events() {
  if (state_ != State::kGenerating || job_ == nullptr || reply_complete_) return;
  std::string text = job_->pump();
  const bool done = job_->done();
  if (!job_->stream()) {
    if (!done) return;
    if (job_->error()) return fail(*job_->error(), /*close_after=*/false);
    HttpReply whole;
    whole.body = job_->finish();
    return reply(whole);
  }
  if (done && job_->error()) {
    text += job_->cut();
    spdlog::warn("{}: the stream ended with an error: {}", request_id_, job_->error()->message);
    job_->cancel();
  } else if (done) {
    text += job_->finish();
  }
  reply_complete_ = done;
  if (chunked_reply_) {
    text = chunk_text(text);
    if (done) text += last_chunk();
  }
  if (!text.empty()) ++events_sent_;
  send(text);
}

void Connection::reply(const HttpReply& made) {
  state_ = State::kReplying;
  status_ = made.status;
  reply_complete_ = true;
  if (host_.draining) keep_alive_ = false;
  send(reply_text(made, reply_context()));
}

void Connection::fail(const ApiError& error, bool close_after) {
  if (close_after) keep_alive_ = false;
  HttpReply made = error_reply(error);
  if (error.code == ErrorCode::kMethodNotAllowed) {
    made.headers.emplace_back("Allow", std::string(allowed_methods(route_.endpoint)));
  }
  reply(made);
}

// ---- A client that leaves is noticed by reading while it waits. -----------------------------------------------------

// Reads into the buffer: what comes is the next request; the end of the stream is the client's leaving.
void Connection::watch() {
  if (watching_ || state_ == State::kClosed || buffer_.size() >= kMaxPipelined) return;
  // Asio tells of the end once: a second read would wait for ever (an edge-triggered epoll has no second edge).
  if (input_over_) return on_input_over();
  watching_ = true;
  socket_.async_read_some(buffer_.prepare(kReadBytes), [self = shared_from_this()](ErrorCodeOf ec, size_t bytes) {
    self->watching_ = false;
    self->buffer_.commit(bytes);
    if (ec && ec != asio::error::operation_aborted) {
      self->input_over_ = true;
      return self->on_input_over();
    }
    switch (self->state_) {
      case State::kIdle:
        if (self->buffer_.size() > 0) return self->read_head();
        return self->watch();
      case State::kWorking:
      case State::kGenerating:
        return self->watch();
      case State::kLingering:
        return self->discard();
      default:
        return;
    }
  });
}

void Connection::on_input_over() {
  switch (state_) {
    case State::kIdle:
    case State::kLingering:
      return close();
    case State::kWorking:
    case State::kGenerating:
      // A client that has got everything may go before the write's end is seen here.
      if (!reply_complete_) on_client_left();
      return;
    default:
      return;  // once the reply is written, read_next() closes
  }
}

void Connection::on_client_left() {
  gone_->store(true);
  host_.metrics.client_left();
  status_ = 499;
  if (job_ != nullptr) job_->cancel();
  host_.metrics.request("http", endpoint_name(route_.endpoint), "499", elapsed_s());
  spdlog::info("{} {} {} 499 {:.0f} ms: the client left", request_id_, method_, path_, elapsed_s() * 1000);
  close();
}

// ---- Writing. -------------------------------------------------------------------------------------------------------

void Connection::send(std::string_view bytes) {
  if (state_ == State::kClosed) return;
  pending_ += bytes;
  // A whole reply is made at once and may be longer than the buffer; a stream's pile up only when nobody reads.
  if (state_ == State::kGenerating && writing_ && pending_.size() > host_.options.write_buffer_bytes) {
    host_.metrics.slow_reader();
    host_.metrics.request("http", endpoint_name(route_.endpoint), "slow_reader", elapsed_s());
    spdlog::warn("{} {} {}: cut after {:.0f} ms, because the client reads more slowly than its reply is made",
                 request_id_, method_, path_, elapsed_s() * 1000);
    return close();
  }
  flush();
}

void Connection::flush() {
  if (writing_) return;
  if (pending_.empty()) {
    if (reply_complete_) end_request();
    return;
  }
  in_flight_ = std::exchange(pending_, {});
  writing_ = true;
  arm(host_.options.idle_timeout);
  asio::async_write(socket_, asio::buffer(in_flight_),
                    [self = shared_from_this()](ErrorCodeOf ec, size_t) { self->on_written(ec); });
}

void Connection::on_written(ErrorCodeOf ec) {
  writing_ = false;
  in_flight_.clear();
  if (state_ == State::kClosed) return;
  disarm();
  if (ec) {
    if (state_ == State::kGenerating) return on_client_left();
    return close();
  }
  flush();
}

void Connection::comment_later() {
  comment_timer_.expires_after(host_.options.stream_comment_interval);
  comment_timer_.async_wait([self = shared_from_this(), seen = events_sent_](ErrorCodeOf ec) {
    if (ec || self->state_ != State::kGenerating || self->reply_complete_) return;
    if (seen == self->events_sent_ && !self->writing_) {
      constexpr std::string_view kComment = ": waiting\n\n";
      self->send(self->chunked_reply_ ? chunk_text(kComment) : std::string(kComment));
    }
    self->comment_later();
  });
}

void Connection::end_request() {
  const double seconds = elapsed_s();
  const std::string_view name = endpoint_name(route_.endpoint);
  host_.metrics.request("http", name, std::to_string(status_), seconds);
  if (job_ != nullptr) {
    spdlog::info("{} {} {} {} {:.0f} ms, {} prompt and {} reply tokens", request_id_, method_, path_, status_,
                 seconds * 1000, job_->prompt_tokens(), job_->reply_tokens());
  } else {
    // Probes come every few seconds and say nothing while they succeed.
    const bool probe = status_ == 200 && (endpoint_is_open(route_.endpoint) || route_.endpoint == Endpoint::kMetrics);
    spdlog::log(probe ? spdlog::level::debug : spdlog::level::info, "{} {} {} {} {:.0f} ms",
                request_id_.empty() ? "-" : request_id_, method_.empty() ? "-" : method_, path_.empty() ? "-" : path_,
                status_, seconds * 1000);
  }
  comment_timer_.cancel();
  job_.reset();
  if (!keep_alive_ || host_.draining) return linger();
  read_next();
}

// ---- Ending. --------------------------------------------------------------------------------------------------------

// Closing a socket with unread bytes resets the connection, and the client may lose the reply. So: end our half, and
// drop what still comes until the client closes too.
void Connection::linger() {
  state_ = State::kLingering;
  boost::system::error_code ec;
  socket_.shutdown(tcp::socket::shutdown_send, ec);
  if (ec) return close();
  arm(kLingerTime);
  discard();
}

void Connection::discard() {
  if (state_ != State::kLingering || watching_) return;
  discarded_ += buffer_.size();
  buffer_.consume(buffer_.size());
  if (discarded_ > kMaxLinger) return close();
  watching_ = true;
  socket_.async_read_some(buffer_.prepare(kReadBytes), [self = shared_from_this()](ErrorCodeOf ec, size_t bytes) {
    self->watching_ = false;
    self->buffer_.commit(bytes);
    if (ec) return self->close();
    self->discard();
  });
}

void Connection::close() {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  if (gone_ != nullptr) gone_->store(true);
  if (job_ != nullptr) job_->cancel();
  job_.reset();
  pending_.clear();
  deadline_.cancel();
  comment_timer_.cancel();
  boost::system::error_code ignored;
  socket_.close(ignored);
}

void Connection::arm(std::chrono::milliseconds timeout) {
  const uint64_t number = ++deadline_number_;
  deadline_.expires_after(timeout);
  deadline_.async_wait([self = shared_from_this(), number](ErrorCodeOf ec) {
    if (!ec && number == self->deadline_number_) self->on_timeout();
  });
}

void Connection::disarm() {
  ++deadline_number_;
  deadline_.cancel();
}

void Connection::fail_timeout(std::chrono::milliseconds allowed) {
  fail(request_timeout_error(std::chrono::duration<double>(allowed).count()), /*close_after=*/true);
}

void Connection::on_timeout() {
  boost::system::error_code ignored;
  switch (state_) {
    case State::kHead:
    case State::kBody:
      // The read still owns the buffer: its handler answers.
      timed_out_ = true;
      socket_.cancel(ignored);
      return;
    default:
      // Idle, lingering, or a client that has taken no byte of its reply.
      if (state_ == State::kGenerating) {
        host_.metrics.slow_reader();
        spdlog::warn("{} {} {}: cut, because the client took nothing for {} s", request_id_, method_, path_,
                     std::chrono::duration<double>(host_.options.idle_timeout).count());
      }
      return close();
  }
}

}  // namespace tensorfold
