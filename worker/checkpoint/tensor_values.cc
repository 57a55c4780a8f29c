#include "worker/checkpoint/tensor_values.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>

namespace tensorfold {
namespace {

// memcpy, because a file may place a tensor at any byte.
template <typename T>
T load(const std::byte* data, size_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof(T));
  return value;
}

}  // namespace

float float_from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

float float_from_f16(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t fraction = bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  const uint32_t widened = exponent == 31 ? 255u : exponent + 112u;
  return std::bit_cast<float>(sign | (widened << 23) | (fraction << 13));
}

absl::StatusOr<std::vector<float>> read_floats(const TensorInfo& tensor) {
  const auto count = static_cast<size_t>(tensor.elements());
  std::vector<float> values(
      tensor.dtype == Dtype::kF32 || tensor.dtype == Dtype::kF16 || tensor.dtype == Dtype::kBf16 ? count : 0);
  switch (tensor.dtype) {
    case Dtype::kF32:
      if (count > 0) std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
      return values;
    case Dtype::kF16:
      for (size_t i = 0; i < count; ++i) values[i] = float_from_f16(load<uint16_t>(tensor.data.data(), i));
      return values;
    case Dtype::kBf16:
      for (size_t i = 0; i < count; ++i) values[i] = float_from_bf16(load<uint16_t>(tensor.data.data(), i));
      return values;
    default:
      return absl::InvalidArgumentError(fmt::format("tensor {} is {}; allowed are F32, F16, BF16",
                                                    quoted_name(tensor.name), dtype_name(tensor.dtype)));
  }
}

absl::StatusOr<std::vector<int64_t>> read_integers(const TensorInfo& tensor) {
  if (tensor.dtype != Dtype::kI64 && tensor.dtype != Dtype::kI32) {
    return absl::InvalidArgumentError(
        fmt::format("tensor {} is {}; allowed are I64, I32", quoted_name(tensor.name), dtype_name(tensor.dtype)));
  }
  std::vector<int64_t> values(static_cast<size_t>(tensor.elements()));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] =
        tensor.dtype == Dtype::kI64 ? load<int64_t>(tensor.data.data(), i) : load<int32_t>(tensor.data.data(), i);
  }
  return values;
}

}  // namespace tensorfold
