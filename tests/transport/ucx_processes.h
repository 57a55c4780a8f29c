// A UCX world of forked processes of this host, for tests and the benchmark. The parent hands the addresses around over
// socket pairs and collects each rank's result. The calling process must never have used UCX itself: its threads do not
// survive a fork.
#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "transport/base/communicator.h"
#include "transport/ucx/ucx_endpoint.h"

namespace tensorfold {

struct ProcessWorld {
  int world = 2;
  UcxOptions options;
  std::vector<uint32_t> epochs;  // one a rank; empty: 1 everywhere
  std::chrono::seconds connect_time{20};
  std::chrono::seconds limit{120};  // then what still runs is killed and reported
};

// Runs `body` on every rank; the result is each rank's status (Unknown if its process died without one). The rank's
// communicator is destroyed before its process ends.
std::vector<absl::Status> run_ucx_processes(const ProcessWorld& world,
                                            const std::function<absl::Status(Communicator&)>& body);

}  // namespace tensorfold
