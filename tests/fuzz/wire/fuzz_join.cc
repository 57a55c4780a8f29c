// Any protobuf message as what a rank says of itself, and as the roster that rank 0 sends: an error, or values within
// their bounds whose refusal can be printed.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "coordinator/cluster/wire.h"
#include "worker/member/wire.h"

namespace {

void check_printable(const std::string& text) {
  for (const char c : text) {
    if (c < 0x20 || c > 0x7E) abort();
  }
}

void try_identity(const std::string& bytes) {
  tensorfold::v1::Identity wire;
  if (!wire.ParseFromString(bytes)) return;
  const auto identity = tensorfold::identity_from_wire(wire);
  if (!identity.ok()) return;
  if (!tensorfold::validate_identity(*identity).ok()) abort();
  tensorfold::RankIdentity self;
  self.build = "build";
  self.world = 2;
  const absl::Status joined = tensorfold::check_join(self, *identity);
  if (!joined.ok()) check_printable(std::string(joined.message()));
  tensorfold::v1::Identity again;
  tensorfold::identity_to_wire(*identity, &again);
  const auto back = tensorfold::identity_from_wire(again);
  if (!back.ok() || back->address != identity->address || back->slices != identity->slices) abort();
}

void try_roster(const std::string& bytes) {
  tensorfold::v1::Roster wire;
  if (!wire.ParseFromString(bytes)) return;
  for (uint32_t world = 1; world <= 8; ++world) {
    const auto roster = tensorfold::roster_from_wire(wire, world);
    if (roster.ok() && (roster->ranks.size() != world || roster->epoch == 0)) abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  (data[0] & 1) == 0 ? try_identity(bytes) : try_roster(bytes);
  return 0;
}
