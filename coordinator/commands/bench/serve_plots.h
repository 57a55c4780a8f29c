// Pictures of a load on a server.
#pragma once

#include <string>

#include "coordinator/load/load.h"

namespace tensorfold {

/// Rates and times by level, side by side, as one SVG file.
std::string load_svg(const LoadReport& report);

}  // namespace tensorfold
