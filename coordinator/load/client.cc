#include "coordinator/load/client.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <charconv>
#include <utility>

#include "coordinator/load/sse_reader.h"

namespace tensorfold {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using tcp = asio::ip::tcp;
using ErrorCodeOf = const boost::system::error_code&;

namespace {

constexpr size_t kPiece = 16 << 10;
constexpr uint32_t kMostHead = 64 << 10;
constexpr size_t kMostBody = size_t{1} << 20;
constexpr int kMostRetryAfter = 3600;

bool is_http_error(ErrorCodeOf ec) {
  return ec.category() == http::make_error_code(http::error::bad_method).category();
}

bool is_cut(ErrorCodeOf ec) {
  return !is_http_error(ec) || ec == http::error::end_of_stream || ec == http::error::partial_message;
}

}  // namespace

struct LoadClient::Kept {
  explicit Kept(asio::io_context& io) : stream(io) {}
  beast::tcp_stream stream;
  beast::flat_buffer buffer;
};

struct LoadClient::Pool {
  std::vector<std::unique_ptr<Kept>> idle;
};

// One exchange. Its handlers keep it alive.
class LoadClient::Running : public std::enable_shared_from_this<Running> {
 public:
  Running(asio::io_context& io, std::shared_ptr<const ClientSettings> settings, std::shared_ptr<Pool> pool,
          ClientRequest request, Done done)
      : io_(io),
        settings_(std::move(settings)),
        pool_(std::move(pool)),
        request_(std::move(request)),
        done_(std::move(done)),
        leave_timer_(io) {
    out_.started = LoadClock::now();
    deadline_ = out_.started + settings_->timeout;
  }

  void start() {
    if (request_.leave && request_.leave->after_events == 0) {
      leave_timer_.expires_after(request_.leave->after);
      leave_timer_.async_wait([self = shared_from_this()](ErrorCodeOf ec) {
        if (!ec) self->leave();
      });
    }
    if (request_.keeps && !pool_->idle.empty()) {
      kept_ = std::move(pool_->idle.back());
      pool_->idle.pop_back();
      reused_ = true;
      return write();
    }
    connect();
  }

 private:
  void connect() {
    reused_ = false;
    kept_ = std::make_unique<Kept>(io_);
    arm(settings_->connect_timeout);
    kept_->stream.async_connect(settings_->endpoints, [self = shared_from_this()](ErrorCodeOf ec, const auto&) {
      if (self->over_) return;
      if (ec) return self->fail(ExchangeEnd::kNotConnected, ec);
      boost::system::error_code ignored;
      self->kept_->stream.socket().set_option(tcp::no_delay(true), ignored);
      self->write();
    });
  }

  void write() {
    arm(settings_->idle_timeout);
    asio::async_write(kept_->stream, asio::buffer(request_.bytes), [self = shared_from_this()](ErrorCodeOf ec, size_t) {
      if (self->over_) return;
      if (ec == beast::error::timeout) return self->fail(ExchangeEnd::kTimeout, ec);
      if (ec && self->reused_) return self->connect();
      // A server may refuse a request before it has all of it: its answer counts, not the write.
      boost::system::error_code ignored;
      if (self->request_.ends_after) {
        self->kept_->stream.socket().shutdown(tcp::socket::shutdown_send, ignored);
      }
      self->read_head();
    });
  }

  void read_head() {
    parser_.emplace();
    parser_->header_limit(kMostHead);
    parser_->body_limit(boost::none);  // take_body() and the reply keep limits of their own
    arm(settings_->idle_timeout);
    http::async_read_header(kept_->stream, kept_->buffer, *parser_,
                            [self = shared_from_this()](ErrorCodeOf ec, size_t) {
                              if (!self->over_) self->on_head(ec);
                            });
  }

  void on_head(ErrorCodeOf ec) {
    if (ec) {
      // A server may close a kept connection just as it is used again, which says nothing about this request.
      if (reused_ && ec != beast::error::timeout && is_cut(ec)) return connect();
      return fail_read(ec);
    }
    const auto& head = parser_->get();
    out_.status = static_cast<int>(head.result_int());
    const auto type = head[http::field::content_type];
    out_.streamed = type.starts_with("text/event-stream");
    const auto retry = head[http::field::retry_after];
    int seconds = 0;
    std::from_chars(retry.data(), retry.data() + retry.size(), seconds);
    out_.retry_after_s = std::clamp(seconds, 0, kMostRetryAfter);
    read_body();
  }

  void read_body() {
    if (parser_->is_done()) return finish_response();
    parser_->get().body().data = piece_.data();
    parser_->get().body().size = piece_.size();
    arm(settings_->idle_timeout);
    http::async_read_some(kept_->stream, kept_->buffer, *parser_, [self = shared_from_this()](auto ec, size_t) {
      if (self->over_) return;
      if (ec == http::error::need_buffer) ec = {};
      // What came before the cut counts.
      self->take_body({self->piece_.data(), self->piece_.size() - self->parser_->get().body().size});
      if (self->over_) return;
      if (ec) return self->fail_read(ec);
      self->read_body();
    });
  }

