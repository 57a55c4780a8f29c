// The version of the arithmetic. Two builds with the same version give the same bits for the same checkpoint.
#pragma once

#include <string_view>

namespace tensorfold {

/// Enters the numeric fingerprint. Raise it with every change that can alter any bit of any result: lane count, fold
/// order, polynomials, block or split sizes, slice rule.
inline constexpr std::string_view kNumericsVersion = "tf-numerics-1";

/// fp32 lanes of every CPU reduction, on every instruction set.
inline constexpr int kLanes = 16;

}  // namespace tensorfold
