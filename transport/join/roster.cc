#include "transport/join/roster.h"

#include <fmt/format.h>

namespace tensorfold {

absl::Status ClusterTimings::validate() const {
  if (heartbeat_interval.count() <= 0 || handshake_timeout.count() <= 0 || notice_interval.count() <= 0) {
    return absl::InvalidArgumentError(
        "the cluster's heartbeat interval, handshake timeout and notice interval are more than 0");
  }
  if (heartbeat_timeout < 2 * heartbeat_interval) {
    return absl::InvalidArgumentError(
        fmt::format("a heartbeat timeout of {} ms is less than two heartbeat intervals of {} ms: one late heartbeat "
                    "would lose a rank",
                    heartbeat_timeout.count(), heartbeat_interval.count()));
  }
  // A process that claims a held rank waits for the holder's heartbeat timeout within its handshake.
  if (handshake_timeout < 2 * heartbeat_timeout) {
    return absl::InvalidArgumentError(
        fmt::format("a handshake timeout of {} ms is less than two heartbeat timeouts of {} ms",
                    handshake_timeout.count(), heartbeat_timeout.count()));
  }
  return absl::OkStatus();
}

}  // namespace tensorfold
