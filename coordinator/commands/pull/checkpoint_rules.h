// What a pull must know of checkpoints: whether a configuration is one that is read, and which shards a rank needs.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "worker/checkpoint/model_config.h"

namespace tensorfold {

/// The rank that a folder is for, of a world of `world` ranks.
struct PullRank {
  int rank = 0;
  int world = 1;
};

/// The parsed configuration of a model or a block drafter, refused as read_config() and read_dflash_config() refuse it,
/// or because the world is wider than it allows.
absl::StatusOr<ModelConfig> examine_config(std::string_view config, std::string_view generation,
                                           const std::string& label, const std::optional<PullRank>& rank);

/// The shards that hold at least one tensor of the language model. Every matrix is cut by rows or columns inside its
/// tensor, so each rank needs a part of every one of them: what can be left out are shards with nothing but tensors
/// that are skipped anyhow (Layout::skip), such as those of a vision tower. The rank makes no difference today. All
/// shards where the names do not make out a layout: then the loader has the word.
std::set<std::string> shards_of_rank(const ModelConfig& config, const std::map<std::string, std::string>& weight_map);

}  // namespace tensorfold
