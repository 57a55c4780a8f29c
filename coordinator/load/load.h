// A load on a server, level by level, and what it measured (docs/load-testing.md).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/load/level.h"
#include "coordinator/load/options.h"
#include "coordinator/load/server.h"

namespace tensorfold {

struct LoadReport {
  LoadOptions options;  // with what the server said: model, sizes
  LoadServer server;
  std::vector<LevelFigures> levels;
  std::vector<HashedConversation> hashes;  // of all levels, those that check_load() repeats
};

/// Runs all levels, one after another; no two have a conversation in common. `on_level` is told of each as it ends; may
/// be null. Errors: LoadOptions::validate() and run_level().
absl::StatusOr<LoadReport> run_load(const LoadOptions& options, const LoadServer& server,
                                    const std::function<void(const LevelFigures&)>& on_level);

}  // namespace tensorfold
