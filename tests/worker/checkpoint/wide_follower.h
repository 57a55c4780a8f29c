// The fixtures that draft right, with slices that every backend's products can begin at: their MLPs filled up with
// zeros, which change no value.
#pragma once

#include <string>
#include <vector>

#include "tests/worker/checkpoint/model_copy.h"

namespace tensorfold {

/// A folder with a copy of fixture `name` (follower, follower_dflash, follower_dflash2), whose MLPs have 64 columns
/// instead of 16.
inline std::string wide_follower(const std::string& name) {
  constexpr size_t kNarrow = 16, kWide = 64, kBytes = 2;  // bf16
  ModelCopy copy = ModelCopy::of(kFixtures + name);
  for (OwnedTensor& tensor : copy.tensors) {
    if (tensor.name.find(".mlp.") == std::string::npos) continue;
    const bool down = tensor.name.find("down_proj") != std::string::npos;
    const auto rows = static_cast<size_t>(tensor.shape[0]), cols = static_cast<size_t>(tensor.shape[1]);
    EXPECT_EQ(tensor.bytes.size(), rows * cols * kBytes);
    EXPECT_EQ(down ? cols : rows, kNarrow);
    std::vector<std::byte> bytes;
    for (size_t row = 0; row < rows; ++row) {
      const auto first = tensor.bytes.begin() + static_cast<std::ptrdiff_t>(row * cols * kBytes);
      bytes.insert(bytes.end(), first, first + static_cast<std::ptrdiff_t>(cols * kBytes));
      if (down) bytes.resize(bytes.size() + (kWide - kNarrow) * kBytes);
    }
    if (!down) bytes.resize(kWide * cols * kBytes);
    tensor.bytes = bytes;
    tensor.shape[down ? 1 : 0] = kWide;
  }
  copy.replace_in_config("\"intermediate_size\": 16", "\"intermediate_size\": 64");
  return copy.write("wide_" + name);
}

}  // namespace tensorfold
