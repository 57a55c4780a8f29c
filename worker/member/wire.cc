#include "worker/member/wire.h"

#include <fmt/format.h>

namespace tensorfold {

void identity_to_wire(const RankIdentity& identity, v1::Identity* wire) {
  wire->set_protocol(identity.protocol);
  wire->set_build(identity.build);
  wire->set_fingerprint(identity.fingerprint);
  wire->set_checkpoint(identity.checkpoint);
  wire->set_profile(identity.profile);
  wire->set_slices(identity.slices);
  wire->set_rank(identity.rank);
  wire->set_world(identity.world);
  wire->set_host(identity.host);
  wire->set_pid(identity.pid);
  wire->set_transport(identity.transport);
  wire->set_transport_address(identity.address.data(), identity.address.size());
}

absl::StatusOr<Roster> roster_from_wire(const v1::Roster& wire, uint32_t world) {
  if (wire.world() != world || static_cast<uint32_t>(wire.ranks_size()) != world || wire.epoch() == 0) {
    return absl::InvalidArgumentError(
        fmt::format("the coordinator's roster for epoch {} has {} ranks of a world of {}; {} expected", wire.epoch(),
                    wire.ranks_size(), wire.world(), world));
  }
  Roster roster{wire.epoch(), world, {}};
  for (uint32_t rank = 0; rank < world; ++rank) {
    const v1::RankAddress& in = wire.ranks(static_cast<int>(rank));
    if (in.rank() != rank || in.host().size() > kMaxHostLabel || in.transport_address().size() > kMaxTransportAddress) {
      return absl::InvalidArgumentError(
          fmt::format("entry {} of the coordinator's roster is out of order or too long", rank));
    }
    const auto* begin = reinterpret_cast<const std::byte*>(in.transport_address().data());
    roster.ranks.push_back({rank, in.host(), in.pid(), {begin, begin + in.transport_address().size()}});
  }
  return roster;
}

}  // namespace tensorfold
