// Membership: rank 0's side of the control plane. It lets the other ranks join, refuses those that do not fit, and says
// within the heartbeat timeout when one is lost. The life of an epoch is in README.md.
//
// Errors of the waits. Every wait has a deadline, and its message names the ranks waited for:
//   DeadlineExceeded  ranks are missing or not ready
//   Unavailable       (wait_ready) the epoch is over; the message names rank, host and cause
//   Cancelled         shutdown() was called
//
// Thread-safety: everything may be called from any thread; rank_status(), set_last_step() and epoch() never wait for
// the network. One thread at a time may be in wait_for_all() or wait_ready(). The callbacks run on one internal thread,
// in order, with no lock held; they may call everything but shutdown() and the destructor, and should return soon,
// because silence of ranks is noticed by the same thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/deadline.h"
#include "transport/join/identity.h"
#include "transport/join/roster.h"

namespace tensorfold {

enum class RankState : uint8_t {
  kMissing,  // has never joined
  kJoined,   // checked; waits for the others
  kLoading,  // has the roster of the epoch: connects, loads, warms up
  kReady,    // waits for the others
  kServing,  // every rank of the epoch is ready
  kLost,     // was here
};

/// "missing", "joined", "loading", "ready", "serving", "lost".
const char* rank_state_name(RankState state);

struct LostRank {
  uint32_t rank = 0;
  std::string host;
  int64_t pid = 0;
  uint32_t epoch = 0;  // that ended by it
  std::string cause;

  /// "rank 1 (host spark-2, pid 4711) was lost: its connection broke".
  std::string text() const;
};

struct RankStatus {
  uint32_t rank = 0;
  std::string host;
  int64_t pid = 0;
  RankState state = RankState::kMissing;
  std::string cause;                    // of a lost rank
  double seconds_since_heartbeat = -1;  // -1: none yet; 0 for rank 0
  uint64_t last_step = 0;               // sequence number of the last pass completed
  double seconds_since_step = -1;       // -1: none yet
  LoadProgress progress;
};

struct MembershipOptions {
  std::string listen;     // "127.0.0.1:7070"; port 0 takes a free one. Not used in a world of 1
  RankIdentity identity;  // rank 0's own; `address` is its first transport address
  std::string token;      // shared by all ranks; may be empty only when listening on loopback
  ClusterTimings timings;
  // A line for the log: whom rank 0 waits for (once a notice interval), who joined, who was refused and why. Called
  // from several threads. Empty: spdlog at level info.
  std::function<void(const std::string&)> on_notice;
  // A rank of the current epoch is lost. on_epoch_over follows.
  std::function<void(const LostRank&)> on_lost;
  // The current epoch is over, for whatever reason: no further pass can succeed in it.
  std::function<void(uint32_t epoch, const std::string& cause)> on_epoch_over;
};

class Membership {
 public:
  /// Listens. InvalidArgument: options that contradict each other or an address that is none. Unavailable: the address
  /// is taken or not of this host.
  static absl::StatusOr<std::unique_ptr<Membership>> start(const MembershipOptions& options);

  /// shutdown() with a second's grace, if it was not called.
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  /// Where it listens, "host:port"; empty in a world of 1.
  const std::string& address() const;

  /// Ends the current epoch if there is one, waits until every rank is there with an unused transport address, begins
  /// the next epoch and sends everybody its roster. Rank 0's own new address is given by set_address() before.
  absl::StatusOr<Roster> wait_for_all(Deadline deadline);

  /// Waits until every other rank of the current epoch is ready, then lets all begin. Called when rank 0 itself is
  /// ready.
  absl::Status wait_ready(Deadline deadline);

  /// Rank 0's transport address for the next epoch.
  void set_address(std::vector<std::byte> address);

  /// Ends the current epoch, for instance because rank 0's transport failed. Members stay and are told `cause`.
  void end_epoch(const std::string& cause);

  /// Rank 0's own part of rank_status() and of its heartbeats. set_last_step() costs two atomic stores: for every pass.
  void set_last_step(uint64_t sequence);
  void set_progress(LoadProgress progress);

  /// [world], rank 0 first.
  std::vector<RankStatus> rank_status() const;

  /// Of the current or last epoch; 0 before the first.
  uint32_t epoch() const;

  /// Tells every member to stop, waits up to `grace` until they have left, then ends all streams. Losses are not
  /// reported any more; waits return Cancelled. Returns within `grace` and about a second. Further calls do nothing.
  void shutdown(const std::string& reason, bool drain, std::chrono::milliseconds grace);

 private:
  class Impl;
  explicit Membership(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tensorfold
