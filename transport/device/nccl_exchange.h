// DeviceExchange over NCCL (https://docs.nvidia.com/deeplearning/nccl): all-gather, send and receive, and never a
// reduction. One GPU a rank, of one host or several.
//
// The library is loaded when it is wanted ("libnccl.so.2"), so that a machine without it runs the other ways; a build
// without its header nccl.h says so.
//
// NCCL's kernels wait for their peers without end, so a thread watches: from set_deadline() until status() it looks for
// NCCL's own errors and, when the deadline passes or abort() is called, aborts the NCCL communicator, which ends its
// kernels. NCCL does not know which peer is missing; the error names all ranks waited for.
//
// Messages need no room: reserve() does nothing.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/device/device_exchange.h"

namespace tensorfold {

/// The version that would be used ("2.28.9"), or why there is none: NotFound, Unimplemented (built without).
absl::StatusOr<std::string> nccl_version();

/// On the current device; called by all ranks. Refuses (FailedPrecondition) two ranks on one GPU. Every kind of
/// operation has run once when it returns, so that nothing is set up inside a capture.
absl::StatusOr<std::unique_ptr<DeviceExchange>> create_nccl_exchange(Communicator& communicator, Deadline deadline);

}  // namespace tensorfold
