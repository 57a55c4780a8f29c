// Member: a rank's membership in rank 0's cluster. The order of calls is in README.md.
//
// Errors of the waits. Every wait has a deadline and its message names whom the rank waited for:
//   DeadlineExceeded    the coordinator did not come, or other ranks are missing
//   FailedPrecondition  (join) refused; the message names every mismatch with both values. Trying again will not help
//   Unavailable         the coordinator is lost (join again), or the epoch is over (wait_regroup)
//   Aborted             (wait_go) a newer epoch has begun already (wait_regroup returns it); (wait_regroup) a newer
//   epoch
//                       began and is over already: its address is spent, so renew_address() and wait again
//   Cancelled           leave() was called, or the coordinator is shutting down
//
// Thread-safety: everything may be called from any thread, but one thread at a time is in join(), wait_go() or
// wait_regroup(). Heartbeats go on by themselves from join() to the end, whatever the caller is busy with. The
// callbacks run on one internal thread, in order, with no lock held; they may call everything but join() and the
// destructor.
#pragma once

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

struct MemberOptions {
  std::string coordinator;  // "host:port"
  RankIdentity identity;    // this rank's; `address` is its first transport address
  std::string token;        // shared by all ranks; empty: none configured
  ClusterTimings timings;
  // A line for the log: whom this rank waits for, once a notice interval. Empty: spdlog at level info.
  std::function<void(const std::string&)> on_notice;
  // The coordinator ends: finish and leave().
  std::function<void(const std::string& reason, bool drain)> on_shutdown;
  // The current epoch is over: abort the transport, so that whoever waits on it stops.
  std::function<void(uint32_t epoch, const std::string& cause)> on_epoch_over;
  // The next epoch has begun; wait_regroup() returns the same roster.
  std::function<void(const Roster&)> on_regroup;
  // The stream to rank 0 broke or rank 0 fell silent. Never after on_shutdown or leave().
  std::function<void(const std::string& cause)> on_coordinator_lost;
};

class Member {
 public:
  /// InvalidArgument: options that contradict each other.
  static absl::StatusOr<std::unique_ptr<Member>> create(MemberOptions options);

  /// leave(), if it was not called. Returns within about a second.
  ~Member();
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  /// Joins, trying again while the coordinator is not up, and waits for the first roster. Also joins again after the
  /// coordinator was lost; renew_address() comes before that, because an endpoint serves one epoch.
  absl::StatusOr<Roster> join(Deadline deadline);

  /// How far this rank is; travels with the next heartbeat.
  void report_progress(LoadProgress progress);

  /// This rank is ready to run passes of `epoch`. Ignored if that epoch is over.
  void ready(uint32_t epoch);

  /// Waits until every rank of `epoch` is ready.
  absl::Status wait_go(uint32_t epoch, Deadline deadline);

  /// A pass was completed; travels with the next heartbeat. Costs two atomic stores.
  void set_last_step(uint64_t sequence);

  /// This rank's transport failed in `epoch`: rank 0 ends it for everybody. Ignored if it is over already.
  void fail_epoch(uint32_t epoch, const std::string& cause);

  /// The transport's address for the next epoch.
  void renew_address(std::vector<std::byte> address);

  /// Waits for an epoch later than `after`.
  absl::StatusOr<Roster> wait_regroup(uint32_t after, Deadline deadline);

  /// Ends the membership; the coordinator is told `reason`. Waits return Cancelled. Returns within about a second.
  /// Further calls do nothing.
  void leave(const std::string& reason);

 private:
  class Impl;
  explicit Member(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tensorfold
