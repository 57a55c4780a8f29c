// Which instruction sets this build and this machine have.
#pragma once

#include <string>
#include <vector>

#include "kernels/cpu/kernel_table.h"

namespace tensorfold {

/// Widest first; the last is "portable".
std::vector<std::string> available_isas();

/// The kernels of `isa` ("auto": the widest available), or null when this machine or build does not have it.
const KernelTable* kernels_for(const std::string& isa);

}  // namespace tensorfold
