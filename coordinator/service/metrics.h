// What Prometheus sees: counters and histograms of the front ends, kept here as things happen, and the engine's and the
// ranks' state, read when somebody scrapes. Thread-safe; recording costs a few atomic operations.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "coordinator/schedule/engine.h"
#include "coordinator/service/model_service.h"

namespace tensorfold {

class ServiceMetrics {
 public:
  ServiceMetrics();
  ~ServiceMetrics();
  ServiceMetrics(const ServiceMetrics&) = delete;
  ServiceMetrics& operator=(const ServiceMetrics&) = delete;

  /// A request has been answered. `api`: "http" or "grpc"; `endpoint` and `code` come from small fixed sets.
  void request(std::string_view api, std::string_view endpoint, std::string_view code, double seconds);
  void connection_opened();
  void connection_closed();
  void connection_refused();
  /// The client left before its reply was complete.
  void client_left();
  /// A reply was cut because its client reads more slowly than it is made.
  void slow_reader();
  /// From the request's arrival to its first token.
  void first_token(double seconds);
  /// Between two deliveries of one choice, for each of the `tokens` that the second one brought.
  void token_gap(double seconds, size_t tokens);
  void prompt_tokens(size_t tokens);
  void reply_tokens(size_t tokens);

  /// The Prometheus text format, 0.0.4.
  std::string scrape(const ModelService& service) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tensorfold
