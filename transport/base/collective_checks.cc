#include "transport/base/collective_checks.h"

#include <fmt/format.h>

#include "transport/base/communicator.h"

namespace tensorfold {

absl::Status check_membership(int rank, int world, const std::vector<std::string>& labels) {
  if (world < 1 || world > kMaxWorld) {
    return absl::InvalidArgumentError(fmt::format("a world of {} ranks; 1 to {} are possible", world, kMaxWorld));
  }
  if (rank < 0 || rank >= world) {
    return absl::InvalidArgumentError(fmt::format("rank {} is not in a world of {}", rank, world));
  }
  if (labels.size() != static_cast<size_t>(world)) {
    return absl::InvalidArgumentError(fmt::format("{} host labels for a world of {}", labels.size(), world));
  }
  return absl::OkStatus();
}

absl::Status check_root(std::string_view operation, int root, int world) {
  if (root < 0 || root >= world) {
    return absl::InvalidArgumentError(fmt::format("{}: root {} is not in a world of {}", operation, root, world));
  }
  return absl::OkStatus();
}

absl::Status check_pieces(std::string_view operation, std::string_view what, std::span<const size_t> sizes, int world,
                          size_t bytes) {
  if (sizes.size() != static_cast<size_t>(world)) {
    return absl::InvalidArgumentError(
        fmt::format("{}: {} sizes of {} pieces for a world of {}", operation, what, sizes.size(), world));
  }
  size_t left = bytes;
  for (size_t size : sizes) {
    if (size > left) {
      return absl::InvalidArgumentError(
          fmt::format("{}: the pieces of {} are larger than its {} bytes", operation, what, bytes));
    }
    left -= size;
  }
  if (left != 0) {
    return absl::InvalidArgumentError(
        fmt::format("{}: the pieces of {} are {} bytes, the buffer is {}", operation, what, bytes - left, bytes));
  }
  return absl::OkStatus();
}

}  // namespace tensorfold
