// One state on disk: the pages of up to 2,048 tokens of a token chain and perhaps a snapshot, of one rank. The layout
// is in docs/formats/state.md. Reading believes nothing: lengths are checked against the file before anything is
// allocated, and both parts against their checksums before anything is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/pass/state_orders.h"

namespace tensorfold {

inline constexpr uint32_t kStateVersion = 2;  // of the file and of the memory layout of pages and states in it
inline constexpr size_t kMaxStateHeader = 64 * 1024;
inline constexpr uint64_t kMaxStatePayload = uint64_t{1} << 34;

/// Whose states: files of other owners are never used.
struct StateOwner {
  std::string build;        // whose memory layout it is
  std::string fingerprint;  // numeric fingerprint
  uint32_t rank = 0;
  uint32_t world = 1;
  bool operator==(const StateOwner&) const = default;
};

struct StateHeader {
  StateOwner owner;
  StateKey key;
  StateKey parent;
  uint64_t first_position = 0;
  std::vector<int32_t> tokens;
  bool mtp = false;
  uint64_t committed = 0;  // of the snapshot; 0: there is none
  std::vector<int32_t> kept;
  uint64_t page_bytes = 0;
  uint64_t snapshot_bytes = 0;
  bool operator==(const StateHeader&) const = default;

  uint64_t pages() const { return (tokens.size() + 63) / 64; }
  uint64_t payload_bytes() const { return pages() * page_bytes + snapshot_bytes; }
};

std::vector<std::byte> encode_state_header(const StateHeader& header);
/// InvalidArgument or DataLoss: not such a header, or a damaged one. `*size`: its bytes.
absl::StatusOr<StateHeader> decode_state_header(std::span<const std::byte> bytes, size_t* size);

/// Only the header of a file. Errors name the file.
absl::StatusOr<StateHeader> read_state_header(const std::string& path);
/// All of a file, checked. The payload: pages one after the other, then the snapshot.
absl::StatusOr<StateHeader> read_state_file(const std::string& path, std::vector<std::byte>* payload);
/// Writes beside `path`, makes it durable, then renames: there is never half a file under this name.
absl::Status write_state_file(const std::string& path, const StateHeader& header, std::span<const std::byte> payload);

}  // namespace tensorfold
