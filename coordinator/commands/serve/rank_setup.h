// What every serving rank does before it joins: read the profile, hash the checkpoint, plan memory, say who it is.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "coordinator/profile/profile.h"
#include "transport/join/identity.h"
#include "transport/join/roster.h"
#include "transport/ucx/ucx_endpoint.h"
#include "worker/runtime/backend.h"
#include "worker/runtime/pass_runner.h"
#include "worker/runtime/shards.h"

namespace tensorfold {

/// One rank's parts, in the order in which they must die.
struct RankSetup {
  Profile profile;
  int rank = 0;
  std::unique_ptr<Ops> ops;
  std::unique_ptr<ModelShards> shards;  // opened; load_rank() loads
  ModelShape shape;
  RunnerOptions runner_options;
  RankIdentity identity;  // without the transport's address
  std::string token;
  std::unique_ptr<StateStore> states;  // after load_rank(); null: nothing is kept on disk
  std::unique_ptr<PassRunner> runner;  // after load_rank()

  ClusterTimings timings() const;
  UcxOptions ucx_options() const;
  /// Label of a rank in messages: the profile's host name, or this machine's.
  std::string host_label() const;
};

/// Reads and checks everything that can be wrong before anything is allocated; prints the memory plan to the log.
/// Errors: the profile's, the checkpoint's, a world wider than the model allows, memory that does not suffice.
absl::StatusOr<std::unique_ptr<RankSetup>> prepare_rank(const std::string& profile_path, int rank);

/// Loads this rank's weights and makes its runner (keys, values, states). Takes as long as the disk does.
absl::Status load_rank(RankSetup& setup);

/// Ranks connect at the same time, right after they got the roster, so this is shorter than a join.
Deadline connect_deadline(const RankSetup& setup);

/// A connected transport for an epoch, each link measured, logged and compared with what the profile expects.
absl::StatusOr<std::unique_ptr<Communicator>> connect_rank(RankSetup& setup, std::unique_ptr<UcxEndpoint> endpoint,
                                                           const Roster& roster, Deadline deadline);

}  // namespace tensorfold
