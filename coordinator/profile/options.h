// The table of profile options. Each option is declared once, in options_*.cc; everything else reads the table.
// Thread-safety: the tables are built once and never change.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "coordinator/profile/profile.h"

namespace tensorfold {

enum class ProfileValueType {
  kBool,      // true, false
  kInteger,   // decimal, inside [min, max]
  kNumber,    // decimal fraction, inside [low, high]
  kString,    // one of `choices`, or text that `pattern` accepts
  kDuration,  // 500ms, 2s, 5m, 1h; min and max in microseconds
  kSize,      // 64KiB, 512MiB, 8GiB; min and max in bytes
  kRate,      // 10GiB/s; min and max in bytes a second
  kList,      // [a, b]; each entry as kString
  kPath,      // relative to the profile's folder
  kAddress,   // host:port; min and max of the port
  kPerRank,   // [a, b] in rank order or {0: a, 1: b}; each entry as kString
};

// A shape of text, with the words that errors and the reference use for it.
struct ProfilePattern {
  std::string_view words;                  // "letters, digits and . _ -"
  bool (*accepts)(std::string_view text);  // never sees an empty text
};

// Where an option's value lives in a Profile.
using ProfileField = std::variant<bool*, int*, std::int64_t*, double*, std::string*, Profile::Duration*,
                                  Profile::HostPort*, std::vector<std::string>*>;

struct ProfileOption {
  std::string key = {};  // section.name or section.section.name
  ProfileValueType type = ProfileValueType::kString;
  ProfileField (*field)(Profile&) = nullptr;
  std::string fallback = {};  // the default, written as in YAML; "" : none (empty text or list)
  std::int64_t min = 0;
  std::int64_t max = std::numeric_limits<std::int64_t>::max();
  double low = 0;
  double high = 0;
  std::vector<std::string> choices = {};
  const ProfilePattern* pattern = nullptr;
  std::string unit = {};          // what a number counts; set for every number, duration and size
  std::string help = {};          // one or two plain sentences
  std::string example = {};       // a value, written as in YAML
  std::string default_note = {};  // what the default means, where the value alone does not say it
  bool cluster_wide = false;      // part of profile_hash: must agree on all ranks
  bool required = false;
  bool secret = false;  // never printed
  bool unique = false;  // lists: an entry may not be repeated
};

struct ProfileSection {
  std::string key;
  std::string help;
};

// In the order of the reference; an option's section is in profile_sections().
const std::vector<ProfileOption>& profile_options();
const std::vector<ProfileSection>& profile_sections();

// Index in profile_options(), or -1.
int find_profile_option(std::string_view key);
bool is_profile_section(std::string_view key);

}  // namespace tensorfold
