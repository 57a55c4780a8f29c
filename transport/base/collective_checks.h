// Checks of an operation's arguments, the same for every transport. Errors are InvalidArgument and name the operation.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace tensorfold {

// rank and world in range, one label a rank.
absl::Status check_membership(int rank, int world, const std::vector<std::string>& labels);

absl::Status check_root(std::string_view operation, int root, int world);

// `sizes` has `world` entries whose sum is `bytes`; `what` names the buffer.
absl::Status check_pieces(std::string_view operation, std::string_view what, std::span<const size_t> sizes, int world,
                          size_t bytes);

}  // namespace tensorfold
