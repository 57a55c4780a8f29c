#include "coordinator/hub/http_client.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <charconv>
#include <list>
#include <variant>

#include "coordinator/hub/resolve.h"

namespace tensorfold {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

namespace {

using tcp = asio::ip::tcp;
using Clock = std::chrono::steady_clock;
using TlsStream = asio::ssl::stream<tcp::socket>;

constexpr std::chrono::milliseconds kSlice{100};  // how soon a stop is seen
constexpr size_t kPiece = 128 << 10;
constexpr size_t kMaxKept = 4;             // connections
constexpr uint64_t kDropBytes = 64 << 10;  // an unwanted body up to this size is read, to keep the connection
constexpr uint32_t kMaxHead = 64 << 10;

// A connection that could be kept for the next request.
struct Kept {
  Url origin;
  std::variant<std::unique_ptr<tcp::socket>, std::unique_ptr<TlsStream>> stream;
  beast::flat_buffer buffer;
  bool used = false;  // a request has gone over it before

  tcp::socket& socket() {
    if (auto* plain = std::get_if<0>(&stream)) return **plain;
    return std::get<1>(stream)->next_layer();
  }
};

// Adds whether it was the task's end that came first.
struct Wait {
  boost::system::error_code error;
  absl::Status status;  // not OK: no answer in time

  bool ok() const { return status.ok() && !error; }
};

std::string field(const http::fields& fields, http::field name) {
  const auto at = fields.find(name);
  return at == fields.end() ? std::string() : std::string(at->value().data(), at->value().size());
}

}  // namespace

class HttpClient::Impl {
 public:
  explicit Impl(const HttpSettings& settings) : settings_(settings) {}

  absl::Status get(const Url& url, const HttpHeaders& headers, const OnHead& on_head, const OnBody& on_body) {
    for (;;) {
      absl::StatusOr<std::unique_ptr<Kept>> connection = take(url);
      if (!connection.ok()) return connection.status();
      const bool reused = (*connection)->used;
      bool heard = false;
      const absl::Status status = exchange(**connection, url, headers, on_head, on_body, &heard);
      if (keep_) put_back(std::move(*connection));
      // A server may close a kept connection just as it is used again, which says nothing about this request.
      if (reused && !heard && absl::IsUnavailable(status)) continue;
      return status;
    }
  }

 private:
  // Starts an operation and waits for its handler.
  template <class Start>
  Wait run(Kept* kept, const Url& url, std::chrono::milliseconds limit, const char* what, const Start& start) {
    Wait wait;
    bool done = false;
    const Clock::time_point until = Clock::now() + limit;
    io_.restart();
    start([&](const boost::system::error_code& error, const auto&...) {
      wait.error = error;
      done = true;
    });
    while (!done) {  // NOLINT(bugprone-infinite-loop): the handler sets it, inside run_one
      const Clock::time_point now = Clock::now();
      if (settings_.stop != nullptr && settings_.stop->load()) {
        wait.status = absl::CancelledError("stopped");
      } else if (now >= settings_.deadline) {
        wait.status = absl::DeadlineExceededError(
            fmt::format("the time for the whole pull is over while {} {}", what, url.authority()));
      } else if (now >= until) {
        wait.status = absl::UnavailableError(fmt::format("{} {} took more than {:.1f} s", what, url.authority(),
                                                         static_cast<double>(limit.count()) / 1000));
      }
      if (!wait.status.ok()) {
        boost::system::error_code ignored;
        if (kept != nullptr) kept->socket().close(ignored);
        while (!done) io_.run_one();  // NOLINT(bugprone-infinite-loop)
        break;
      }
      io_.run_one_until(std::min({now + kSlice, until, settings_.deadline}));
    }
    return wait;
  }

  absl::StatusOr<std::unique_ptr<Kept>> take(const Url& url) {
    for (auto at = kept_.begin(); at != kept_.end(); ++at) {
      if (!(*at)->origin.same_origin(url)) continue;
      std::unique_ptr<Kept> found = std::move(*at);
      kept_.erase(at);
      return found;
    }
    return connect(url);
  }

  void put_back(std::unique_ptr<Kept> connection) {
    connection->used = true;
    kept_.push_front(std::move(connection));
    if (kept_.size() > kMaxKept) kept_.pop_back();
  }

