// Any bytes as a profile: no crash, no hang; what parses must hash and explain itself.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "coordinator/profile/profile.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto profile = tensorfold::parse_profile(text, "profiles/fuzz.yaml");
  if (profile.ok()) {
    if (tensorfold::profile_hash(*profile).size() != 64) std::abort();
    if (!tensorfold::explain_profile(*profile).ok()) std::abort();
  } else if (profile.status().message().empty()) {
    std::abort();
  }
  return 0;
}