  void take_body(std::string_view bytes) {
    if (!out_.streamed) {
      if (out_.body.size() + bytes.size() > kMostBody) {
        return fail(ExchangeEnd::kBroken, fmt::format("the answer is longer than {} bytes", kMostBody));
      }
      out_.body += bytes;
      return;
    }
    const LoadClock::time_point now = LoadClock::now();
    std::vector<std::string> events;
    const absl::Status read = sse_.feed(bytes, &events);
    for (const std::string& event : events) {
      const absl::StatusOr<bool> shows = take_event(event, &out_.reply);
      if (!shows.ok()) return fail(ExchangeEnd::kBroken, std::string(shows.status().message()));
      if (*shows) out_.shown.push_back(now);
    }
    if (!read.ok()) return fail(ExchangeEnd::kBroken, std::string(read.message()));
    if (request_.leave && request_.leave->after_events > 0 && out_.shown.size() >= request_.leave->after_events)
      leave();
  }

  void finish_response() {
    if (out_.streamed) {
      if (!sse_.between_events()) return fail(ExchangeEnd::kBroken, "the stream ended inside an event");
      if (!out_.reply.done) return fail(ExchangeEnd::kBroken, "the stream ended without [DONE]");
      if (!out_.reply.complete() && out_.reply.error_code.empty()) {
        return fail(ExchangeEnd::kBroken, "the stream ended without a finish_reason");
      }
    }
    if (request_.keeps && parser_->keep_alive()) {
      kept_->stream.expires_never();
      pool_->idle.push_back(std::move(kept_));
    }
    end(ExchangeEnd::kReply);
  }

  void fail_read(ErrorCodeOf ec) {
    if (ec == beast::error::timeout) return fail(ExchangeEnd::kTimeout, ec);
    fail(is_cut(ec) ? ExchangeEnd::kDisconnected : ExchangeEnd::kBroken, ec);
  }

  void fail(ExchangeEnd how, ErrorCodeOf ec) {
    const std::string& who = settings_->authority;
    if (how == ExchangeEnd::kNotConnected) {
      fail(how, fmt::format("cannot connect to {}: {}", who, ec.message()));
    } else if (how == ExchangeEnd::kTimeout) {
      const bool whole = LoadClock::now() >= deadline_;
      fail(how,
           fmt::format("{} {} within {:.1f} s", who, whole ? "did not finish its reply" : "sent nothing",
                       std::chrono::duration<double>(whole ? settings_->timeout : settings_->idle_timeout).count()));
    } else if (how == ExchangeEnd::kDisconnected) {
      fail(how, fmt::format("{} ended the connection: {}", who, ec.message()));
    } else {
      fail(how, fmt::format("{} does not speak HTTP: {}", who, ec.message()));
    }
  }

  void fail(ExchangeEnd how, std::string message) {
    out_.message = std::move(message);
    end(how);
  }

  void leave() {
    if (over_) return;
    boost::system::error_code ignored;
    if (kept_ != nullptr && request_.leave->reset) {
      kept_->stream.socket().set_option(asio::socket_base::linger(true, 0), ignored);
    }
    end(ExchangeEnd::kLeft);
  }

  void end(ExchangeEnd how) {
    over_ = true;
    out_.end = how;
    out_.ended = LoadClock::now();
    leave_timer_.cancel();
    if (kept_ != nullptr) kept_->stream.close();
    asio::post(io_, [done = std::move(done_), out = std::move(out_)]() mutable { done(std::move(out)); });
  }

  void arm(std::chrono::milliseconds wait) { kept_->stream.expires_at(std::min(LoadClock::now() + wait, deadline_)); }

  asio::io_context& io_;
  const std::shared_ptr<const ClientSettings> settings_;
  const std::shared_ptr<Pool> pool_;
  const ClientRequest request_;
  Done done_;
  asio::steady_timer leave_timer_;
  LoadClock::time_point deadline_;
  std::unique_ptr<Kept> kept_;
  bool reused_ = false;
  bool over_ = false;
  std::optional<http::response_parser<http::buffer_body>> parser_;
  std::array<char, kPiece> piece_{};
  SseReader sse_;
  Exchange out_;
};

LoadClient::LoadClient(asio::io_context& io, ClientSettings settings)
    : io_(io),
      settings_(std::make_shared<const ClientSettings>(std::move(settings))),
      pool_(std::make_shared<Pool>()) {}

LoadClient::~LoadClient() = default;

void LoadClient::send(ClientRequest request, Done done) {
  std::make_shared<Running>(io_, settings_, pool_, std::move(request), std::move(done))->start();
}

Exchange LoadClient::ask(ClientRequest request) {
  std::optional<Exchange> out;
  send(std::move(request), [&out](Exchange exchange) { out = std::move(exchange); });
  io_.restart();
  while (!out && io_.run_one() > 0) {
  }
  if (!out) {
    out.emplace();
    out->end = ExchangeEnd::kBroken;
    out->message = "the exchange came to no end";
  }
  return *std::move(out);
}

}  // namespace tensorfold
