// DeviceExchange between GPUs of one host that can write into each other's memory: threads of one process by plain
// pointers, processes by CUDA's memory handles. One GPU a rank. The kernels, and why they are right, are in
// kernels/cuda/peer_exchange.h.
//
// A rank's own receive area is written by the others only in an exchange that this rank takes part in, and when that
// has ended here everything has come; so after the last common exchange each rank may free its memory without asking.
// After a failure a late rank may still write: within a process the areas are owned by all ranks that use them, between
// processes the driver keeps the memory while it is mapped.
//
// A deadline bounds each kernel's wait by the time that was left at set_deadline(), counted from the kernel's first
// look at the clock: a pass that goes wrong ends at most its own length after the deadline.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/device/cuda_support.h"
#include "transport/device/device_exchange.h"

namespace tensorfold {

/// Why these ranks cannot write into each other's memory, seen from `rank` on `device`; OK if they can.
absl::Status peers_reachable(std::span<const DeviceIdentity> ranks, int rank, int device,
                             const Communicator& communicator);

/// On the current device; called by all ranks. `sum_floats` bounds the floats of all nodes of one cuda_peer_sum(); 16
/// bytes of device memory each. FailedPrecondition says which ranks cannot.
absl::StatusOr<std::unique_ptr<DeviceExchange>> create_peer_exchange(Communicator& communicator, Deadline deadline,
                                                                     int64_t sum_floats = int64_t{1} << 20);

}  // namespace tensorfold
