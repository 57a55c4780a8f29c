// What a hub says of a repository: its commit at a revision, and the files of that commit with sizes and digests.
//
// Format: GET /api/models/REPO/revision/REV gives an object with "sha"; GET /api/models/REPO/tree/COMMIT?recursive=true
// gives a list of {"type", "path", "size", "oid", "lfs": {"oid", "size"}}, with further pages under the Link header's
// rel="next". Contents are at /REPO/resolve/COMMIT/PATH.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "coordinator/hub/fetch.h"

namespace tensorfold {

struct HubRepository {
  std::string name;      // "owner/name", or "name"
  std::string revision;  // branch, tag or commit
};

struct HubFile {
  std::string path;
  uint64_t size = 0;
  std::string sha256;    // 64 hex digits, of large files; else empty
  std::string git_blob;  // 40 hex digits: SHA-1 over "blob SIZE\0" and the bytes, of small files; else empty
};

struct HubListing {
  std::string commit;
  std::vector<HubFile> files;  // sorted by path, each once; paths stay inside a folder (file_names.h)
};

/// "REPO" or "REPO@REV" checked and taken apart; the revision is "main" if not given.
absl::StatusOr<HubRepository> parse_repository(std::string_view text);

/// Asks the hub. InvalidArgument for a listing that is damaged or beyond all sense: more than 10000 files, one of more
/// than 4 TiB, a path that leaves the folder.
absl::StatusOr<HubListing> list_repository(HubFetcher& fetcher, const HubRepository& repository);

/// The hub's path of a file's contents.
std::string content_target(const HubRepository& repository, const std::string& commit, const std::string& path);

/// Parses one page of a tree, and appends. For tests and fuzzing by itself.
absl::Status parse_tree_page(std::string_view json, const std::string& label, std::vector<HubFile>& files);

}  // namespace tensorfold
