#include "coordinator/profile/profile.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "coordinator/profile/document.h"
#include "coordinator/profile/options.h"
#include "coordinator/profile/rules.h"
#include "coordinator/profile/suggest.h"
#include "coordinator/profile/values.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

// Walks the YAML tree and fills a Profile.
class Reader {
 public:
  Reader(const std::string& origin, Profile* profile, std::vector<ProfileError>* errors)
      : folder_(std::filesystem::path(origin).parent_path()), profile_(profile), errors_(errors) {}

  void read_map(const std::string& prefix, const YamlNode& node) {
    for (size_t i = 0; i < node.keys.size(); ++i) {
      const YamlKey& key = node.keys[i];
      const std::string path = prefix.empty() ? key.text : prefix + "." + key.text;
      if (is_profile_section(path)) {
        read_section(path, key, node.items[i]);
      } else if (const int index = find_profile_option(path); index >= 0) {
        read_option(index, key, node.items[i]);
      } else {
        report_unknown(path, key);
      }
    }
  }

  // Keys with errors, and the ones that unknown keys probably meant: rules do not judge them.
  std::set<std::string>& refused() { return refused_; }

 private:
  void read_section(const std::string& path, const YamlKey& key, const YamlNode& node) {
    if (node.kind == YamlNode::Kind::kMap) return read_map(path, node);
    // A section whose options are all commented out is an empty one.
    if (node.kind == YamlNode::Kind::kNull || node.kind == YamlNode::Kind::kRefused) return;
    errors_->push_back({key.at, path, "wrong type", found_text(node), "a section: its options, indented below it", ""});
  }

  void read_option(int index, const YamlKey& key, const YamlNode& node) {
    const ProfileOption& option = profile_options()[index];
    const bool nowhere = node.kind == YamlNode::Kind::kNull;  // yaml-cpp then points at the next line
    profile_->positions[index] = nowhere ? key.at : node.at;
    if (node.kind == YamlNode::Kind::kRefused) {
      refused_.insert(option.key);
      return;
    }
    const auto refusal = read_option_value(option, node, folder_, profile_);
    if (!refusal) return;
    refused_.insert(option.key);
    const YamlNode& culprit = refusal->node != nullptr ? *refusal->node : node;
    const std::string found =
        option.secret && culprit.kind == YamlNode::Kind::kScalar ? "(not shown)" : found_text(culprit);
    errors_->push_back({nowhere ? key.at : culprit.at, option.key, refusal->problem, found, allowed_values_text(option),
                        option.secret ? "" : refusal->suggestion});
  }

  void report_unknown(const std::string& path, const YamlKey& key) {
    const std::string meant = suggest_profile_key(path);
    if (!meant.empty()) refused_.insert(meant);
    errors_->push_back({key.at, path, "unknown key", "", "", meant});
  }

  std::filesystem::path folder_;
  Profile* profile_;
  std::vector<ProfileError>* errors_;
  std::set<std::string> refused_;
};

void check_required(const Profile& profile, const YamlNode& root, const std::set<std::string>& refused,
                    std::vector<ProfileError>* errors) {
  for (size_t i = 0; i < profile_options().size(); ++i) {
    const ProfileOption& option = profile_options()[i];
    if (!option.required || profile.positions[i].line > 0 || refused.contains(option.key)) continue;
    // Points at the section if it is there, for that is where the line belongs.
    ProfilePosition at{1, 1};
    const std::string section = option.key.substr(0, option.key.find('.'));
    for (const YamlKey& key : root.keys) {
      if (key.text == section) at = key.at;
    }
    errors->push_back({at, option.key, "required and not set", "", allowed_values_text(option), ""});
  }
}

// The default of served_name is a fact of another option, so it is not in the table's column of defaults.
void name_model(Profile* profile, std::set<std::string>* refused, std::vector<ProfileError>* errors) {
  const int index = find_profile_option("model.served_name");
  const ProfileOption& option = profile_options()[index];
  if (profile->positions[index].line > 0 || profile->model.path.empty()) return;
  const std::string name = std::filesystem::path(profile->model.path).filename().string();
  if (!name.empty() && name != "." && name != ".." && option.pattern->accepts(name)) {
    profile->model.served_name = name;
    return;
  }
  refused->insert(option.key);
  errors->push_back({profile->positions[find_profile_option("model.path")], option.key,
                     "not set, and the folder's name cannot be a model name", quote_for_message(name),
                     allowed_values_text(option), ""});
}

