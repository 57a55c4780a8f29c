#include "worker/checkpoint/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "worker/checkpoint/json_fields.h"

namespace tensorfold {
namespace {

namespace fs = std::filesystem;

constexpr char kSingle[] = "model.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";
constexpr size_t kMaxShards = 4096;
constexpr size_t kNamed = 8;  // names listed in a message

// "'a', 'b' and 3 more".
std::string named(const std::vector<std::string>& names) {
  std::string out;
  for (size_t i = 0; i < std::min(names.size(), kNamed); ++i) out += (i > 0 ? ", " : "") + quoted_name(names[i]);
  if (names.size() > kNamed) out += fmt::format(" and {} more", names.size() - kNamed);
  return out;
}

// A shard is a file of this very folder: a path in the index could otherwise name any file of the machine.
bool good_shard_name(std::string_view name) {
  return name.size() <= 255 && name.ends_with(".safetensors") && name.find('/') == std::string_view::npos &&
         name.find('\\') == std::string_view::npos && name.find('\0') == std::string_view::npos && name.front() != '.';
}

absl::StatusOr<std::map<std::string, std::string>> parse_index(std::string_view text, const std::string& label) {
  absl::StatusOr<boost::json::object> index = parse_json_object(text, label);
  if (!index.ok()) return index.status();
  const boost::json::value* map = index->if_contains("weight_map");
  if (map == nullptr || !map->is_object()) {
    return absl::InvalidArgumentError(fmt::format("{}: no object weight_map", label));
  }
  std::map<std::string, std::string> file_of_tensor;
  for (const auto& entry : map->get_object()) {
    const std::string tensor(entry.key().data(), entry.key().size());
    if (!entry.value().is_string() ||
        !good_shard_name({entry.value().get_string().data(), entry.value().get_string().size()})) {
      return absl::InvalidArgumentError(fmt::format(
          "{}: weight_map {} is {}; allowed: the name of a .safetensors file of this folder, without a path", label,
          quoted_name(tensor), json_text(entry.value())));
    }
    file_of_tensor.emplace(tensor, std::string(entry.value().get_string().data(), entry.value().get_string().size()));
  }
  if (file_of_tensor.empty()) return absl::InvalidArgumentError(fmt::format("{}: weight_map is empty", label));
  return file_of_tensor;
}

std::vector<std::string> safetensors_in(const std::string& dir) {
  std::vector<std::string> names;
  std::error_code ec;
  for (fs::directory_iterator at(dir, ec), end; !ec && at != end && names.size() < 1000; at.increment(ec)) {
    if (at->path().extension() == ".safetensors") names.push_back(at->path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::open(const std::string& dir) {
  absl::StatusOr<ModelConfig> config = read_config(dir);
  if (!config.ok()) return config.status();
  return open(dir, *std::move(config));
}

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::open(const std::string& dir, ModelConfig config) {
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint());
  checkpoint->dir_ = dir;
  checkpoint->config_ = std::move(config);

  absl::StatusOr<std::string> index = read_text_file((fs::path(dir) / kIndex).string(), kMaxIndexBytes);
  if (index.ok()) {
    if (absl::Status status = checkpoint->open_index(*index); !status.ok()) return status;
  } else if (!absl::IsNotFound(index.status())) {
    return index.status();
  } else {
    absl::StatusOr<SafetensorsFile> file = SafetensorsFile::open((fs::path(dir) / kSingle).string());
    if (absl::IsNotFound(file.status())) {
      const std::vector<std::string> others = safetensors_in(dir);
      return absl::NotFoundError(fmt::format("{}: neither {} nor {}{}", dir, kSingle, kIndex,
                                             others.empty() ? "" : "; it has " + named(others)));
    }
    if (!file.ok()) return file.status();
    checkpoint->files_.push_back(std::move(*file));
  }
  if (absl::Status status = checkpoint->collect(); !status.ok()) return status;
  return checkpoint;
}

absl::Status Checkpoint::open_index(const std::string& text) {
  const std::string label = (fs::path(dir_) / kIndex).string();
  absl::StatusOr<std::map<std::string, std::string>> file_of_tensor = parse_index(text, label);
  if (!file_of_tensor.ok()) return file_of_tensor.status();
  std::error_code ec;
  const bool uses_single = std::any_of(file_of_tensor->begin(), file_of_tensor->end(),
                                       [](const auto& entry) { return entry.second == kSingle; });
  if (!uses_single && fs::exists(fs::path(dir_) / kSingle, ec)) {
    return absl::InvalidArgumentError(
        fmt::format("{}: holds both {} and an index that does not use it: which one is meant?", dir_, kSingle));
  }
  if (absl::Status status = open_shards(*file_of_tensor); !status.ok()) return status;

  std::vector<std::string> unlisted;
  for (const SafetensorsFile& file : files_) {
    for (const TensorInfo& tensor : file.tensors()) {
      if (!file_of_tensor->contains(tensor.name)) unlisted.push_back(tensor.name);
    }
  }
  if (!unlisted.empty()) {
    return absl::InvalidArgumentError(
        fmt::format("{}: the shards hold tensors that weight_map does not list: {}", label, named(unlisted)));
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::open_shards(const std::map<std::string, std::string>& file_of_tensor) {
  const std::string label = (fs::path(dir_) / kIndex).string();
  std::set<std::string> shards;
  for (const auto& [tensor, file] : file_of_tensor) shards.insert(file);
  if (shards.size() > kMaxShards) {
    return absl::InvalidArgumentError(
        fmt::format("{}: {} shards; allowed are at most {}", label, shards.size(), kMaxShards));
  }
  std::vector<std::string> missing;
  std::map<std::string, size_t> at;
  for (const std::string& shard : shards) {
    absl::StatusOr<SafetensorsFile> file = SafetensorsFile::open((fs::path(dir_) / shard).string());
    if (absl::IsNotFound(file.status())) {
      missing.push_back(shard);
      continue;
    }
    if (!file.ok()) return file.status();
    at[shard] = files_.size();
    files_.push_back(std::move(*file));
  }
  if (!missing.empty()) {
    return absl::NotFoundError(
        fmt::format("{}: {} of {} shards are missing: {}", label, missing.size(), shards.size(), named(missing)));
  }
  for (const auto& [tensor, shard] : file_of_tensor) {
    if (files_[at[shard]].find(tensor) == nullptr) {
      return absl::InvalidArgumentError(
          fmt::format("{}: tensor {} should be in {}, which does not hold it", label, quoted_name(tensor), shard));
    }
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::collect() {
  for (const SafetensorsFile& file : files_) {
    for (const TensorInfo& tensor : file.tensors()) by_name_.push_back(&tensor);
  }
  std::sort(by_name_.begin(), by_name_.end(),
            [](const TensorInfo* a, const TensorInfo* b) { return a->name < b->name; });
  for (const TensorInfo* tensor : by_name_) {
    if (!names_.empty() && names_.back() == tensor->name) {
      return absl::InvalidArgumentError(
          fmt::format("{}: tensor {} stands in two of the files {}", dir_, quoted_name(tensor->name), file_list()));
    }
    names_.push_back(tensor->name);
  }
  return absl::OkStatus();
}

std::string Checkpoint::file_list() const {
  std::vector<std::string> names;
  for (const SafetensorsFile& file : files_) names.push_back(fs::path(file.path()).filename().string());
  return named(names);
}

const TensorInfo* Checkpoint::find(std::string_view name) const {
  const auto at = std::lower_bound(names_.begin(), names_.end(), name,
                                   [](const std::string& a, std::string_view b) { return a < b; });
  return at != names_.end() && *at == name ? by_name_[static_cast<size_t>(at - names_.begin())] : nullptr;
}

}  // namespace tensorfold
