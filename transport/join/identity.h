// Who a rank is, and whether it may join: every fact that could make two ranks compute different bits, or misunderstand
// each other, is compared before any weight is read. A difference is refused by name; there is no way round it.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace tensorfold {

/// Of proto/tensorfold/v1/cluster.proto. Raised by a change that an older rank would misread.
inline constexpr uint32_t kClusterProtocol = 1;

// Bounds of what a rank may say about itself, in bytes.
inline constexpr size_t kMaxHashText = 256;    // build, fingerprint, checkpoint, profile
inline constexpr size_t kMaxSliceText = 8192;  // slices
inline constexpr size_t kMaxHostLabel = 255;
inline constexpr size_t kMaxTransportName = 64;
inline constexpr size_t kMaxTransportAddress = 32768;
inline constexpr size_t kMaxReason = 2048;  // causes, reasons and notices that come from another rank

struct RankIdentity {
  uint32_t protocol = kClusterProtocol;  // must agree
  std::string build;                     // version and commit of the program; must agree
  std::string fingerprint;               // numeric fingerprint; must agree
  std::string checkpoint;                // hash of the checkpoint's files; must agree
  std::string profile;                   // hash of the profile's cluster-wide options; must agree
  std::string slices;                    // the slice plan as text; must agree
  uint32_t rank = 0;
  uint32_t world = 1;              // must agree
  std::string host;                // what a person calls this host
  int64_t pid = 0;                 // for people
  std::string transport;           // "local", "ucx", "nccl"; must agree
  std::vector<std::byte> address;  // of the transport; opaque here

  /// "rank 1 (host spark-2, pid 4711)".
  std::string label() const;
};

/// InvalidArgument, naming the field, if a string or the address is longer than its bound, or world is not 1 to 8.
absl::Status validate_identity(const RankIdentity& identity);

/// Whether `joining` may be a rank of `coordinator`'s cluster. FailedPrecondition with one message that lists every
/// mismatch with both values; a rank that the world does not have is one of them. Whether the rank is free is not asked
/// here. Bytes that are not printable ASCII are shown as \xNN.
absl::Status check_join(const RankIdentity& coordinator, const RankIdentity& joining);

/// `text` as it may be printed and logged: other than printable ASCII as \xNN, cut at `limit` characters with "...".
std::string printable(std::string_view text, size_t limit);

}  // namespace tensorfold
