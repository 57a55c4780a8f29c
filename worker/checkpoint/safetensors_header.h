// Internal to worker/checkpoint: the JSON header of a safetensors file, parsed in one pass without building a document,
// so that a 100 MB header of brackets costs no memory and a repeated name cannot hide behind a later one.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/checkpoint/safetensors.h"

namespace tensorfold {

struct HeaderTensor {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // bytes from the end of the header
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<HeaderTensor> tensors;  // in header order; shapes and byte counts agree, offsets not yet compared
  std::map<std::string, std::string> metadata;
};

/// Parses the header. Checks each tensor by itself: known dtype, shape without overflow, begin <= end, and
/// end - begin equal to the bytes of shape x dtype.
absl::StatusOr<SafetensorsHeader> parse_safetensors_header(std::string_view json, const std::string& label);

}  // namespace tensorfold
