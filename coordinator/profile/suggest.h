// Did-you-mean: the nearest of some names by edit distance.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tensorfold {

// Edits (insert, delete, replace, swap of neighbours) from a to b. Only the first 64 bytes of each are looked at.
int edit_distance(std::string_view a, std::string_view b);

// The nearest candidate, or "" when none is near: at most one edit in three characters. Ties go to the earlier
// candidate.
std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates);

// The option or section that an unknown key path probably meant: a sibling with a near name, else the same or a near
// name in another section; "" when there is none.
std::string suggest_profile_key(std::string_view path);

}  // namespace tensorfold
