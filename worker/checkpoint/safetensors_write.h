// Writing a safetensors file: whole or not at all.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "worker/checkpoint/safetensors.h"

namespace tensorfold {

/// Writes `tensors` (whose data spans are read, not kept) and string metadata to `path`: into a file beside it first,
/// flushed, then renamed over it, so that a reader never sees half of one. Tensors are laid out by falling element
/// size, then name, so that every one is aligned. InvalidArgument for a repeated name or data that does not fit its
/// shape.
absl::Status write_safetensors(const std::string& path, std::span<const TensorInfo> tensors,
                               const std::map<std::string, std::string>& metadata = {});

/// Views of vectors as tensors; the vectors must outlive the result.
TensorInfo tensor_view(std::string name, std::vector<int64_t> shape, std::span<const int64_t> values);
TensorInfo tensor_view(std::string name, std::vector<int64_t> shape, std::span<const float> values);

}  // namespace tensorfold
