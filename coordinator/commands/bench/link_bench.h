// Latencies between the ranks of a world.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/commands/bench/report.h"
#include "transport/base/communicator.h"

namespace tensorfold {

/// Called on all ranks at the same time with the same `rounds`; the figures are this rank's. Errors: the
/// communicator's.
absl::StatusOr<std::vector<LinkFigure>> bench_links(Communicator& communicator, int rounds);

/// The same between GPU memories: a line for each way of transport/device that this world can go and each size, medians
/// only. With CUDA only. Makes `device` current on this thread.
absl::Status bench_device_links(Communicator& communicator, int device, std::vector<LinkFigure>* figures);

}  // namespace tensorfold
