// `tensorfold state`: looks after the states on disk without a server: lists, checks, prunes, copies them out and in. A
// server may run on the folder meanwhile: files appear whole, and go.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <set>

#include "coordinator/commands/commands.h"
#include "worker/state/state_store.h"

namespace tensorfold {
namespace {

namespace fs = std::filesystem;

struct StateFlags {
  std::string directory;
  std::string other;  // where to or from
  std::string key;
  int64_t quota = 0;
};

// DIRECTORY/FINGERPRINT/rankRofW.
std::vector<std::string> rank_folders(const std::string& directory) {
  std::vector<std::string> folders;
  std::error_code error;
  for (const auto& fingerprint : fs::directory_iterator(directory, error)) {
    if (!fingerprint.is_directory(error)) continue;
    for (const auto& rank : fs::directory_iterator(fingerprint.path(), error)) {
      if (rank.is_directory(error) && rank.path().filename().string().starts_with("rank")) {
        folders.push_back(rank.path().string());
      }
    }
  }
  std::sort(folders.begin(), folders.end());
  return folders;
}

absl::Status check_directory(const std::string& directory) {
  std::error_code error;
  if (fs::is_directory(directory, error)) return absl::OkStatus();
  return absl::NotFoundError(directory + ": no such folder");
}

std::string line_of(const StateFileInfo& file) {
  if (!file.status.ok()) return fmt::format("UNUSABLE  {}", std::string(file.status.message()));
  const StateHeader& header = file.header;
  std::string pins;
  for (const std::string& name : file.names) pins += " pinned:" + name;
  return fmt::format("{}  tokens {:>8} to {:>8}  {:<18} {:>9.2f} MiB{}", key_text(header.key), header.first_position,
                     header.first_position + header.tokens.size(),
                     header.committed == 0 ? "pages alone" : fmt::format("snapshot {}", header.committed),
                     static_cast<double>(file.bytes) / (1024.0 * 1024.0), pins);
}

absl::Status list(const StateFlags& flags) {
  for (const std::string& folder : rank_folders(flags.directory)) {
    uint64_t bytes = 0;
    const std::vector<StateFileInfo> files = StateStore::list(folder);
    for (const StateFileInfo& file : files) bytes += file.bytes;
    std::cout << fmt::format("{}: {} states, {:.1f} MiB\n", folder, files.size(),
                             static_cast<double>(bytes) / (1024.0 * 1024.0));
    for (const StateFileInfo& file : files) std::cout << "  " << line_of(file) << "\n";
  }
  return absl::OkStatus();
}

// Reads every byte of every file; chains whose beginning is gone are told of, too.
absl::Status verify(const StateFlags& flags) {
  size_t good = 0, bad = 0, loose = 0;
  for (const std::string& folder : rank_folders(flags.directory)) {
    const std::vector<StateFileInfo> files = StateStore::list(folder);
    std::set<StateKey> keys;
    for (const StateFileInfo& file : files) {
      if (file.status.ok()) keys.insert(file.header.key);
    }
    for (const StateFileInfo& file : files) {
      std::vector<std::byte> payload;
      absl::Status status = file.status;
      if (status.ok()) status = read_state_file(file.path, &payload).status();
      if (!status.ok()) {
        std::cout << "damaged: " << std::string(status.message()) << "\n";
        ++bad;
        continue;
      }
      ++good;
      if (file.header.first_position > 0 && keys.count(file.header.parent) == 0) {
        std::cout << fmt::format("without its beginning: {}\n", file.path);
        ++loose;
      }
    }
  }
  std::cout << fmt::format("{} whole, {} damaged, {} of the whole ones without their beginning\n", good, bad, loose);
  return bad == 0 ? absl::OkStatus() : absl::DataLossError(fmt::format("{} files are damaged", bad));
}

absl::Status prune(const StateFlags& flags) {
  int64_t removed = 0;
  for (const std::string& folder : rank_folders(flags.directory)) removed += StateStore::prune(folder, flags.quota);
  std::cout << fmt::format("{:.1f} MiB removed\n", static_cast<double>(removed) / (1024.0 * 1024.0));
  return absl::OkStatus();
}

// Copies whole states from one directory to the other: all, or the chain that ends with a key. What is damaged is left.
absl::Status copy(const std::string& from, const std::string& to, const std::string& key_argument) {
  StateKey wanted;
  if (!key_argument.empty()) {
    const absl::StatusOr<StateKey> key = parse_key(key_argument);
    if (!key.ok()) return key.status();
    wanted = *key;
  }
  size_t copied = 0, left = 0;
  for (const std::string& folder : rank_folders(from)) {
    std::map<StateKey, StateFileInfo> files;
    for (const StateFileInfo& file : StateStore::list(folder)) {
      if (file.status.ok()) {
        files[file.header.key] = file;
      } else {
        std::cout << "left: " << std::string(file.status.message()) << "\n";
        ++left;
      }
    }
    std::set<StateKey> chain;
    for (StateKey at = wanted; !key_argument.empty() && files.count(at) > 0; at = files[at].header.parent) {
      if (!chain.insert(at).second || files[at].header.first_position == 0) break;
    }
    const std::string target = to + folder.substr(from.size());
    for (const auto& [key, file] : files) {
      if (!key_argument.empty() && chain.count(key) == 0) continue;
      std::vector<std::byte> payload;
      absl::StatusOr<StateHeader> header = read_state_file(file.path, &payload);
      if (!header.ok()) {
        std::cout << "left: " << std::string(header.status().message()) << "\n";
        ++left;
        continue;
      }
      std::error_code error;
      fs::create_directories(target, error);
      if (absl::Status status =
              write_state_file(target + "/" + fs::path(file.path).filename().string(), *header, payload);
          !status.ok()) {
        return status;
      }
      ++copied;
    }
  }
  std::cout << fmt::format("{} states copied, {} damaged ones left\n", copied, left);
  return copied > 0 || left > 0 || key_argument.empty() ? absl::OkStatus()
                                                        : absl::NotFoundError("no state with key " + key_argument);
}

}  // namespace

void add_state_command(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<StateFlags>();
  CLI::App* state = app.add_subcommand("state", "Look after the states that a server keeps on disk (docs/caching.md)");
  state->require_subcommand(1);
  const auto add = [&](const char* name, const char* help, std::function<absl::Status()> run) {
    CLI::App* command = state->add_subcommand(name, help);
    command->add_option("--directory", flags->directory, "state.directory of the profile")->required();
    command->callback([flags, exit_code, run = std::move(run)] {
      while (flags->directory.size() > 1 && flags->directory.back() == '/') flags->directory.pop_back();
      absl::Status status = check_directory(flags->directory);
      if (status.ok()) status = run();
      *exit_code = status.ok() ? 0 : report_error(status);
    });
    return command;
  };
  add("ls", "List states: key, tokens, snapshot, size, pins; unusable files with the reason",
      [flags] { return list(*flags); });
  add("verify", "Read every byte; exit code 1 if a file is damaged", [flags] { return verify(*flags); });
  add("prune", "Remove the least recently used states until each rank's fit --quota; pinned ones stay",
      [flags] { return prune(*flags); })
      ->add_option("--quota", flags->quota, "bytes a rank, as 200GiB")
      ->required()
      ->transform(CLI::AsSizeValue(false));
  CLI::App* save = add("save", "Copy whole states to another folder",
                       [flags] { return copy(flags->directory, flags->other, flags->key); });
  save->add_option("--to", flags->other, "folder to copy to")->required();
  save->add_option("--key", flags->key, "only the chain that ends with this key");
  CLI::App* restore = add("restore", "Copy whole states from such a folder back", [flags] {
    absl::Status status = check_directory(flags->other);
    return status.ok() ? copy(flags->other, flags->directory, flags->key) : status;
  });
  restore->add_option("--from", flags->other, "folder to copy from")->required();
  restore->add_option("--key", flags->key, "only the chain that ends with this key");
}

}  // namespace tensorfold