  absl::StatusOr<std::unique_ptr<Kept>> connect(const Url& url) {
    const Clock::time_point until = std::min(Clock::now() + settings_.connect_timeout, settings_.deadline);
    absl::StatusOr<std::vector<ResolvedAddress>> addresses = resolve_host(url.host, until, settings_.stop);
    if (!addresses.ok()) return addresses.status();
    std::vector<tcp::endpoint> endpoints;
    for (const ResolvedAddress& address : *addresses) {
      boost::system::error_code ignored;
      endpoints.emplace_back(asio::ip::make_address(address, ignored), url.port);
    }
    auto kept = std::make_unique<Kept>();
    kept->origin = url;
    if (!url.tls) {
      kept->stream = std::make_unique<tcp::socket>(io_);
    } else if (absl::Status status = make_tls(url, *kept); !status.ok()) {
      return status;
    }
    tcp::socket& socket = kept->socket();
    const Wait wait = run(kept.get(), url, settings_.connect_timeout, "connecting to",
                          [&](auto handler) { asio::async_connect(socket, endpoints, std::move(handler)); });
    if (!wait.status.ok()) return wait.status;
    if (wait.error) {
      return absl::UnavailableError(fmt::format("cannot connect to {}: {}", url.authority(), wait.error.message()));
    }
    boost::system::error_code ignored;
    socket.set_option(tcp::no_delay(true), ignored);
    if (url.tls) {
      if (absl::Status status = handshake(url, *kept); !status.ok()) return status;
    }
    return kept;
  }

  absl::Status make_tls(const Url& url, Kept& kept) {
    boost::system::error_code error;
    if (!tls_) {
      tls_.emplace(asio::ssl::context::tls_client);
      tls_->set_options(
          asio::ssl::context::default_workarounds | asio::ssl::context::no_tlsv1 | asio::ssl::context::no_tlsv1_1,
          error);
      if (settings_.ca_file.empty()) {
        tls_->set_default_verify_paths(error);
      } else {
        tls_->load_verify_file(settings_.ca_file, error);
      }
      if (error) {
        tls_.reset();
        return absl::FailedPreconditionError(fmt::format("cannot read the certificates{}{}: {}",
                                                         settings_.ca_file.empty() ? " of the system" : " in ",
                                                         settings_.ca_file, error.message()));
      }
    }
    auto stream = std::make_unique<TlsStream>(io_, *tls_);
    stream->set_verify_mode(asio::ssl::verify_peer, error);
    if (!error) stream->set_verify_callback(asio::ssl::host_name_verification(url.host), error);
    if (error) return absl::InternalError(fmt::format("TLS: {}", error.message()));
    boost::system::error_code is_name;
    asio::ip::make_address(url.host, is_name);
    if (is_name) SSL_set_tlsext_host_name(stream->native_handle(), url.host.c_str());  // names only, not addresses
    kept.stream = std::move(stream);
    return absl::OkStatus();
  }

  absl::Status handshake(const Url& url, Kept& kept) {
    TlsStream& stream = *std::get<1>(kept.stream);
    const Wait wait = run(&kept, url, settings_.connect_timeout, "the TLS handshake with", [&](auto handler) {
      stream.async_handshake(asio::ssl::stream_base::client, std::move(handler));
    });
    if (!wait.status.ok()) return wait.status;
    if (!wait.error) return absl::OkStatus();
    const long verified = SSL_get_verify_result(stream.native_handle());
    if (verified != X509_V_OK) {
      return absl::FailedPreconditionError(fmt::format(
          "the certificate of {} does not hold: {}{}", url.authority(), X509_verify_cert_error_string(verified),
          settings_.ca_file.empty() ? "; give its authority's certificate with --ca-file" : ""));
    }
    return absl::UnavailableError(fmt::format("TLS with {}: {}", url.authority(), wait.error.message()));
  }

  absl::Status exchange(Kept& kept, const Url& url, const HttpHeaders& headers, const OnHead& on_head,
                        const OnBody& on_body, bool* heard) {
    keep_ = false;
    if (auto* plain = std::get_if<0>(&kept.stream)) {
      return exchange_on(**plain, kept, url, headers, on_head, on_body, heard);
    }
    return exchange_on(*std::get<1>(kept.stream), kept, url, headers, on_head, on_body, heard);
  }

