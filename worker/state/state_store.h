// A rank's states on disk: files in one folder, read and written by a thread of its own, so that no pass waits for a
// disk.
//
// Thread-safety: save() to events() are the pass runner's thread's; the disk is touched by the store's own thread
// alone. The static functions may be called from anywhere, also while a store is open on the folder: files appear
// whole, and go.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/state/state_file.h"

namespace tensorfold {

struct StateStoreOptions {
  std::string directory;  // of all ranks and fingerprints; made if it is not there
  StateOwner owner;
  int64_t quota = 0;                        // bytes of this owner's files
  uint64_t page_bytes = 0;                  // of this rank's pages
  size_t most_waiting = size_t{256} << 20;  // bytes that wait to be written or placed
};

/// A file of a folder: what its header says, or why it is of no use.
struct StateFileInfo {
  std::string path;
  absl::Status status;
  StateHeader header;
  uint64_t bytes = 0;
  int64_t used = 0;                // seconds since 1970: its last use
  std::vector<std::string> names;  // under which it is pinned
};

class StateStore {
 public:
  /// Makes the folder, removes unfinished files of former processes. Errors name the folder.
  static absl::StatusOr<std::unique_ptr<StateStore>> open(StateStoreOptions options);
  /// Writes what waits first.
  ~StateStore();

  /// Each of these ends with one event for `ticket`.
  void save(uint64_t ticket, StateHeader header, std::vector<std::byte> payload);
  void fetch(uint64_t ticket, const StateKey& key);
  /// What was fetched; NotFound if nothing was, or not successfully.
  absl::StatusOr<StateHeader> take(uint64_t ticket, std::vector<std::byte>* payload);
  /// No events.
  void forget(uint64_t ticket);
  void pin(const StateKey& key, const std::string& name);
  void unpin(const StateKey& key, const std::string& name);
  void erase(const StateKey& key);

  /// What ended since the last call, at most `most`.
  std::vector<StateEvent> events(size_t most);
  const StateStoreOptions& options() const { return options_; }

  /// "DIRECTORY/FINGERPRINT/rank0of2".
  static std::string folder_of(const std::string& directory, const StateOwner& owner);
  /// Every file of a folder, also of others and damaged ones, by its last use. Reads headers only.
  static std::vector<StateFileInfo> list(const std::string& folder);
  /// Removes the least recently used files until they fit `quota`, those that end chains first; pinned ones stay.
  /// Returns the bytes removed.
  static int64_t prune(const std::string& folder, int64_t quota);

 private:
  struct Fetched {
    StateHeader header;
    std::vector<std::byte> payload;
  };
  explicit StateStore(StateStoreOptions options);
  void run();
  void post(std::function<void()> job);
  void finish(uint64_t ticket, const absl::Status& status);
  absl::Status read(uint64_t ticket, const StateKey& key);
  std::string path_of(const StateKey& key) const;

  const StateStoreOptions options_;
  const std::string folder_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> jobs_;
  std::vector<StateEvent> events_;
  std::map<uint64_t, Fetched> fetched_;
  size_t waiting_bytes_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace tensorfold
