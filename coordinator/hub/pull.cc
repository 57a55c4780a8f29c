#include "coordinator/hub/pull.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "coordinator/hub/digest.h"
#include "coordinator/hub/file_names.h"
#include "coordinator/hub/folder.h"
#include "coordinator/hub/part_file.h"

namespace tensorfold {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxConfig = 16u << 20;
constexpr uint64_t kMaxIndex = 32u << 20;
constexpr uint64_t kSpareBytes = 32u << 20;  // left free: states, and others who write

std::string first_of(const std::vector<std::string>& names) {
  constexpr size_t kNamed = 6;
  std::string out;
  for (size_t i = 0; i < std::min(names.size(), kNamed); ++i) out += (i > 0 ? ", " : "") + shown(names[i]);
  if (names.size() > kNamed) out += fmt::format(" and {} more", names.size() - kNamed);
  return out;
}

class Pull {
 public:
  Pull(const PullOptions& options, const PullRules& rules, PullProgress& progress, PullFolder folder)
      : options_(options), rules_(rules), progress_(progress), folder_(std::move(folder)) {}

  absl::StatusOr<PullResult> run() {
    const uint64_t before = progress_.received_bytes();
    absl::Status status = list();
    if (status.ok()) status = examine();
    if (status.ok()) status = choose();
    if (status.ok()) status = fetch_rest();
    if (status.ok()) status = put_in_place();
    if (!status.ok()) {
      folder_.tidy();
      return status;
    }
    result_.received = progress_.received_bytes() - before;
    return std::move(result_);
  }

 private:
  const HubFile* find(std::string_view path) const {
    const auto at = std::lower_bound(listing_.files.begin(), listing_.files.end(), path,
                                     [](const HubFile& file, std::string_view wanted) { return file.path < wanted; });
    return at != listing_.files.end() && at->path == path ? &*at : nullptr;
  }

  absl::Status list() {
    HubFetcher fetcher(options_.access);
    absl::StatusOr<HubListing> listing = list_repository(fetcher, options_.repository);
    if (!listing.ok()) return listing.status();
    listing_ = std::move(*listing);
    result_.commit = listing_.commit;
    progress_.say(fmt::format("{} is at commit {}", options_.repository.name, listing_.commit.substr(0, 12)));
    return absl::OkStatus();
  }

  // Fetches what is neither in the folder nor in the staging folder. `count`: shows the progress.
  absl::Status ensure(const std::vector<HubFile>& files, bool count) {
    DownloadPlan plan;
    plan.repository = options_.repository;
    plan.commit = listing_.commit;
    plan.staging = folder_.staging();
    plan.connections = options_.connections;
    plan.chunk_bytes = options_.chunk_bytes;
    uint64_t total = 0;
    for (const HubFile& file : files) {
      if (PartFile::finished(folder_.staging(), file)) {
        fetched_.insert(file.path);
      } else if (in_folder(file)) {
        result_.kept.push_back(file.path);
      } else {
        total += file.size;
        plan.files.push_back(file);
      }
    }
    if (plan.files.empty()) return absl::OkStatus();
    if (absl::Status status = check_room(plan.files); !status.ok()) return status;
    if (count) progress_.begin(total);
    const absl::Status status = download(options_.access, plan, progress_);
    if (count) progress_.end();
    for (const HubFile& file : plan.files) fetched_.insert(file.path);
    return status;
  }

  bool in_folder(const HubFile& file) {
    const std::string path = folder_.dir() + "/" + file.path;
    std::error_code error;
    if (fs::file_size(path, error) != file.size || error) return false;
    // A size alone is no proof.
    if (file.sha256.empty() && file.git_blob.empty()) return false;
    if (file.size > (64u << 20)) progress_.say(fmt::format("checking {}, which is there", shown(file.path)));
    return check_content(path, file, nullptr).ok();
  }

