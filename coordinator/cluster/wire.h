// Messages of cluster.proto to and from plain structs, rank 0's side. What comes in is checked against the bounds of
// transport/join/identity.h. Thread-safety: pure functions.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "tensorfold/v1/cluster.pb.h"
#include "transport/join/identity.h"
#include "transport/join/roster.h"

namespace tensorfold {

/// InvalidArgument naming the field that breaks a bound.
absl::StatusOr<RankIdentity> identity_from_wire(v1::Identity wire);

LoadProgress progress_from_wire(const v1::LoadProgress& wire);

void roster_to_wire(const Roster& roster, v1::Roster* wire);

std::vector<std::byte> bytes_from_wire(const std::string& wire);

}  // namespace tensorfold
