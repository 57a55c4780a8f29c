#include "coordinator/http/server.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "coordinator/http/connection.h"

namespace tensorfold {

namespace asio = boost::asio;
using tcp = asio::ip::tcp;

namespace {

constexpr std::chrono::milliseconds kAcceptPause{100};
// Once connections are cut: their handlers, and workers that tokenise for them, need a moment to let go.
constexpr std::chrono::seconds kCutTime{30};
// Connections over the limit that are being told so at the same time; more are closed without a word.
constexpr size_t kMaxRefusals = 64;

absl::Status listen_error(const HttpOptions& options, const std::string& why) {
  return absl::UnavailableError(
      fmt::format("http.listen: cannot listen on {}:{}: {}", options.host, options.port, why));
}

std::chrono::milliseconds as_ms(Profile::Duration time) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(time);
}

}  // namespace

HttpOptions http_options(const Profile& profile) {
  const Profile::Http& http = profile.http;
  HttpOptions out;
  out.host = http.listen.host;
  out.port = static_cast<uint16_t>(http.listen.port);
  out.threads = http.threads;
  out.max_header_bytes = static_cast<uint32_t>(http.max_header_bytes);
  out.max_body_bytes = static_cast<uint64_t>(http.max_body_bytes);
  out.header_timeout = as_ms(http.header_timeout);
  out.body_timeout = as_ms(http.body_timeout);
  out.idle_timeout = as_ms(http.idle_timeout);
  out.write_buffer_bytes = static_cast<size_t>(http.write_buffer_bytes);
  out.max_connections = http.max_connections;
  out.cors_origin = http.cors_origin;
  out.metrics = profile.metrics.enabled;
  return out;
}

class HttpServer::Impl {
 public:
  Impl(HttpOptions options, ModelService& service, ServiceMetrics& metrics)
      : options_(std::move(options)),
        host_{.options = options_, .service = service, .metrics = metrics},
        acceptor_(asio::make_strand(io_)),
        pause_(acceptor_.get_executor()),
        guard_(io_.get_executor()) {}

  // Only memory that has run out could throw in here.
  ~Impl() { stop(std::chrono::milliseconds(0)); }  // NOLINT(bugprone-exception-escape)

  absl::Status listen() {
    boost::system::error_code ec;
    tcp::resolver resolver(io_);
    const auto found = resolver.resolve(options_.host, std::to_string(options_.port),
                                        tcp::resolver::passive | tcp::resolver::numeric_service, ec);
    if (ec || found.empty()) return listen_error(options_, ec ? ec.message() : "no such address");
    const tcp::endpoint endpoint = found.begin()->endpoint();
    acceptor_.open(endpoint.protocol(), ec);
    if (!ec) acceptor_.set_option(tcp::acceptor::reuse_address(true), ec);
    if (!ec) acceptor_.bind(endpoint, ec);
    if (!ec) acceptor_.listen(tcp::acceptor::max_listen_connections, ec);
    if (ec) return listen_error(options_, ec.message());
    local_ = acceptor_.local_endpoint(ec);
    if (ec) return listen_error(options_, ec.message());
    asio::post(acceptor_.get_executor(), [this] { accept(); });
    for (int i = 0; i < std::max(options_.threads, 1); ++i) {
      threads_.emplace_back([this] { io_.run(); });
    }
    return absl::OkStatus();
  }

  uint16_t port() const { return local_.port(); }
  std::string address() const {
    const std::string host = local_.address().to_string();
    return local_.address().is_v6() ? fmt::format("[{}]:{}", host, port()) : fmt::format("{}:{}", host, port());
  }

  bool stop(std::chrono::milliseconds grace) {
    if (threads_.empty()) return true;
    host_.draining = true;
    asio::post(acceptor_.get_executor(), [this] {
      boost::system::error_code ignored;
      acceptor_.close(ignored);
      pause_.cancel();
    });
    each([](Connection& connection) { connection.drain(); });
    const bool finished = wait_until_empty(grace);
    if (!finished) {
      each([](Connection& connection) { connection.abort(); });
      if (!wait_until_empty(kCutTime))
        spdlog::error("some HTTP connections did not end; the server stops without them");
    }
    guard_.reset();
    io_.stop();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    return finished;
  }

 private:
  void accept() {
    acceptor_.async_accept(asio::make_strand(io_), [this](const boost::system::error_code& ec, tcp::socket socket) {
      if (!acceptor_.is_open()) return;
      if (ec) {
        // Out of file descriptors, mostly: existing connections go on, new ones wait in the kernel's queue.
        spdlog::warn("cannot accept an HTTP connection: {}", ec.message());
        pause_.expires_after(kAcceptPause);
        pause_.async_wait([this](const boost::system::error_code& cancelled) {
          if (!cancelled) accept();
        });
        return;
      }
      admit(std::move(socket));
      accept();
    });
  }

  void admit(tcp::socket socket) {
    std::shared_ptr<Connection> connection;
    bool refused = false;
    {
      const std::lock_guard lock(mutex_);
      const size_t limit = static_cast<size_t>(options_.max_connections);
      refused = connections_.size() >= limit;
      if (connections_.size() >= limit + kMaxRefusals) return;  // the socket closes
      const uint64_t key = next_key_++;
      connection = std::make_shared<Connection>(std::move(socket), host_, [this, key] { forget(key); });
      connections_.emplace(key, connection);
    }
    if (refused) {
      connection->refuse();
    } else {
      connection->start();
      // stop() may have looked at the connections before this one was among them.
      if (host_.draining) connection->drain();
    }
  }

  void forget(uint64_t key) {
    const std::lock_guard lock(mutex_);
    connections_.erase(key);
    if (connections_.empty()) empty_.notify_all();
  }

  void each(void (*action)(Connection&)) {
    std::vector<std::shared_ptr<Connection>> all;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [key, weak] : connections_) {
        if (auto connection = weak.lock()) all.push_back(std::move(connection));
      }
    }
    for (const auto& connection : all) action(*connection);
  }

  bool wait_until_empty(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    return empty_.wait_for(lock, timeout, [this] { return connections_.empty(); });
  }

  const HttpOptions options_;
  ConnectionHost host_;
  std::mutex mutex_;
  std::condition_variable empty_;
  std::map<uint64_t, std::weak_ptr<Connection>> connections_;
  uint64_t next_key_ = 0;
  asio::io_context io_;
  tcp::acceptor acceptor_;
  asio::steady_timer pause_;
  asio::executor_work_guard<asio::io_context::executor_type> guard_;
  tcp::endpoint local_;
  std::vector<std::thread> threads_;
};

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpServer::~HttpServer() = default;

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::start(HttpOptions options, ModelService& service,
                                                              ServiceMetrics& metrics) {
  auto impl = std::make_unique<Impl>(std::move(options), service, metrics);
  if (const absl::Status status = impl->listen(); !status.ok()) return status;
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

uint16_t HttpServer::port() const { return impl_->port(); }
std::string HttpServer::address() const { return impl_->address(); }
bool HttpServer::stop(std::chrono::milliseconds grace) { return impl_->stop(grace); }

}  // namespace tensorfold
