// Runs every operation of a communicator with sizes and contents that all ranks derive from a seed, and checks each
// byte received. Called by all ranks of a world, in threads or processes.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "transport/base/communicator.h"

namespace tensorfold {

// `rounds` rounds of random sizes up to a few KiB, then one with sizes up to `large_bytes` (both zero and large occur).
absl::Status check_all_operations(Communicator& communicator, uint64_t seed, int rounds, size_t large_bytes);

}  // namespace tensorfold
