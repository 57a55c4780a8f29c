// Plain values that both ends of the control plane hand to their callers.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace tensorfold {

/// One rank of an epoch.
struct RosterRank {
  uint32_t rank = 0;
  std::string host;  // what a person calls its host
  int64_t pid = 0;
  std::vector<std::byte> address;  // of its transport, for this epoch
  bool operator==(const RosterRank&) const = default;
};

/// Who computes together. Every change of the ranks or their addresses is a new epoch; the transport carries the epoch
/// in each message, so that nothing of an earlier one counts.
struct Roster {
  uint32_t epoch = 0;  // 1, 2, 3, ...
  uint32_t world = 0;
  std::vector<RosterRank> ranks;  // [world], ascending
  bool operator==(const Roster&) const = default;
};

/// How far a rank is on its way to ready.
struct LoadProgress {
  std::string phase;   // "connecting", "loading", "warming up"; at most 64 bytes travel
  uint64_t done = 0;   // bytes
  uint64_t total = 0;  // bytes; 0: not known
  bool operator==(const LoadProgress&) const = default;
};

inline constexpr size_t kMaxPhase = 64;

/// Timings of the stream between rank 0 and a member, the same on both ends (they are of the profile).
struct ClusterTimings {
  std::chrono::milliseconds heartbeat_interval{200};
  // Silence after which the other end is lost.
  std::chrono::milliseconds heartbeat_timeout{1000};
  // A stream that has not said who it is by then is closed.
  std::chrono::milliseconds handshake_timeout{5000};
  // Between two lines that say whom a rank waits for.
  std::chrono::milliseconds notice_interval{1000};

  /// InvalidArgument unless all are positive the heartbeat timeout is at least two intervals and the
  /// handshake timeout at least two heartbeat timeouts.
  absl::Status validate() const;
};

}  // namespace tensorfold
