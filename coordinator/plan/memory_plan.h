// What a rank of a profile needs in memory, before anything is allocated: from the profile and the checkpoint's headers
// alone, so that `tensorfold plan` answers on any machine, and `serve` says and checks the same.
//
// Plain functions and data, any thread. docs/capacity.md explains each line to users.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/profile/profile.h"
#include "worker/checkpoint/inspect.h"
#include "worker/checkpoint/model_config.h"
#include "worker/model/model.h"

namespace tensorfold {

/// One line of a plan.
struct MemoryItem {
  std::string name;  // "weights"
  int64_t bytes = 0;
  std::string note;   // how it is made up: "16384 pages of 64 tokens, 32.0 KiB each"
  bool host = false;  // in the host's memory, where the backend has its own
};

struct MemoryPlan {
  int rank = 0;
  bool device = false;  // the backend has memory of its own
  int64_t pages = 0;    // KV pages of every rank
  int64_t page_bytes = 0;
  int64_t snapshots = 0;  // copies of slots that every rank keeps for the prefix cache
  int64_t context = 0;    // tokens that a sequence may have: the profile's or the model's
  int lanes = 0;          // sequences at once
  std::vector<MemoryItem> items;

  /// Bytes where the backend computes; all of them where that is the host.
  int64_t total() const;
  /// Bytes in the host's memory beside a device.
  int64_t host_total() const;
  /// The longest sequence, prompt and reply, that `sequences` at once can all have.
  int64_t tokens_each(int sequences) const;
};

/// Bytes of keys, values and other rows of one page on a rank.
int64_t page_bytes(const Profile& profile, const ModelShape& shape);
/// Pages of the pool. All ranks need the same, and rank 0 owns the most heads, so its bytes decide. InvalidArgument if
/// memory.kv_bytes holds none.
absl::StatusOr<int64_t> planned_pages(const Profile& profile, const ModelConfig& config);

/// Snapshots that every rank can hold: rank 0 has the largest share of the states. A model without states needs none.
absl::StatusOr<int64_t> planned_snapshots(const Profile& profile, const ModelConfig& config);

/// Errors: a world wider than the model allows, a pool without a page, a rank that the world does not have.
absl::StatusOr<MemoryPlan> make_memory_plan(const Profile& profile, const ModelConfig& config, const ModelFacts& facts,
                                            int rank);

/// ResourceExhausted if the plan, or a longest sequence of a context that the profile asks for, does not fit; the
/// message says both numbers and what to change. `available`: bytes that are free; -1: unknown, not checked.
absl::Status check_memory_plan(const MemoryPlan& plan, const Profile& profile, int64_t available);

/// The plan as a table: a line an item, the total, what contexts so many sequences may have.
std::string memory_plan_text(const MemoryPlan& plan);

/// Bytes of weights that a rank of this shape holds, on the CPU backend or on a device.
int64_t rank_weight_bytes(const ModelFacts& facts, const ModelShape& shape, bool device);

/// "16.00 KiB".
std::string human_bytes(int64_t bytes);

}  // namespace tensorfold
