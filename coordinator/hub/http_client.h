// HTTP/1.1 GET over TCP or TLS, one request at a time, with kept connections. Every wait ends: at the idle timeout, at
// the deadline of the whole task, or when the task is stopped; messages name the host that was waited for.
//
// Thread-safety: none; each thread has its own client. Clients may share one HttpSettings, which does not change.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "coordinator/hub/url.h"

namespace tensorfold {

struct HttpSettings {
  std::chrono::milliseconds connect_timeout{15000};  // name, TCP and TLS, each
  std::chrono::milliseconds idle_timeout{30000};     // without a byte
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
  std::string ca_file;                      // PEM; empty: the system's certificates
  const std::atomic<bool>* stop = nullptr;  // true: every wait ends with Cancelled
};

/// The header fields of a reply that a download needs; empty where there were none.
struct HttpHead {
  int status = 0;
  std::optional<uint64_t> content_length;
  std::string etag;
  std::string location;
  std::string content_range;
  std::string link;
  std::string retry_after;
};

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

class HttpClient {
 public:
  /// Sees the head before any of the body. Returns whether the body is wanted: an unwanted one is dropped.
  using OnHead = std::function<absl::StatusOr<bool>(const HttpHead&)>;
  /// Gets the body in pieces. An error ends the transfer and comes back from get() as it is.
  using OnBody = std::function<absl::Status(std::span<const char>)>;

  explicit HttpClient(const HttpSettings& settings);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  /// One request, no redirects, no retries. Unavailable: the connection failed, was cut or stood still, which another
  /// attempt may mend. DeadlineExceeded: the task's deadline. Cancelled: stopped. FailedPrecondition: the certificate
  /// does not hold. InvalidArgument: no HTTP.
  absl::Status get(const Url& url, const HttpHeaders& headers, const OnHead& on_head, const OnBody& on_body);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tensorfold
