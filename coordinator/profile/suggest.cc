#include "coordinator/profile/suggest.h"

#include <algorithm>

#include "coordinator/profile/options.h"

namespace tensorfold {

// Optimal string alignment distance (Damerau-Levenshtein without edits inside a swap), three rows at a time.
int edit_distance(std::string_view a, std::string_view b) {
  constexpr size_t kLongest = 64;
  a = a.substr(0, kLongest);
  b = b.substr(0, kLongest);
  std::vector<int> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates) {
  std::string nearest;
  int least = std::max<int>(1, static_cast<int>(name.size()) / 3) + 1;
  for (const std::string& candidate : candidates) {
    const int distance = edit_distance(name, candidate);
    // As many edits as the candidate has letters is no likeness at all.
    if (distance < least && distance < static_cast<int>(candidate.size())) {
      least = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

std::string suggest_profile_key(std::string_view path) {
  const size_t dot = path.rfind('.');
  const std::string_view section = dot == std::string_view::npos ? std::string_view() : path.substr(0, dot);
  const std::string_view name = dot == std::string_view::npos ? path : path.substr(dot + 1);
  std::vector<std::string> siblings, leaves, leaf_paths;
  const auto sort_in = [&](const std::string& key) {
    const size_t split = key.rfind('.');
    const std::string leaf = split == std::string::npos ? key : key.substr(split + 1);
    const std::string_view parent =
        split == std::string::npos ? std::string_view() : std::string_view(key).substr(0, split);
    if (parent == section) siblings.push_back(leaf);
    leaves.push_back(leaf);
    leaf_paths.push_back(key);
  };
  for (const ProfileSection& each : profile_sections()) sort_in(each.key);
  for (const ProfileOption& each : profile_options()) sort_in(each.key);
  const auto path_of = [&](const std::string& leaf) -> std::string {
    const auto found = std::find(leaves.begin(), leaves.end(), leaf);
    return found == leaves.end() ? "" : leaf_paths[found - leaves.begin()];
  };
  // Just right but in another section beats nearly right in this one: world at the top is cluster.world.
  if (const std::string exact = path_of(std::string(name)); !exact.empty()) return exact;
  if (const std::string sibling = nearest_name(name, siblings); !sibling.empty()) {
    return section.empty() ? sibling : std::string(section) + "." + sibling;
  }
  return path_of(nearest_name(name, leaves));
}

}  // namespace tensorfold