void sort_by_position(std::vector<ProfileError>* errors) {
  std::stable_sort(errors->begin(), errors->end(), [](const ProfileError& a, const ProfileError& b) {
    return std::pair(a.at.line, a.at.column) < std::pair(b.at.line, b.at.column);
  });
}

}  // namespace

Profile default_profile() {
  Profile profile;
  profile.positions.resize(profile_options().size());
  for (const ProfileOption& option : profile_options()) set_option_default(option, &profile);
  return profile;
}

std::vector<ProfileError> check_profile(std::string_view text, const std::string& origin, Profile* profile) {
  std::vector<ProfileError> errors;
  *profile = default_profile();
  profile->origin = origin;
  const YamlNode root = read_yaml(text, &errors);
  if (root.kind == YamlNode::Kind::kRefused) return errors;
  if (root.kind != YamlNode::Kind::kMap && root.kind != YamlNode::Kind::kNull) {
    errors.push_back({root.at, "", "not a profile", found_text(root), "sections such as model: and cluster:", ""});
    return errors;
  }
  Reader reader(origin, profile, &errors);
  // A key that the YAML reader refused (its duplicate, say) is in `errors` already.
  for (const ProfileError& error : errors) reader.refused().insert(error.key);
  reader.read_map("", root);
  check_required(*profile, root, reader.refused(), &errors);
  name_model(profile, &reader.refused(), &errors);
  std::vector<ProfileError> warnings;
  check_profile_rules({*profile, reader.refused(), &errors, &warnings});
  sort_by_position(&errors);
  sort_by_position(&warnings);
  for (const ProfileError& warning : warnings) profile->warnings.push_back(profile_error_text(warning, origin));
  return errors;
}

absl::StatusOr<Profile> parse_profile(std::string_view text, const std::string& origin) {
  Profile profile;
  const std::vector<ProfileError> errors = check_profile(text, origin, &profile);
  if (errors.empty()) return profile;
  std::string message;
  const size_t shown = std::min<size_t>(errors.size(), kMaxProfileErrors);
  for (size_t i = 0; i < shown; ++i)
    message += fmt::format("{}{}", i == 0 ? "" : "\n", profile_error_text(errors[i], origin));
  if (shown < errors.size()) message += fmt::format("\n{}: and {} more errors", origin, errors.size() - shown);
  return absl::InvalidArgumentError(message);
}

// A key comes from the file: it is escaped and shortened unless it looks like a key.
static std::string printable_key(const std::string& key) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-?";
  return key.size() <= 80 && key.find_first_not_of(kPlain) == std::string::npos ? key : quote_for_message(key);
}

std::string profile_error_text(const ProfileError& error, const std::string& origin) {
  std::string text = fmt::format("{}:{}:{}: ", origin, error.at.line, error.at.column);
  if (!error.key.empty()) text += printable_key(error.key) + ": ";
  text += error.problem;
  if (!error.found.empty()) text += ": found " + error.found;
  if (!error.allowed.empty()) text += "; allowed: " + error.allowed;
  if (!error.suggestion.empty()) text += fmt::format("; did you mean {}?", error.suggestion);
  return text;
}

std::string Profile::kv_format() const {
  if (model.kv_dtype != "auto") return model.kv_dtype;
  return compute.backend == "cuda" ? "bf16" : "f32";
}

std::string Profile::Cluster::ucx_tls() const {
  std::string joined;
  for (const std::string& name : ucx.tls) joined += fmt::format("{}{}", joined.empty() ? "" : ",", name);
  return joined;
}

std::string Profile::Cluster::net_devices_of(int rank) const {
  if (ucx.net_devices.empty()) return "";
  if (ucx.net_devices.size() == 1) return ucx.net_devices[0];
  return rank >= 0 && rank < static_cast<int>(ucx.net_devices.size()) ? ucx.net_devices[rank] : "";
}

std::string Profile::Cluster::rank_name(int rank) const {
  if (rank < 0 || rank >= static_cast<int>(hosts.size())) return fmt::format("rank {}", rank);
  return fmt::format("{} (rank {})", hosts[rank], rank);
}

}  // namespace tensorfold
