// The server that a load goes to: found, ready, and known well enough to make requests of the right size.
#pragma once

#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "coordinator/load/client.h"
#include "coordinator/load/options.h"

namespace tensorfold {

struct LoadServer {
  ClientSettings client;
  std::string model;        // the name that requests use
  std::string fingerprint;  // empty: the server tells none
  int64_t context = 0;      // tokens; 0: the server does not say
  double tokens_per_word = 1.5;
};

/// Looks the server up, waits for it to be ready (options.wait_ready), asks for its models and how it tokenises.
/// Unavailable: not there, not ready, both with the reason. NotFound: no such model. PermissionDenied: the key.
/// InvalidArgument: it is no such server, or a prompt of the load does not fit its context.
absl::StatusOr<LoadServer> find_server(const LoadOptions& options);

}  // namespace tensorfold
