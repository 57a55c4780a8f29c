// The client's own check of the contract (docs/contract.md): the requests of a load once more, one at a time, one
// token a pass and without the prefix cache, must give the same token_sha.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/load/load.h"

namespace tensorfold {

struct HashDifference {
  uint64_t conversation = 0;
  int turn = 0;
  std::string loaded;  // token_sha under load
  std::string serial;
};

struct HashCheck {
  uint64_t compared = 0;  // replies
  uint64_t different = 0;
  std::vector<HashDifference> first;  // at most 20 of them
};

/// Repeats report.hashes. After a difference the rest of that conversation is not compared: its history is another.
/// `on_progress` is told how many conversations are done and of how many, now and then; may be null.
/// FailedPrecondition: nothing to compare, or replies without a token_sha. Unavailable and Internal: a request could
/// not be repeated.
absl::StatusOr<HashCheck> check_load(const LoadReport& report, const std::function<void(size_t, size_t)>& on_progress);

}  // namespace tensorfold
