// Which lane of a warp holds what of a recurrent state: index functions for kernels and tests alike.
#pragma once

#include <cstdint>

#include "kernels/numerics/host_device.h"

namespace tensorfold {

inline constexpr int kColumnsAWarp = 4;        // columns of a state that a warp's lanes hold side by side
inline constexpr int kSegments = 8;            // lanes that share a column
inline constexpr int kMostRecurrentTaps = 16;  // longest convolution of a recurrent layer

constexpr int64_t round_to_four(int64_t n) { return (n + 3) / 4 * 4; }

/// Neighbouring lanes have the same segment, so that a half warp's 16-byte loads of what all columns read touch each
/// bank once.
TF_HOST_DEVICE inline int lane_column(int lane) { return (lane & 1) | (lane >> 4) << 1; }
TF_HOST_DEVICE inline int lane_segment(int lane) { return lane >> 1 & 7; }

}  // namespace tensorfold
