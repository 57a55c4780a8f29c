// A UCX worker address as it travels between ranks. UCX itself does not check the addresses that it is given.
//
//   "TFUX" | UCX major, u8 | UCX minor, u8 | 2 zero bytes | XXH3-64 of UCX's bytes, little endian | UCX's bytes
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tensorfold {

inline constexpr size_t kMaxUcxAddress = size_t{64} << 10;

std::vector<std::byte> wrap_ucx_address(std::span<const std::byte> ucx_bytes);

// UCX's bytes within `address`, or FailedPrecondition (another UCX release; both named) or InvalidArgument (damaged).
// `owner` names the rank in messages.
absl::StatusOr<std::span<const std::byte>> unwrap_ucx_address(std::span<const std::byte> address,
                                                              std::string_view owner);

}  // namespace tensorfold
