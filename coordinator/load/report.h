// How a load's figures are shown: a table for people, JSON for programs. Pictures are drawn by the command.
#pragma once

#include <optional>
#include <ostream>
#include <string>

#include "coordinator/load/check.h"
#include "coordinator/load/load.h"

namespace tensorfold {

/// What the columns mean, for the command's help.
std::string load_legend();
void print_load(const LoadReport& report, const std::optional<HashCheck>& check, std::ostream& out);
/// One object; times in seconds. docs/load-testing.md lists the fields.
std::string load_json(const LoadReport& report, const std::optional<HashCheck>& check);

}  // namespace tensorfold
