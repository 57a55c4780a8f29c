// `tensorfold serve --rank R` for R > 0: join, connect, load, serve plans; regroup after a loss, join again after rank
// 0 was restarted; end on SIGTERM or when rank 0 says so.
#pragma once

#include <atomic>

#include "absl/status/status.h"
#include "coordinator/commands/serve/rank_setup.h"

namespace tensorfold {

/// `stop` is set by a signal. Returns OK after an orderly end.
absl::Status run_member_process(RankSetup& setup, const std::atomic<bool>& stop);

}  // namespace tensorfold
