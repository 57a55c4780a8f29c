// Reading a source's numbers and scales one at a time.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/ops/matrix_source.h"
#include "kernels/ops/small_floats.h"

namespace tensorfold {

/// Number `index` of an array of one format: plain ones, e4m3, e8m0.
inline float number_at(const std::byte* from, WeightFormat format, int64_t index) {
  if (format == WeightFormat::kE4m3) return float_of_e4m3(static_cast<uint8_t>(from[index]));
  if (format == WeightFormat::kE8m0) return float_of_e8m0(static_cast<uint8_t>(from[index]));
  if (format == WeightFormat::kF32) {
    float value;
    std::memcpy(&value, from + 4 * index, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, from + 2 * index, 2);
  return format == WeightFormat::kBf16 ? float_of_bf16(half) : float_of_f16(half);
}

/// Rows and columns of scales that a part of an FP8 or FP4 matrix uses: [first, end).
struct ScaleRange {
  int64_t first_row, end_row, first_col, end_col;
};
inline ScaleRange scales_of(const MatrixSource& s) {
  return {s.first_row / s.block_rows, (s.first_row + s.rows - 1) / s.block_rows + 1, s.first_col / s.block_cols,
          (s.first_col + s.cols - 1) / s.block_cols + 1};
}

/// Scale of a block of an FP8 or FP4 matrix, the global one included: exact, or within 2^-53 where it is divided by.
inline double scale_at(const MatrixSource& s, int64_t row, int64_t col) {
  const auto scale = static_cast<double>(number_at(s.scales + row * s.scale_row_bytes, s.scale_format, col));
  const auto global = static_cast<double>(s.global_scale);
  return s.divide_by_global ? scale / global : scale * global;
}

/// Whether row `row` of an FP8 matrix's part has a code that is no number.
inline bool row_has_nan_code(const MatrixSource& s, int64_t row) {
  const auto* codes = reinterpret_cast<const uint8_t*>(s.data + (s.first_row + row) * s.row_bytes + s.first_col);
  uint8_t found = 0;  // to the end, which the compiler does 16 and more at a time
  for (int64_t i = 0; i < s.cols; ++i) found |= static_cast<uint8_t>((codes[i] & 0x7f) == 0x7f);
  return found != 0;
}

}  // namespace tensorfold
