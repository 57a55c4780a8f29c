#include "transport/join/identity.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "transport/base/communicator.h"

namespace tensorfold {
namespace {

constexpr size_t kShownValue = 1024;

std::string shown(std::string_view value) {
  return value.empty() ? std::string("(none)") : fmt::format("'{}'", printable(value, kShownValue));
}

std::string shown(uint32_t value) { return std::to_string(value); }

/// Collects "what: coordinator has A, rank r has B".
class Differences {
 public:
  explicit Differences(uint32_t joining) : joining_(joining) {}

  template <typename T>
  void compare(std::string_view what, const T& coordinator, const T& joining) {
    if (coordinator == joining) return;
    add(fmt::format("{}: the coordinator has {}, rank {} has {}", what, shown(coordinator), joining_, shown(joining)));
  }
  void add(std::string text) { texts_.push_back(std::move(text)); }
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  uint32_t joining_;
  std::vector<std::string> texts_;
};

absl::Status check_length(std::string_view what, size_t length, size_t limit) {
  if (length <= limit) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format("{} has {} bytes; at most {} are allowed", what, length, limit));
}

}  // namespace

std::string printable(std::string_view text, size_t limit) {
  std::string out;
  for (const char c : text) {
    if (out.size() >= limit) return out + "...";
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out.push_back(c);
    } else {
      out += fmt::format("\\x{:02x}", byte);
    }
  }
  return out;
}

std::string RankIdentity::label() const {
  return fmt::format("rank {} (host {}, pid {})", rank, host.empty() ? "unnamed" : printable(host, kMaxHostLabel), pid);
}

absl::Status validate_identity(const RankIdentity& identity) {
  const struct {
    std::string_view what;
    size_t length;
    size_t limit;
  } fields[] = {
      {"build", identity.build.size(), kMaxHashText},
      {"numeric fingerprint", identity.fingerprint.size(), kMaxHashText},
      {"checkpoint hash", identity.checkpoint.size(), kMaxHashText},
      {"profile hash", identity.profile.size(), kMaxHashText},
      {"slice plan", identity.slices.size(), kMaxSliceText},
      {"host label", identity.host.size(), kMaxHostLabel},
      {"transport name", identity.transport.size(), kMaxTransportName},
      {"transport address", identity.address.size(), kMaxTransportAddress},
  };
  for (const auto& field : fields) {
    if (absl::Status status = check_length(field.what, field.length, field.limit); !status.ok()) return status;
  }
  if (identity.world < 1 || identity.world > static_cast<uint32_t>(kMaxWorld)) {
    return absl::InvalidArgumentError(
        fmt::format("a world of {} ranks; 1 to {} are possible", identity.world, kMaxWorld));
  }
  return absl::OkStatus();
}

absl::Status check_join(const RankIdentity& coordinator, const RankIdentity& joining) {
  Differences differences(joining.rank);
  differences.compare("protocol version", coordinator.protocol, joining.protocol);
  differences.compare("build", coordinator.build, joining.build);
  differences.compare("numeric fingerprint", coordinator.fingerprint, joining.fingerprint);
  differences.compare("checkpoint hash", coordinator.checkpoint, joining.checkpoint);
  differences.compare("profile hash", coordinator.profile, joining.profile);
  differences.compare("slice plan", coordinator.slices, joining.slices);
  differences.compare("world", coordinator.world, joining.world);
  differences.compare("transport", coordinator.transport, joining.transport);
  if (joining.rank == coordinator.rank) {
    differences.add(fmt::format("rank: {} is the coordinator itself", coordinator.label()));
  } else if (joining.rank >= coordinator.world) {
    differences.add(fmt::format("rank: rank {} is outside the coordinator's world of {} (ranks 0 to {})", joining.rank,
                                coordinator.world, coordinator.world - 1));
  }
  if (differences.texts().empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(fmt::format("{} may not join the cluster of {}: {}", joining.label(),
                                                   coordinator.label(), fmt::join(differences.texts(), "; ")));
}

}  // namespace tensorfold
