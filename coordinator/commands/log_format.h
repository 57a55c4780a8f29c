// How log lines look: for people, or one JSON object a line.
#pragma once

#include <string>

namespace tensorfold {

/// `format`: "text" or "json" (the profile's log.format); `level`: a spdlog level's name. Affects the whole program.
void set_log(const std::string& format, const std::string& level);

}  // namespace tensorfold
