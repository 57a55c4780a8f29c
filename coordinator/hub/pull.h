// A checkpoint from a hub into a folder: what `tensorfold pull` does.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/hub/download.h"
#include "coordinator/hub/fetch.h"
#include "coordinator/hub/hub_api.h"
#include "coordinator/hub/progress.h"

namespace tensorfold {

struct PullOptions {
  HubAccess access;
  HubRepository repository;
  std::string dir;
  int connections = 8;
  uint64_t chunk_bytes = 16u << 20;
};

/// What a pull asks of those who know checkpoints and disks.
struct PullRules {
  /// Whether the model is one that can be read, from the texts of config.json and generation_config.json (may be
  /// empty). Nothing else is fetched unless it says OK.
  std::function<absl::Status(std::string_view config, std::string_view generation, const std::string& label)> examine;
  /// Which shards are needed, from the tensor → shard map of the index; null: all of them.
  std::function<absl::StatusOr<std::set<std::string>>(const std::map<std::string, std::string>& weight_map)> choose;
  /// Free bytes for a path; null: asks the file system.
  std::function<absl::StatusOr<uint64_t>(const std::string& dir)> free_bytes;
};

struct PullResult {
  std::string commit;
  uint64_t received = 0;              // bytes over the network
  std::vector<std::string> fetched;   // names put in place
  std::vector<std::string> kept;      // there already, with the same contents
  std::vector<std::string> left_out;  // shards that the rank does not need
};

/// Lists the repository, fetches and examines its configuration, looks whether there is room, fetches the rest, checks
/// all of it, and only then puts it in the folder. Errors leave the folder's own files as they were; what came stays in
/// its staging folder and is used by the next pull. Thread-safety: one pull a folder, enforced.
absl::StatusOr<PullResult> pull_checkpoint(const PullOptions& options, const PullRules& rules, PullProgress& progress);

}  // namespace tensorfold
