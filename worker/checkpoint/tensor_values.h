// Small tensors as numbers: norm weights, convolution taps, token ids.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/checkpoint/safetensors.h"

namespace tensorfold {

/// All elements widened to fp32, exactly: F32, F16 and BF16. InvalidArgument naming the tensor for other dtypes.
absl::StatusOr<std::vector<float>> read_floats(const TensorInfo& tensor);

/// All elements of an I64 or I32 tensor.
absl::StatusOr<std::vector<int64_t>> read_integers(const TensorInfo& tensor);

/// The fp32 value of IEEE half-precision and of bfloat16 bits.
float float_from_f16(uint16_t bits);
float float_from_bf16(uint16_t bits);

}  // namespace tensorfold
