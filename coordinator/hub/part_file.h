// A file that is being downloaded: NAME.part with the bytes, NAME.state with what of it is there, both in the staging
// folder; NAME alone once it is whole and checked.
//
// Thread-safety: write() from several threads at once for different chunks; everything else under the caller's lock.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/hub/descriptor.h"
#include "coordinator/hub/hub_api.h"

namespace tensorfold {

class PartFile {
 public:
  /// Opens or creates. What an earlier pull left counts only if it is of the same contents (content_identity) in chunks
  /// of the same size. ResourceExhausted when the disk is full.
  static absl::StatusOr<PartFile> open(const std::string& staging, const HubFile& file, uint64_t chunk_bytes);

  const std::string& etag() const { return etag_; }
  void set_etag(const std::string& etag) { etag_ = etag; }

  size_t chunks() const { return done_.size(); }
  bool done(size_t chunk) const { return done_[chunk]; }
  uint64_t begin(size_t chunk) const { return chunk * chunk_bytes_; }
  uint64_t end(size_t chunk) const { return std::min(size_, begin(chunk) + chunk_bytes_); }
  uint64_t done_bytes() const;
  bool complete() const;

  absl::Status write(uint64_t offset, std::span<const char> bytes) const;
  /// Marks and writes the state. The bytes may still be in the system's cache: after a power failure the digest tells.
  absl::Status mark_done(size_t chunk);
  /// Marks all of it.
  absl::Status mark_all_done();
  /// Forgets everything: the hub has other bytes, or the digest is wrong.
  absl::Status reset();

  /// Compares with the hub's size and digest, then renames to NAME and closes. On DataLoss the file is forgotten, so
  /// that the next pull begins anew.
  absl::Status finish(const std::atomic<bool>* stop);

  /// The bytes that `open` would not have to fetch, and those that the disk already holds for it: without opening.
  static uint64_t bytes_on_disk(const std::string& staging, const HubFile& file);
  /// NAME is there, whole and checked, from an earlier pull of the same contents.
  static bool finished(const std::string& staging, const HubFile& file);

 private:
  PartFile() = default;
  absl::Status save(bool complete) const;

  HubFile file_;
  std::string path_;  // without .part
  uint64_t size_ = 0;
  uint64_t chunk_bytes_ = 0;
  std::string etag_;
  std::vector<bool> done_;
  Descriptor fd_;
};

}  // namespace tensorfold
