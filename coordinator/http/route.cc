#include "coordinator/http/route.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace tensorfold {
namespace {

struct Entry {
  Endpoint endpoint;
  std::string_view path;
  std::string_view allowed;
};

constexpr std::string_view kGet = "GET, HEAD, OPTIONS";
constexpr std::string_view kGetPost = "GET, HEAD, POST, OPTIONS";
constexpr std::string_view kPost = "POST, OPTIONS";
constexpr std::string_view kModelPrefix = "/v1/models/";

// In the order of Endpoint.
constexpr std::array<Entry, 11> kEntries = {{
    {Endpoint::kChat, "/v1/chat/completions", kPost},
    {Endpoint::kCompletions, "/v1/completions", kPost},
    {Endpoint::kModels, "/v1/models", kGet},
    {Endpoint::kModel, "/v1/models/{id}", kGet},
    {Endpoint::kTokenize, "/tokenize", kPost},
    {Endpoint::kDetokenize, "/detokenize", kPost},
    {Endpoint::kHealth, "/health", kGet},
    {Endpoint::kReady, "/ready", kGet},
    {Endpoint::kMetrics, "/metrics", kGet},
    {Endpoint::kStates, "/admin/states", kGetPost},
    {Endpoint::kUnknown, "other", ""},
}};

const Entry& entry_of(Endpoint endpoint) { return kEntries[static_cast<size_t>(endpoint)]; }

int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char lower = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

std::string percent_decoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && hex_value(text[i + 1]) >= 0 && hex_value(text[i + 2]) >= 0) {
      out.push_back(static_cast<char>(hex_value(text[i + 1]) * 16 + hex_value(text[i + 2])));
      i += 2;
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

bool lists_method(std::string_view allowed, std::string_view method) {
  for (size_t at = 0; at < allowed.size();) {
    const size_t end = std::min(allowed.find(", ", at), allowed.size());
    if (allowed.substr(at, end - at) == method) return true;
    at = end + 2;
  }
  return false;
}

// application/json and application/*+json, with any parameters. Left out: taken as JSON.
bool is_json_type(std::string_view content_type) {
  std::string type(content_type.substr(0, content_type.find(';')));
  type.erase(std::remove_if(type.begin(), type.end(), [](unsigned char c) { return std::isspace(c) != 0; }),
             type.end());
  std::transform(type.begin(), type.end(), type.begin(), [](unsigned char c) { return std::tolower(c); });
  return type.empty() || type == "application/json" || type == "text/json" ||
         (type.starts_with("application/") && type.ends_with("+json"));
}

}  // namespace

std::string_view endpoint_name(Endpoint endpoint) { return entry_of(endpoint).path; }
std::string_view allowed_methods(Endpoint endpoint) { return entry_of(endpoint).allowed; }
bool endpoint_generates(Endpoint endpoint) { return endpoint == Endpoint::kChat || endpoint == Endpoint::kCompletions; }
bool endpoint_is_open(Endpoint endpoint) { return endpoint == Endpoint::kHealth || endpoint == Endpoint::kReady; }

Route find_route(std::string_view target, bool metrics_enabled) {
  std::string_view path = target.substr(0, target.find('?'));
  for (const Entry& entry : kEntries) {
    if (path != entry.path || entry.endpoint == Endpoint::kModel || entry.endpoint == Endpoint::kUnknown) continue;
    if (entry.endpoint == Endpoint::kMetrics && !metrics_enabled) break;
    return {entry.endpoint, ""};
  }
  if (path.size() > kModelPrefix.size() && path.starts_with(kModelPrefix)) {
    return {Endpoint::kModel, percent_decoded(path.substr(kModelPrefix.size()))};
  }
  return {};
}

std::optional<ApiError> check_head(const RequestHead& head, Endpoint endpoint) {
  const std::string path = loggable_path(head.target);
  const std::string_view allowed = allowed_methods(endpoint);
  if (head.method != "OPTIONS" && !head.authorized && !endpoint_is_open(endpoint)) return unauthorized_error();
  if (endpoint == Endpoint::kUnknown) return unknown_url_error(head.method, path);
  if (!lists_method(allowed, head.method)) return method_not_allowed_error(head.method, path, allowed);
  if (head.method == "POST" && !is_json_type(head.content_type)) {
    return unsupported_media_type_error(head.content_type);
  }
  return std::nullopt;
}

std::string loggable_path(std::string_view target) {
  std::string out(target.substr(0, std::min<size_t>(target.find('?'), 128)));
  for (char& c : out) {
    if (c < 0x21 || c > 0x7E) c = '?';
  }
  return out;
}

}  // namespace tensorfold
