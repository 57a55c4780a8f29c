// The HTTP server: OpenAI's API over HTTP/1.1, plain and as server-sent events (docs/api.md). Boost.Beast reads
// requests; each connection runs on its own strand, so that a slow or hostile client holds up nobody.
//
// Limits are kept before memory is taken; a request is admitted before any header of its reply is sent; a client that
// leaves frees its place in the engine's next round, whether it was running or waiting.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coordinator/profile/profile.h"
#include "coordinator/service/metrics.h"
#include "coordinator/service/model_service.h"

namespace tensorfold {

struct HttpOptions {
  std::string host = "127.0.0.1";  // a name or an address
  uint16_t port = 0;               // 0: a free one
  int threads = 2;
  uint32_t max_header_bytes = 16 << 10;
  uint64_t max_body_bytes = 16 << 20;
  std::chrono::milliseconds header_timeout{10000};
  std::chrono::milliseconds body_timeout{60000};
  std::chrono::milliseconds idle_timeout{75000};  // between requests; also for a client that takes no bytes at all
  size_t write_buffer_bytes = 1 << 20;            // kept for one client that reads slowly; past it its reply is cut
  int max_connections = 1024;
  std::string cors_origin;  // empty: no CORS headers
  bool metrics = true;      // serves /metrics
  // How often a stream without events sends a comment, so that proxies do not take it for dead.
  std::chrono::milliseconds stream_comment_interval{10000};
};

/// Of the profile's sections http and metrics.
HttpOptions http_options(const Profile& profile);

class HttpServer {
 public:
  /// Listens and serves. `service` and `metrics` outlive the server. Unavailable: the address is taken, not of this
  /// host, or no address at all.
  static absl::StatusOr<std::unique_ptr<HttpServer>> start(HttpOptions options, ModelService& service,
                                                           ServiceMetrics& metrics);
  /// stop() without grace.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  uint16_t port() const;
  /// "127.0.0.1:8000".
  std::string address() const;

  /// Takes no more connections, ends idle ones, lets replies under way finish for `grace`, then cuts them. Returns true
  /// when none was cut. Further calls do nothing.
  bool stop(std::chrono::milliseconds grace);

 private:
  class Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tensorfold
