#include "coordinator/hub/url.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace tensorfold {
namespace {

constexpr size_t kMaxUrl = 16 << 10;

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; }

absl::Status bad(std::string_view why) {
  return absl::InvalidArgumentError(fmt::format("not an address of the form http[s]://host[:port][/path]: {}", why));
}

absl::Status parse_authority(std::string_view text, Url& url) {
  if (text.find('@') != std::string_view::npos) return bad("it holds a user name or password");
  std::string_view port;
  bool has_port = false;
  if (text.starts_with('[')) {
    const size_t close = text.find(']');
    if (close == std::string_view::npos) return bad("no ']' after the IPv6 address");
    url.host = text.substr(1, close - 1);
    const std::string_view rest = text.substr(close + 1);
    if (!rest.empty() && rest.front() != ':') return bad("something follows the ']'");
    has_port = !rest.empty();
    if (has_port) port = rest.substr(1);
  } else {
    const size_t colon = text.find(':');
    url.host = text.substr(0, colon);
    has_port = colon != std::string_view::npos;
    if (has_port) port = text.substr(colon + 1);
  }
  std::transform(url.host.begin(), url.host.end(), url.host.begin(), lower);
  if (url.host.empty() || url.host.size() > 253) return bad("no host, or one of more than 253 characters");
  for (const char c : url.host) {
    const bool good = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '.' || c == '_' || c == ':';
    if (!good) return bad("a character that no host name has");
  }
  url.port = url.tls ? 443 : 80;
  if (has_port) {
    unsigned value = 0;
    const auto [end, ec] = std::from_chars(port.data(), port.data() + port.size(), value);
    if (ec != std::errc() || end != port.data() + port.size() || value == 0 || value > 65535) {
      return bad("the port is no number from 1 to 65535");
    }
    url.port = static_cast<uint16_t>(value);
  }
  return absl::OkStatus();
}

}  // namespace

std::string Url::authority() const {
  const std::string name = host.find(':') != std::string::npos ? fmt::format("[{}]", host) : host;
  return port == (tls ? 443 : 80) ? name : fmt::format("{}:{}", name, port);
}

absl::StatusOr<Url> parse_url(std::string_view text) {
  if (text.size() > kMaxUrl) return bad("more than 16 KiB");
  for (const char c : text) {
    if (static_cast<unsigned char>(c) <= 0x20 || c == 0x7F) return bad("a space or control character");
  }
  Url url;
  const size_t colon = text.find("://");
  if (colon == std::string_view::npos) return bad("no '://'");
  std::string scheme(text.substr(0, colon));
  std::transform(scheme.begin(), scheme.end(), scheme.begin(), lower);
  if (scheme != "http" && scheme != "https") return bad("the scheme is neither http nor https");
  url.tls = scheme == "https";
  std::string_view rest = text.substr(colon + 3);
  rest = rest.substr(0, rest.find('#'));
  const size_t path = rest.find_first_of("/?");
  if (absl::Status status = parse_authority(rest.substr(0, path), url); !status.ok()) return status;
  if (path != std::string_view::npos) {
    url.target = fmt::format("{}{}", rest[path] == '?' ? "/" : "", rest.substr(path));
  }
  return url;
}

absl::StatusOr<Url> resolve_location(const Url& base, std::string_view location) {
  if (location.starts_with("//")) return parse_url((base.tls ? "https:" : "http:") + std::string(location));
  if (location.starts_with("/")) {
    return parse_url(fmt::format("{}://{}{}", base.tls ? "https" : "http", base.authority(), location));
  }
  return parse_url(location);
}

std::string percent_encode(std::string_view text, bool keep_slash) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
                       c == '.' || c == '_' || c == '~' || (keep_slash && c == '/');
    if (plain) {
      out += c;
    } else {
      out += fmt::format("%{:02X}", static_cast<unsigned>(static_cast<unsigned char>(c)));
    }
  }
  return out;
}

}  // namespace tensorfold
