// Owns a UCX context and its one worker, with its address and its wake-up file descriptor.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/ucx/ucx_endpoint.h"

namespace tensorfold {

class UcxWorker {
 public:
  static absl::StatusOr<std::unique_ptr<UcxWorker>> create(const UcxOptions& options);
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  ucp_worker_h handle() const { return worker_; }
  int event_fd() const { return event_fd_; }
  bool detects_peer_failure() const { return detect_peer_failure_; }
  absl::StatusOr<std::vector<std::byte>> address() const;

  // The destructor leaves UCX's objects alone, for the rest of the process: a request that could not be ended still
  // refers to them, and newer versions of UCX end the process when they are taken down under it.
  void abandon() { abandoned_ = true; }

 private:
  UcxWorker() = default;
  absl::Status open(const UcxOptions& options);

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;  // owned by the worker
  bool detect_peer_failure_ = false;
  bool abandoned_ = false;
};

}  // namespace tensorfold
