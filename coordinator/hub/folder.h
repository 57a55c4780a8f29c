// The folder that a checkpoint is pulled into: one pull at a time, everything under .tensorfold-pull until all of it is
// there, then put in its place in one go, config.json last.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/hub/descriptor.h"

namespace tensorfold {

/// ResourceExhausted for a full disk or quota, else PermissionDenied or Internal, naming the path.
absl::Status disk_error(const std::string& path, int error_number);

/// Writes a small file whole or not at all.
absl::Status write_file(const std::string& path, std::string_view text);

/// The free bytes of the file system that holds `path`, for this user.
absl::StatusOr<uint64_t> free_bytes(const std::string& path);

class PullFolder {
 public:
  /// Creates the folder and its staging folder where they are missing and takes the lock: FailedPrecondition if another
  /// pull has it. The lock ends with the process, however it ends.
  static absl::StatusOr<PullFolder> open(const std::string& dir);

  const std::string& dir() const { return dir_; }
  const std::string& staging() const { return staging_; }

  /// Moves finished files of the staging folder into the folder, in this order, and removes the staging folder.
  absl::Status put_in_place(const std::vector<std::string>& names);

  /// After a failure: removes the staging folder if it holds nothing worth resuming from, and the folder if it is
  /// empty.
  void tidy();

 private:
  PullFolder() = default;

  std::string dir_;
  std::string staging_;
  Descriptor lock_;
};

}  // namespace tensorfold