  static absl::Status broken(const Url& url, const boost::system::error_code& error) {
    const bool is_http = error.category() == make_error_code(http::error::bad_line_ending).category();
    const bool cut =
        error == http::error::end_of_stream || error == http::error::partial_message || error == http::error::need_more;
    if (is_http && !cut) {
      return absl::InvalidArgumentError(fmt::format("{} does not speak HTTP: {}", url.authority(), error.message()));
    }
    return absl::UnavailableError(fmt::format("{} cut the connection: {}", url.authority(), error.message()));
  }

  template <class Stream>
  absl::Status exchange_on(Stream& stream, Kept& kept, const Url& url, const HttpHeaders& headers,
                           const OnHead& on_head, const OnBody& on_body, bool* heard) {
    http::request<http::empty_body> request(http::verb::get, url.target, 11);
    request.set(http::field::host, url.authority());
    request.set(http::field::user_agent, "tensorfold");
    request.set(http::field::accept_encoding, "identity");
    for (const auto& [name, value] : headers) request.set(name, value);
    Wait wait = run(&kept, url, settings_.idle_timeout, "sending to",
                    [&](auto handler) { http::async_write(stream, request, std::move(handler)); });
    if (!wait.status.ok()) return wait.status;
    if (wait.error) return broken(url, wait.error);

    http::response_parser<http::buffer_body> parser;
    parser.body_limit(boost::none);  // whoever takes the body counts
    parser.header_limit(kMaxHead);
    wait = run(&kept, url, settings_.idle_timeout, "waiting for",
               [&](auto handler) { http::async_read_header(stream, kept.buffer, parser, std::move(handler)); });
    if (!wait.status.ok()) return wait.status;
    if (wait.error) return broken(url, wait.error);
    *heard = true;

    const http::fields& fields = parser.get();
    HttpHead head;
    head.status = parser.get().result_int();
    if (const boost::optional<uint64_t> length = parser.content_length()) head.content_length = *length;
    head.etag = field(fields, http::field::etag);
    head.location = field(fields, http::field::location);
    head.content_range = field(fields, http::field::content_range);
    head.link = field(fields, http::field::link);
    head.retry_after = field(fields, http::field::retry_after);
    const absl::StatusOr<bool> wanted = on_head(head);
    if (!wanted.ok() || !*wanted) {
      const absl::Status& status = wanted.status();
      const bool small = head.content_length.value_or(kDropBytes + 1) <= kDropBytes;
      if (!small || !read_body(stream, kept, url, parser, [](auto) { return absl::OkStatus(); }).ok()) return status;
      keep_ = parser.keep_alive();
      return status;
    }
    if (absl::Status status = read_body(stream, kept, url, parser, on_body); !status.ok()) return status;
    keep_ = parser.keep_alive();
    return absl::OkStatus();
  }

  template <class Stream>
  absl::Status read_body(Stream& stream, Kept& kept, const Url& url, http::response_parser<http::buffer_body>& parser,
                         const OnBody& on_body) {
    while (!parser.is_done()) {
      parser.get().body().data = piece_.data();
      parser.get().body().size = piece_.size();
      Wait wait = run(&kept, url, settings_.idle_timeout, "waiting for more from",
                      [&](auto handler) { http::async_read_some(stream, kept.buffer, parser, std::move(handler)); });
      if (!wait.status.ok()) return wait.status;
      if (wait.error == http::error::need_buffer) wait.error = {};
      // What came before the cut counts: the next attempt goes on behind it.
      const size_t size = piece_.size() - parser.get().body().size;
      if (size > 0) {
        if (absl::Status status = on_body({piece_.data(), size}); !status.ok()) return status;
      }
      if (wait.error) return broken(url, wait.error);
    }
    return absl::OkStatus();
  }

  const HttpSettings settings_;
  asio::io_context io_;
  std::optional<asio::ssl::context> tls_;
  std::list<std::unique_ptr<Kept>> kept_;
  std::array<char, kPiece> piece_{};
  bool keep_ = false;  // after the last exchange
};

HttpClient::HttpClient(const HttpSettings& settings) : impl_(std::make_unique<Impl>(settings)) {}
HttpClient::~HttpClient() = default;

absl::Status HttpClient::get(const Url& url, const HttpHeaders& headers, const OnHead& on_head, const OnBody& on_body) {
  try {
    return impl_->get(url, headers, on_head, on_body);
  } catch (const std::exception& error) {  // Asio, out of memory or descriptors
    return absl::UnavailableError(fmt::format("{}: {}", url.authority(), error.what()));
  }
}

}  // namespace tensorfold
