// The gRPC server: inference.proto over the same service and engine as HTTP. A request gives the same tokens, text and
// errors on either.
//
// Calls run on gRPC's own threads and never block them: preparing runs on the service's workers, and one thread of the
// server's own turns the engine's events into messages. A client that cancels or vanishes frees its place in the
// engine's next round.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coordinator/profile/profile.h"
#include "coordinator/service/metrics.h"
#include "coordinator/service/model_service.h"

namespace tensorfold {

struct GrpcOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 0;                    // 0: a free one
  int max_message_bytes = 16 << 20;     // a larger request is refused with RESOURCE_EXHAUSTED
  size_t write_buffer_bytes = 1 << 20;  // kept for one client that reads slowly; past it its stream is cut
};

/// Of the profile's sections grpc and http (the write buffer).
GrpcOptions grpc_options(const Profile& profile);

class InferenceServer {
 public:
  /// Listens and serves. `service` and `metrics` outlive the server. Unavailable: the address is taken or not of this
  /// host.
  static absl::StatusOr<std::unique_ptr<InferenceServer>> start(GrpcOptions options, ModelService& service,
                                                                ServiceMetrics& metrics);
  /// stop() without grace.
  ~InferenceServer();
  InferenceServer(const InferenceServer&) = delete;
  InferenceServer& operator=(const InferenceServer&) = delete;

  uint16_t port() const;
  /// "127.0.0.1:8001".
  std::string address() const;

  /// Takes no more calls, lets those under way finish for `grace`, then cancels them. Further calls do nothing.
  void stop(std::chrono::milliseconds grace);

 private:
  class Impl;
  explicit InferenceServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tensorfold
