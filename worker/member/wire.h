// Messages of cluster.proto to and from plain structs, a member's side. Thread-safety: pure functions.
#pragma once

#include "absl/status/statusor.h"
#include "tensorfold/v1/cluster.pb.h"
#include "transport/join/identity.h"
#include "transport/join/roster.h"

namespace tensorfold {

void identity_to_wire(const RankIdentity& identity, v1::Identity* wire);

/// InvalidArgument unless the roster has one entry for each of `world` ranks, in order, within the bounds.
absl::StatusOr<Roster> roster_from_wire(const v1::Roster& wire, uint32_t world);

}  // namespace tensorfold
