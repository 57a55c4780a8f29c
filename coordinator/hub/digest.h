// Whether a file on disk is the one that the hub lists.
#pragma once

#include <atomic>
#include <string>

#include "absl/status/status.h"
#include "coordinator/hub/hub_api.h"

namespace tensorfold {

/// Names a file's contents: two files with the same identity hold the same bytes.
std::string content_identity(const HubFile& file);

/// OK if the file at `path` has the listed size and, where the hub gives one, the listed SHA-256 or git blob SHA-1.
/// DataLoss saying what differs. NotFound if there is none. Reads the whole file.
absl::Status check_content(const std::string& path, const HubFile& file, const std::atomic<bool>* stop);

}  // namespace tensorfold
