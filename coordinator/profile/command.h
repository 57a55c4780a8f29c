// `tensorfold profile check FILE…`, `explain FILE [KEY]`, `reference`.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tensorfold {

// Adds the sub-command `profile` to `app`. When the user calls it, the exit code is put into *exit_code: 0 all well, 1
// a profile is wrong or cannot be read. `exit_code` must outlive the parse.
void add_profile_command(CLI::App& app, int* exit_code);

// The commands themselves. `out` gets results, `err` errors and warnings; they return the exit code.
int profile_check_command(const std::vector<std::string>& files, std::ostream& out, std::ostream& err);
int profile_explain_command(const std::string& file, const std::string& key, std::ostream& out, std::ostream& err);
int profile_reference_command(std::ostream& out);

}  // namespace tensorfold