  absl::Status check_room(const std::vector<HubFile>& files) {
    uint64_t needs = 0;
    for (const HubFile& file : files) needs += file.size - PartFile::bytes_on_disk(folder_.staging(), file);
    const absl::StatusOr<uint64_t> has =
        rules_.free_bytes ? rules_.free_bytes(folder_.dir()) : free_bytes(folder_.dir());
    if (!has.ok()) return has.status();
    if (*has >= needs && *has - needs >= kSpareBytes) return absl::OkStatus();
    return absl::ResourceExhaustedError(fmt::format("{}: {} more are needed (and {} to spare), its disk has {} free",
                                                    folder_.dir(), bytes_text(needs), bytes_text(kSpareBytes),
                                                    bytes_text(*has)));
  }

  // A small file's text, from where it is now.
  absl::StatusOr<std::string> read(const std::string& name) const {
    const std::string path = (fetched_.contains(name) ? folder_.staging() : folder_.dir()) + "/" + name;
    std::ifstream in(path, std::ios::binary);
    if (!in) return absl::NotFoundError(fmt::format("{}: cannot be read", path));
    return std::string(std::istreambuf_iterator<char>(in), {});
  }

  absl::Status small_enough(const HubFile& file, uint64_t limit) const {
    if (file.size <= limit) return absl::OkStatus();
    return absl::InvalidArgumentError(fmt::format("{}: {} of {} bytes; allowed are {}", options_.repository.name,
                                                  shown(file.path), file.size, limit));
  }

  absl::Status examine() {
    const HubFile* config = find(kConfigFile);
    if (config == nullptr) {
      return absl::InvalidArgumentError(fmt::format("{}: no config.json, so no checkpoint that is read; it has {}",
                                                    options_.repository.name, listed()));
    }
    std::vector<HubFile> files = {*config};
    const HubFile* generation = find(kGenerationFile);
    if (generation != nullptr) files.push_back(*generation);
    for (const HubFile& file : files) {
      if (absl::Status status = small_enough(file, kMaxConfig); !status.ok()) return status;
    }
    if (absl::Status status = ensure(files, false); !status.ok()) return status;
    const absl::StatusOr<std::string> config_text = read(kConfigFile);
    if (!config_text.ok()) return config_text.status();
    std::string generation_text;
    if (generation != nullptr) {
      absl::StatusOr<std::string> text = read(kGenerationFile);
      if (!text.ok()) return text.status();
      generation_text = std::move(*text);
    }
    if (!rules_.examine) return absl::OkStatus();
    const absl::Status status =
        rules_.examine(*config_text, generation_text, options_.repository.name + ": config.json");
    if (status.ok()) return status;
    return absl::Status(status.code(), fmt::format("{}. No weights were fetched", std::string(status.message())));
  }

  std::string listed() const {
    std::vector<std::string> names;
    for (const HubFile& file : listing_.files) names.push_back(file.path);
    return names.empty() ? "no files" : first_of(names);
  }

  absl::Status choose() {
    const HubFile* index = find(kIndexFile);
    const HubFile* single = find(kSingleFile);
    std::error_code error;
    if (index == nullptr && fs::exists(folder_.dir() + "/" + kIndexFile, error)) {
      return absl::FailedPreconditionError(
          fmt::format("{}: has a {} that is not {}'s: take an empty folder with --to, or remove it", folder_.dir(),
                      kIndexFile, options_.repository.name));
    }
    if (index != nullptr) {
      if (absl::Status status = choose_shards(*index); !status.ok()) return status;
    } else if (single != nullptr) {
      rest_.push_back(*single);
    } else {
      return absl::InvalidArgumentError(
          fmt::format("{}: neither {} nor {}: read are safetensors checkpoints of these names; it has {}",
                      options_.repository.name, kSingleFile, kIndexFile, listed()));
    }
    for (const HubFile& file : listing_.files) {
      const bool there = file.path == kConfigFile || file.path == kGenerationFile;
      if (!there && is_companion(file.path, file.size)) rest_.push_back(file);
    }
    remove_strangers();
    return absl::OkStatus();
  }

