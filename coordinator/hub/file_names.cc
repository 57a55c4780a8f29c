#include "coordinator/hub/file_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/value.hpp>

namespace tensorfold {
namespace {

constexpr size_t kMaxShards = 4096;
constexpr uint64_t kMaxCompanion = 64u << 20;

absl::StatusOr<boost::json::object> parse_object(std::string_view text, const std::string& label) {
  boost::json::parse_options options;
  options.max_depth = 16;
  boost::json::error_code error;
  boost::json::value value = boost::json::parse({text.data(), text.size()}, error, {}, options);
  if (error) return absl::InvalidArgumentError(fmt::format("{}: no JSON: {}", label, error.message()));
  if (!value.is_object()) return absl::InvalidArgumentError(fmt::format("{}: no JSON object", label));
  return std::move(value.get_object());
}

}  // namespace

std::string shown(std::string_view name) {
  constexpr size_t kShown = 80;
  std::string out = "'";
  for (const char c : name.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned>(byte));
    } else {
      out += c;
    }
  }
  return out + (name.size() > kShown ? "...'" : "'");
}

absl::Status check_path(std::string_view path) {
  const auto bad = [&](std::string_view why) {
    return absl::InvalidArgumentError(fmt::format("the file name {} is refused: {}", shown(path), why));
  };
  if (path.empty() || path.size() > 1024) return bad("empty, or more than 1024 bytes");
  for (const char c : path) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) return bad("it holds a control character");
    if (c == '\\') return bad("it holds a backslash");
  }
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string_view part = path.substr(begin, end - begin);
    if (part.empty() || part == "." || part == "..") return bad("it would leave the folder");
    if (part.size() > 255) return bad("a part of it has more than 255 bytes");
    begin = end + 1;
  }
  return absl::OkStatus();
}

bool is_companion(std::string_view path, uint64_t size) {
  if (path.find('/') != std::string_view::npos || path.front() == '.' || size > kMaxCompanion) return false;
  constexpr std::array<std::string_view, 6> kEndings = {".json", ".jinja", ".txt", ".model", ".md", ".tiktoken"};
  if (path == "LICENSE" || path == "NOTICE" || path == "LICENCE") return true;
  // Indexes of formats that are not read; our own is asked for by name.
  if (path.ends_with(".index.json")) return false;
  return std::any_of(kEndings.begin(), kEndings.end(), [&](std::string_view ending) { return path.ends_with(ending); });
}

absl::StatusOr<std::map<std::string, std::string>> parse_weight_map(std::string_view text, const std::string& label) {
  absl::StatusOr<boost::json::object> index = parse_object(text, label);
  if (!index.ok()) return index.status();
  const boost::json::value* map = index->if_contains("weight_map");
  if (map == nullptr || !map->is_object() || map->get_object().empty()) {
    return absl::InvalidArgumentError(fmt::format("{}: no object weight_map with anything in it", label));
  }
  std::map<std::string, std::string> weights;
  std::set<std::string> shards;
  for (const auto& entry : map->get_object()) {
    const std::string tensor(entry.key().data(), entry.key().size());
    std::string file;
    if (entry.value().is_string()) file.assign(entry.value().get_string().data(), entry.value().get_string().size());
    const bool good = file.ends_with(".safetensors") && file.find('/') == std::string::npos && file.front() != '.' &&
                      check_path(file).ok();
    if (!good) {
      return absl::InvalidArgumentError(
          fmt::format("{}: tensor {} should be in {}; allowed: the name of a .safetensors file, without a path", label,
                      shown(tensor), shown(file)));
    }
    shards.insert(file);
    weights.emplace(tensor, std::move(file));
  }
  if (shards.size() > kMaxShards) {
    return absl::InvalidArgumentError(fmt::format("{}: {} shards; allowed are {}", label, shards.size(), kMaxShards));
  }
  return weights;
}

absl::StatusOr<std::string> reduce_index(std::string_view text, const std::set<std::string>& shards) {
  absl::StatusOr<boost::json::object> index = parse_object(text, kIndexFile);
  if (!index.ok()) return index.status();
  boost::json::object kept;
  const boost::json::value* map = index->if_contains("weight_map");
  if (map == nullptr || !map->is_object()) return absl::InvalidArgumentError("no object weight_map");
  for (const auto& entry : map->get_object()) {
    if (!entry.value().is_string()) continue;
    const boost::json::string& file = entry.value().get_string();
    if (shards.contains(std::string(file.data(), file.size()))) kept.insert(entry);
  }
  (*index)["weight_map"] = std::move(kept);
  return boost::json::serialize(*index);
}

}  // namespace tensorfold
