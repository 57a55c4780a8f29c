#include "coordinator/cluster/wire.h"

#include <utility>

namespace tensorfold {

std::vector<std::byte> bytes_from_wire(const std::string& wire) {
  const auto* begin = reinterpret_cast<const std::byte*>(wire.data());
  return {begin, begin + wire.size()};
}

absl::StatusOr<RankIdentity> identity_from_wire(v1::Identity wire) {
  RankIdentity identity;
  identity.protocol = wire.protocol();
  identity.build = std::move(*wire.mutable_build());
  identity.fingerprint = std::move(*wire.mutable_fingerprint());
  identity.checkpoint = std::move(*wire.mutable_checkpoint());
  identity.profile = std::move(*wire.mutable_profile());
  identity.slices = std::move(*wire.mutable_slices());
  identity.rank = wire.rank();
  identity.world = wire.world();
  identity.host = std::move(*wire.mutable_host());
  identity.pid = wire.pid();
  identity.transport = std::move(*wire.mutable_transport());
  identity.address = bytes_from_wire(wire.transport_address());
  if (absl::Status status = validate_identity(identity); !status.ok()) return status;
  return identity;
}

LoadProgress progress_from_wire(const v1::LoadProgress& wire) {
  return {printable(wire.phase(), kMaxPhase), wire.done(), wire.total()};
}

void roster_to_wire(const Roster& roster, v1::Roster* wire) {
  wire->set_epoch(roster.epoch);
  wire->set_world(roster.world);
  for (const RosterRank& rank : roster.ranks) {
    v1::RankAddress* out = wire->add_ranks();
    out->set_rank(rank.rank);
    out->set_host(rank.host);
    out->set_pid(rank.pid);
    out->set_transport_address(rank.address.data(), rank.address.size());
  }
}

}  // namespace tensorfold
