// One option's value: from YAML, to text, and in words.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "coordinator/profile/document.h"
#include "coordinator/profile/options.h"

namespace tensorfold {

// Why a value was refused. `node`, when set, is the part of it to point at (one entry of a list).
struct ValueRefusal {
  std::string problem;
  std::string suggestion = {};
  const YamlNode* node = nullptr;
};

// Reads `node` into the option's field of `profile`; relative paths are taken from `folder`. The field is untouched on
// refusal.
std::optional<ValueRefusal> read_option_value(const ProfileOption& option, const YamlNode& node,
                                              const std::filesystem::path& folder, Profile* profile);

// Sets the option to its default.
void set_option_default(const ProfileOption& option, Profile* profile);

// The effective value as one would write it in YAML; "" for an empty text or list. Secrets are printed: see
// shown_value.
std::string option_value_text(const ProfileOption& option, const Profile& profile);
// The same for people: "none" for empty, and no secrets.
std::string shown_option_value(const ProfileOption& option, const Profile& profile);

// "an integer from 1 to 8 (ranks)": what may stand there.
std::string allowed_values_text(const ProfileOption& option);

// What was found, for a message: the scalar, "a list", "a map", "nothing".
std::string found_text(const YamlNode& node);

// True for a token of the cluster: 16 to 256 printable characters without spaces.
bool is_cluster_token(std::string_view text);
// True for 64 hex digits.
bool is_sha256_hex(std::string_view text);

}  // namespace tensorfold
