// Takes a sequence's state to disk and back, on all ranks, for the cache axis of the differential tester.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "transport/pass/executor.h"

namespace tensorfold {

struct DiskTrip {
  uint32_t slot = 0;                 // the sequence's, as its last pass left it
  std::span<const uint32_t> tokens;  // computed, kept tentative ones included
  uint64_t committed = 0;
  std::vector<int32_t> from;  // its pages
  std::vector<int32_t> to;    // others, which then hold the same
  uint32_t snapshot = 0;      // number under which the slot's snapshot comes back
};

/// Errors are a pass's, or those of the disk: which rank, and what.
absl::Status disk_trip(PassExecutor& executor, const DiskTrip& trip);

}  // namespace tensorfold
