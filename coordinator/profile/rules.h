// Contradictions between options. Each rule has the sentence that the reference prints, so a rule that is not
// documented cannot be written.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/profile/profile.h"

namespace tensorfold {

// What the rules look at and report to. A rule is skipped when one of its keys already has an error: its value is not
// the user's.
struct RuleContext {
  const Profile& profile;
  const std::set<std::string>& refused;  // keys with errors
  std::vector<ProfileError>* errors;
  std::vector<ProfileError>* warnings;

  // Whether the file sets the option, and where.
  bool is_set(std::string_view key) const;
  ProfilePosition where(std::string_view key) const;
};

struct ProfileRule {
  std::vector<std::string> keys;  // what it reads; reported at the first of them that the file sets
  bool warning;                   // a warning lets the profile through
  std::string words;              // for the reference
  std::function<std::string(const RuleContext&)> check;  // "" when all is well, else the problem in words
};

const std::vector<ProfileRule>& profile_rules();

// Runs all rules.
void check_profile_rules(const RuleContext& context);

}  // namespace tensorfold
