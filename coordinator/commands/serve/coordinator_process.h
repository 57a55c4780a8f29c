// `tensorfold serve --rank 0`: forms the world, then answers HTTP and gRPC until SIGTERM; drains before it ends.
#pragma once

#include <atomic>

#include "absl/status/status.h"
#include "coordinator/commands/serve/rank_setup.h"

namespace tensorfold {

/// `stop` is set by a signal. Returns OK after an orderly end.
absl::Status run_coordinator_process(RankSetup& setup, const std::atomic<bool>& stop);

}  // namespace tensorfold
