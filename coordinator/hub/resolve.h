// Host names to addresses, with a deadline: the system's resolver has none that a caller could set.
#pragma once

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tensorfold {

using ResolvedAddress = std::string;  // "192.0.2.1", "2001:db8::1", with scope if it has one

/// Addresses of a host, or of an address written out. Unavailable when there are none or `until` passes, Cancelled when
/// `stop` (may be null) becomes true. A lookup that outlasts its caller ends by itself on a thread of its own.
absl::StatusOr<std::vector<ResolvedAddress>> resolve_host(const std::string& host,
                                                          std::chrono::steady_clock::time_point until,
                                                          const std::atomic<bool>* stop);

}  // namespace tensorfold
