// Files of one commit into the staging folder, several ranges at a time.
//
// The first range of a file is asked for alone: its answer says whether the server knows ranges. If it does, the others
// follow on all connections; if not, that one reply carries the whole file. Ranges carry the ETag in If-Range, so that
// a file that changed is noticed and fetched anew, rather than sewn together from two.
#pragma once

#include <string>
#include <vector>

#include "coordinator/hub/fetch.h"
#include "coordinator/hub/hub_api.h"
#include "coordinator/hub/progress.h"

namespace tensorfold {

struct DownloadPlan {
  HubRepository repository;
  std::string commit;
  std::vector<HubFile> files;  // names without folders
  std::string staging;
  int connections = 8;
  uint64_t chunk_bytes = 16u << 20;
};

/// All files finished in the staging folder (PartFile::finished), or the first error. What came stays for the next
/// call.
absl::Status download(const HubAccess& access, const DownloadPlan& plan, PullProgress& progress);

}  // namespace tensorfold
