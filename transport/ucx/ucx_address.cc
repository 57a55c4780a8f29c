#include "transport/ucx/ucx_address.h"

#include <fmt/format.h>
#include <ucp/api/ucp.h>
#include <xxhash.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

namespace tensorfold {
namespace {

constexpr std::array<char, 4> kMagic = {'T', 'F', 'U', 'X'};
constexpr size_t kHeader = 16;

struct Release {
  unsigned major = 0;
  unsigned minor = 0;
};

Release our_release() {
  Release release;
  unsigned patch = 0;
  ucp_get_version(&release.major, &release.minor, &patch);
  return release;
}

uint64_t checksum(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

}  // namespace

std::vector<std::byte> wrap_ucx_address(std::span<const std::byte> ucx_bytes) {
  std::vector<std::byte> address(kHeader);
  std::memcpy(address.data(), kMagic.data(), kMagic.size());
  const Release release = our_release();
  address[4] = static_cast<std::byte>(release.major);
  address[5] = static_cast<std::byte>(release.minor);
  const uint64_t sum = checksum(ucx_bytes);
  for (int i = 0; i < 8; ++i) address[8 + i] = static_cast<std::byte>(sum >> (8 * i));
  address.insert(address.end(), ucx_bytes.begin(), ucx_bytes.end());
  return address;
}

absl::StatusOr<std::span<const std::byte>> unwrap_ucx_address(std::span<const std::byte> address,
                                                              std::string_view owner) {
  if (address.size() <= kHeader || address.size() > kMaxUcxAddress ||
      std::memcmp(address.data(), kMagic.data(), kMagic.size()) != 0) {
    return absl::InvalidArgumentError(fmt::format(
        "connect: the {} bytes given as address of {} are not a UCX address of ours", address.size(), owner));
  }
  const Release ours = our_release();
  const auto major = static_cast<unsigned>(address[4]);
  const auto minor = static_cast<unsigned>(address[5]);
  if (major != ours.major || minor != ours.minor) {
    return absl::FailedPreconditionError(
        fmt::format("connect: {} has UCX {}.{}, this rank has {}.{}; all ranks need the same release", owner, major,
                    minor, ours.major, ours.minor));
  }
  const std::span<const std::byte> ucx_bytes = address.subspan(kHeader);
  uint64_t sum = 0;
  for (int i = 0; i < 8; ++i) sum |= static_cast<uint64_t>(address[8 + i]) << (8 * i);
  if (sum != checksum(ucx_bytes)) {
    return absl::InvalidArgumentError(fmt::format("connect: the address of {} arrived damaged", owner));
  }
  return ucx_bytes;
}

}  // namespace tensorfold
