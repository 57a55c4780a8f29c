// What a block drafter needs of a rank's memory: one of its own (draft.model) from its folder's config.json and the
// sizes of its files, the one that a model brings along from the model's. Plain functions, any thread.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "coordinator/profile/profile.h"
#include "worker/checkpoint/inspect.h"
#include "worker/model/model.h"

namespace tensorfold {

/// All 0 where the profile uses none.
struct DrafterPlan {
  bool in_use = false;
  int64_t weight_bytes = 0;   // of this rank
  int64_t page_bytes = 0;     // that what it keeps adds to each page
  int64_t scratch_bytes = 0;  // taps of a pass's rows, and context rows made of them
};

/// `facts`, of the model's files, tell the weights of a drafter that it brings along; null: these are not wanted.
/// Errors: those of the drafter's config.json, and a world wider than it allows.
absl::StatusOr<DrafterPlan> plan_drafter(const Profile& profile, const ModelConfig& target, ShardSpec shard,
                                         const ModelFacts* facts = nullptr);

}  // namespace tensorfold
