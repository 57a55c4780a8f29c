// Checks the keys that clients send against the hashes that the profile holds. Immutable, any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tensorfold {

class ApiKeys {
 public:
  ApiKeys() = default;  // no keys: everybody is served
  /// `hashes`: SHA-256 in hex, 64 digits each. InvalidArgument for anything else.
  static absl::StatusOr<ApiKeys> parse(const std::vector<std::string>& hashes);

  bool required() const { return !hashes_.empty(); }
  /// Whether an Authorization header's value ("Bearer KEY") holds one of the keys; true when none are required. Hashes
  /// are compared in constant time, all of them, so that the time tells nothing about how near a guess was.
  bool allows(std::string_view authorization) const { return !required() || holds(authorization); }
  /// The same, but false when there are no keys.
  bool holds(std::string_view authorization) const;

 private:
  using Hash = std::array<uint8_t, 32>;
  std::vector<Hash> hashes_;
};

}  // namespace tensorfold