  absl::Status choose_shards(const HubFile& index) {
    if (absl::Status status = small_enough(index, kMaxIndex); !status.ok()) return status;
    if (absl::Status status = ensure({index}, false); !status.ok()) return status;
    const absl::StatusOr<std::string> text = read(kIndexFile);
    if (!text.ok()) return text.status();
    const std::string label = fmt::format("{}: {}", options_.repository.name, kIndexFile);
    const absl::StatusOr<std::map<std::string, std::string>> map = parse_weight_map(*text, label);
    if (!map.ok()) return map.status();
    std::set<std::string> all;
    for (const auto& [tensor, shard] : *map) all.insert(shard);
    std::set<std::string> wanted = all;
    if (rules_.choose) {
      absl::StatusOr<std::set<std::string>> chosen = rules_.choose(*map);
      if (!chosen.ok()) return chosen.status();
      wanted = std::move(*chosen);
    }
    std::vector<std::string> missing;
    for (const std::string& shard : all) {
      const HubFile* file = find(shard);
      if (!wanted.contains(shard)) {
        result_.left_out.push_back(shard);
      } else if (file == nullptr) {
        missing.push_back(shard);
      } else {
        rest_.push_back(*file);
      }
    }
    if (!missing.empty()) {
      return absl::NotFoundError(
          fmt::format("{}: names shards that the repository does not have: {}", label, first_of(missing)));
    }
    if (result_.left_out.empty()) return absl::OkStatus();
    absl::StatusOr<std::string> reduced = reduce_index(*text, wanted);
    if (!reduced.ok()) return reduced.status();
    reduced_index_ = std::move(*reduced);
    return absl::OkStatus();
  }

  // Parts of files that this pull does not want, such as those of another revision.
  void remove_strangers() {
    std::set<std::string> known = {"lock"};
    std::vector<std::string> names = {kConfigFile, kGenerationFile, kIndexFile};
    for (const HubFile& file : rest_) names.push_back(file.path);
    for (const std::string& name : names) {
      for (const char* ending : {"", ".part", ".state"}) known.insert(name + ending);
    }
    std::error_code error;
    std::vector<fs::path> strangers;
    for (fs::directory_iterator at(folder_.staging(), error), end; !error && at != end; at.increment(error)) {
      if (!known.contains(at->path().filename().string())) strangers.push_back(at->path());
    }
    for (const fs::path& path : strangers) fs::remove(path, error);
  }

  absl::Status fetch_rest() {
    // Large files first: the end of a pull is then not one long file on one connection.
    std::stable_sort(rest_.begin(), rest_.end(), [](const HubFile& a, const HubFile& b) { return a.size > b.size; });
    uint64_t total = 0;
    for (const HubFile& file : rest_) total += file.size;
    progress_.say(fmt::format(
        "{} files, {}{}", rest_.size(), bytes_text(total),
        result_.left_out.empty()
            ? std::string()
            : fmt::format("; {} shards left out: {}", result_.left_out.size(), first_of(result_.left_out))));
    return ensure(rest_, true);
  }

  absl::Status put_in_place() {
    if (!reduced_index_.empty()) {
      const std::string path = folder_.staging() + "/" + kIndexFile;
      if (absl::Status status = write_file(path, reduced_index_); !status.ok()) return status;
      fetched_.insert(kIndexFile);
      std::erase(result_.kept, kIndexFile);
    }
    std::vector<std::string> names;
    for (const std::string& name : fetched_) {
      if (name != kIndexFile && name != kConfigFile) names.push_back(name);
    }
    // Last, because a folder is taken for a checkpoint by them.
    for (const char* name : {kIndexFile, kConfigFile}) {
      if (fetched_.contains(name)) names.emplace_back(name);
    }
    result_.fetched = names;
    return folder_.put_in_place(names);
  }

  const PullOptions& options_;
  const PullRules& rules_;
  PullProgress& progress_;
  PullFolder folder_;
  HubListing listing_;
  std::vector<HubFile> rest_;      // beside configuration and index
  std::set<std::string> fetched_;  // finished in the staging folder
  std::string reduced_index_;      // if shards were left out
  PullResult result_;
};

}  // namespace

absl::StatusOr<PullResult> pull_checkpoint(const PullOptions& options, const PullRules& rules, PullProgress& progress) {
  absl::StatusOr<PullFolder> folder = PullFolder::open(options.dir);
  if (!folder.ok()) return folder.status();
  Pull pull(options, rules, progress, std::move(*folder));
  return pull.run();
}

}  // namespace tensorfold
