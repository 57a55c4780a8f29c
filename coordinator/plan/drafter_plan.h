// What a block drafter (draft.model) needs of a rank's memory, from its folder's config.json and the sizes of its
// files. Plain functions, any thread.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "coordinator/profile/profile.h"
#include "worker/model/model.h"

namespace tensorfold {

/// All 0 where the profile uses none.
struct DrafterPlan {
  int64_t weight_bytes = 0;   // of this rank
  int64_t page_bytes = 0;     // that its keys and values add to each page
  int64_t scratch_bytes = 0;  // taps of a pass's rows, and context rows made of them
};

/// Errors: those of the drafter's config.json, and a world wider than it allows.
absl::StatusOr<DrafterPlan> plan_drafter(const Profile& profile, const ModelConfig& target, ShardSpec shard);

}  // namespace tensorfold
