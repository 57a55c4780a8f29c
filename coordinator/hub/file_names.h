// Names of files from a hub: which are safe, which belong to a checkpoint, and what an index says.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace tensorfold {

inline constexpr char kConfigFile[] = "config.json";
inline constexpr char kGenerationFile[] = "generation_config.json";
inline constexpr char kIndexFile[] = "model.safetensors.index.json";
inline constexpr char kSingleFile[] = "model.safetensors";

/// A name for a message: quoted, control characters escaped, cut at 80 bytes.
std::string shown(std::string_view name);

/// OK for a relative path that stays inside a folder: no empty, "." or ".." part, no backslash, no control character,
/// parts of at most 255 bytes, 1024 in all.
absl::Status check_path(std::string_view path);

/// A small file that a checkpoint folder has beside its weights: configuration, tokenizer, chat template, licence. In
/// the folder itself, not hidden, at most 64 MiB.
bool is_companion(std::string_view path, uint64_t size);

/// Tensor → shard of a model.safetensors.index.json. InvalidArgument when it is damaged or names anything else than
/// .safetensors files of the folder, or more than 4096 of them.
absl::StatusOr<std::map<std::string, std::string>> parse_weight_map(std::string_view json, const std::string& label);

/// The index with only the tensors of `shards`, as Checkpoint::open() needs it where other shards were left out.
absl::StatusOr<std::string> reduce_index(std::string_view json, const std::set<std::string>& shards);

}  // namespace tensorfold
