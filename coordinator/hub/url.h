// http and https addresses: only what a client of a hub needs of RFC 3986.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace tensorfold {

struct Url {
  bool tls = false;
  std::string host;  // without brackets, also for IPv6
  uint16_t port = 0;
  std::string target = "/";  // path and query, as it goes on the wire

  /// Scheme, host and port are those of `other`: only then may it see what `other` sees.
  bool same_origin(const Url& other) const { return tls == other.tls && host == other.host && port == other.port; }
  /// "host" or "host:port", for the Host header and for messages; a path may hold a signature and is never shown.
  std::string authority() const;
};

/// Parses "http[s]://host[:port][/path]". InvalidArgument saying what is wrong: another scheme, a user name in it,
/// spaces or control characters, more than 16 KiB.
absl::StatusOr<Url> parse_url(std::string_view text);

/// Where a Location header leads from `base`: an absolute address, one without scheme, or an absolute path.
absl::StatusOr<Url> resolve_location(const Url& base, std::string_view location);

/// Percent-encodes everything but letters, digits and "-._~", and '/' only if `keep_slash`.
std::string percent_encode(std::string_view text, bool keep_slash);

}  // namespace tensorfold
