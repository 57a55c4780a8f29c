#include "coordinator/hub/hub_api.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/json/parse.hpp>
#include <boost/json/value.hpp>
#include <optional>

#include "coordinator/hub/file_names.h"

namespace tensorfold {
namespace {

namespace json = boost::json;

constexpr uint64_t kMaxReply = 16u << 20;
constexpr size_t kMaxFiles = 10000;
constexpr int kMaxPages = 200;
constexpr uint64_t kMaxFileBytes = uint64_t{4} << 40;
constexpr char kDefaultRevision[] = "main";

bool is_hex(std::string_view text, size_t digits) {
  return text.size() == digits &&
         std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool good_name_part(std::string_view part) {
  return !part.empty() && part.size() <= 96 && part.front() != '.' && part.find("..") == std::string_view::npos &&
         std::all_of(part.begin(), part.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
                  c == '-';
         });
}

absl::StatusOr<json::value> parse(std::string_view text, const std::string& label) {
  json::parse_options options;
  options.max_depth = 16;
  json::error_code error;
  json::value value = json::parse({text.data(), text.size()}, error, {}, options);
  if (error) return absl::InvalidArgumentError(fmt::format("{}: no JSON: {}", label, error.message()));
  return value;
}

std::string_view string_at(const json::object& object, const char* key) {
  const json::value* value = object.if_contains(key);
  if (value == nullptr || !value->is_string()) return {};
  return {value->get_string().data(), value->get_string().size()};
}

std::optional<uint64_t> size_at(const json::object& object) {
  const json::value* value = object.if_contains("size");
  if (value == nullptr) return std::nullopt;
  if (value->is_uint64()) return value->get_uint64();
  if (value->is_int64() && value->get_int64() >= 0) return static_cast<uint64_t>(value->get_int64());
  return std::nullopt;
}

absl::Status parse_entry(const json::object& entry, const std::string& label, std::vector<HubFile>& files) {
  if (string_at(entry, "type") != "file") return absl::OkStatus();  // a folder
  HubFile file;
  file.path = std::string(string_at(entry, "path"));
  if (absl::Status status = check_path(file.path); !status.ok()) {
    return absl::InvalidArgumentError(fmt::format("{}: {}; nothing is fetched", label, std::string(status.message())));
  }
  const json::value* lfs = entry.if_contains("lfs");
  std::optional<uint64_t> size = size_at(entry);
  if (lfs != nullptr && lfs->is_object()) {
    file.sha256 = std::string(string_at(lfs->get_object(), "oid"));
    if (file.sha256.starts_with("sha256:")) file.sha256.erase(0, 7);
    if (!is_hex(file.sha256, 64)) {
      return absl::InvalidArgumentError(fmt::format("{}: no sha256 of the large file {}", label, shown(file.path)));
    }
    // The size beside it may be that of the pointer.
    if (const std::optional<uint64_t> large = size_at(lfs->get_object())) size = large;
  } else if (is_hex(string_at(entry, "oid"), 40)) {
    file.git_blob = std::string(string_at(entry, "oid"));
  }
  if (!size || *size > kMaxFileBytes) {
    return absl::InvalidArgumentError(
        fmt::format("{}: {} {}", label, shown(file.path),
                    size ? fmt::format("has {} bytes; allowed are {}", *size, kMaxFileBytes) : "has no size"));
  }
  file.size = *size;
  if (files.size() >= kMaxFiles) {
    return absl::InvalidArgumentError(
        fmt::format("{}: more than {} files, which is the most allowed", label, kMaxFiles));
  }
  files.push_back(std::move(file));
  return absl::OkStatus();
}

// The address of rel="next" in a Link header: <https://…>; rel="next".
std::string next_page(std::string_view link) {
  while (!link.empty()) {
    const size_t open = link.find('<');
    const size_t close = link.find('>', open == std::string_view::npos ? 0 : open);
    if (open == std::string_view::npos || close == std::string_view::npos) return {};
    const std::string_view rest = link.substr(close + 1);
    const std::string_view parameters = rest.substr(0, rest.find('<'));
    if (parameters.find("rel=\"next\"") != std::string_view::npos) {
      return std::string(link.substr(open + 1, close - open - 1));
    }
    link = rest;
  }
  return {};
}

absl::StatusOr<std::string> find_commit(HubFetcher& fetcher, const HubRepository& repository) {
  const std::string what = fmt::format("{} at revision {}", repository.name, shown(repository.revision));
  const Url url = fetcher.url(
      fmt::format("/api/models/{}/revision/{}", repository.name, percent_encode(repository.revision, false)));
  absl::StatusOr<std::string> text = fetcher.text(url, what, kMaxReply, nullptr);
  if (!text.ok()) return text.status();
  absl::StatusOr<json::value> info = parse(*text, what);
  if (!info.ok()) return info.status();
  const std::string_view commit = info->is_object() ? string_at(info->get_object(), "sha") : std::string_view();
  if (!is_hex(commit, 40) && !is_hex(commit, 64)) {
    return absl::InvalidArgumentError(
        fmt::format("{}: {} does not say which commit that is: is it a hub of models?", what, url.authority()));
  }
  return std::string(commit);
}

}  // namespace

absl::StatusOr<HubRepository> parse_repository(std::string_view text) {
  HubRepository repository;
  const size_t at = text.find('@');
  repository.name = text.substr(0, at);
  repository.revision = at == std::string_view::npos ? kDefaultRevision : std::string(text.substr(at + 1));
  const std::string_view name = repository.name;
  const size_t slash = name.find('/');
  const bool good = slash == std::string_view::npos
                        ? good_name_part(name)
                        : good_name_part(name.substr(0, slash)) && good_name_part(name.substr(slash + 1));
  if (!good) {
    return absl::InvalidArgumentError(fmt::format(
        "{} names no repository; allowed: OWNER/NAME or NAME of letters, digits, '.', '_' and '-', then @REVISION",
        shown(text)));
  }
  const bool good_revision =
      !repository.revision.empty() && repository.revision.size() <= 200 &&
      std::all_of(repository.revision.begin(), repository.revision.end(), [](char c) { return c > 0x20 && c < 0x7F; });
  if (!good_revision) {
    return absl::InvalidArgumentError(fmt::format("{}: after '@' must stand a branch, a tag or a commit", shown(text)));
  }
  return repository;
}

absl::Status parse_tree_page(std::string_view text, const std::string& label, std::vector<HubFile>& files) {
  absl::StatusOr<json::value> page = parse(text, label);
  if (!page.ok()) return page.status();
  if (!page->is_array()) return absl::InvalidArgumentError(fmt::format("{}: the list of files is no list", label));
  for (const json::value& entry : page->get_array()) {
    if (!entry.is_object()) return absl::InvalidArgumentError(fmt::format("{}: an entry is no object", label));
    if (absl::Status status = parse_entry(entry.get_object(), label, files); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<HubListing> list_repository(HubFetcher& fetcher, const HubRepository& repository) {
  absl::StatusOr<std::string> commit = find_commit(fetcher, repository);
  if (!commit.ok()) return commit.status();
  HubListing listing;
  listing.commit = *commit;
  const std::string what = fmt::format("the list of files of {}", repository.name);
  Url url = fetcher.url(fmt::format("/api/models/{}/tree/{}?recursive=true", repository.name, *commit));
  for (int page = 0;; ++page) {
    if (page == kMaxPages) return absl::InvalidArgumentError(fmt::format("{}: more than {} pages", what, kMaxPages));
    std::string link;
    absl::StatusOr<std::string> text = fetcher.text(url, what, kMaxReply, &link);
    if (!text.ok()) return text.status();
    if (absl::Status status = parse_tree_page(*text, what, listing.files); !status.ok()) return status;
    const std::string next = next_page(link);
    if (next.empty()) break;
    absl::StatusOr<Url> next_url = resolve_location(url, next);
    if (!next_url.ok() || !next_url->same_origin(url)) {
      return absl::InvalidArgumentError(fmt::format("{}: its next page is not on {}", what, url.authority()));
    }
    url = *next_url;
  }
  std::sort(listing.files.begin(), listing.files.end(),
            [](const HubFile& a, const HubFile& b) { return a.path < b.path; });
  const auto twice = std::adjacent_find(listing.files.begin(), listing.files.end(),
                                        [](const HubFile& a, const HubFile& b) { return a.path == b.path; });
  if (twice != listing.files.end()) {
    return absl::InvalidArgumentError(fmt::format("{}: {} stands in it twice", what, shown(twice->path)));
  }
  return listing;
}

std::string content_target(const HubRepository& repository, const std::string& commit, const std::string& path) {
  return fmt::format("/{}/resolve/{}/{}", repository.name, commit, percent_encode(path, true));
}

}  // namespace tensorfold
