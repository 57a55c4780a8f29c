// Chooses how the ranks of a world exchange device memory: what all can do is set up and measured, rank 0's figures
// decide, and all take the same.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/device/device_exchange.h"

namespace tensorfold {

/// Called by all ranks at the same time with the same `wanted`: "auto", "nccl", "peer" or "pinned". `report` (may be
/// null) gets a line for each way tried: microseconds of a 64 KiB and of a 1 MiB all_gather in a graph (each rank's
/// bytes), or why it is out; and the way taken. Errors: InvalidArgument (`wanted` is none of these), FailedPrecondition
/// (the way that was asked for by name is impossible, and why), an error of the communicator. Makes `device` current on
/// this thread. Messages of 1 MiB are reserved; reserve() more before capturing.
absl::StatusOr<std::unique_ptr<DeviceExchange>> choose_exchange(Communicator& communicator, const std::string& wanted,
                                                                int device, std::vector<std::string>* report);

/// Median microseconds of one all_gather of `bytes` from each rank, `operations` of them in a graph, of `launches`
/// launches. Called by all ranks; sets the exchange's deadline.
absl::StatusOr<double> measure_all_gather(DeviceExchange& exchange, Communicator& communicator, size_t bytes,
                                          int operations, int launches, Deadline deadline);

}  // namespace tensorfold
