#include "kernels/ops/dequantise.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/numerics/check.h"
#include "kernels/ops/small_floats.h"

namespace tensorfold {
namespace {

int64_t element_bytes(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return 4;
    case WeightFormat::kBf16:
    case WeightFormat::kF16:
      return 2;
    default:
      return 1;
  }
}

// Code of column `col` in a row's bit stream, lowest bits first.
uint32_t code_at(const std::byte* row, int bits, int64_t col) {
  const int64_t first = col * bits;
  const uint8_t* p = reinterpret_cast<const uint8_t*>(row) + first / 8;
  uint32_t word = p[0];
  if (first % 8 + bits > 8) word |= static_cast<uint32_t>(p[1]) << 8;
  return (word >> (first % 8)) & ((1u << bits) - 1);
}

bool is_small_float(WeightFormat format) { return format == WeightFormat::kE4m3 || format == WeightFormat::kE2m1; }

// Rows and columns of scales that a part of a matrix uses: [first, end).
struct ScaleRange {
  int64_t first_row, end_row, first_col, end_col;
};

ScaleRange scales_of(const MatrixSource& s) {
  return {s.first_row / s.block_rows, (s.first_row + s.rows - 1) / s.block_rows + 1, s.first_col / s.block_cols,
          (s.first_col + s.cols - 1) / s.block_cols + 1};
}

std::string small_float_error(const MatrixSource& s) {
  if (s.block_rows < 1 || s.block_cols < 1) return "FP8 and FP4 weights need blocks of at least one value";
  if (s.rows > 0 && s.scales == nullptr) return "FP8 and FP4 weights need scales";
  if (s.scale_format == WeightFormat::kMlxAffine || s.scale_format == WeightFormat::kE2m1 ||
      s.scale_format == WeightFormat::kExl3) {
    return "FP8 and FP4 weights need scales of f32, bf16, f16, e4m3 or e8m0";
  }
  if (s.first_row < 0 || s.first_col < 0) return "a part of a matrix begins before it";
  const int64_t columns = s.first_col + s.cols;
  if (s.row_bytes < (s.format == WeightFormat::kE4m3 ? columns : (columns + 1) / 2)) {
    return "a matrix has rows shorter than its columns";
  }
  if (s.rows > 0 && s.scale_row_bytes < scales_of(s).end_col * element_bytes(s.scale_format) && s.block_rows < s.rows) {
    return "a matrix has rows of scales shorter than its columns";
  }
  return "";
}

std::string affine_error(const MatrixSource& s) {
  if (s.bits < 2 || s.bits > 8 || s.bits == 7) {
    return "affine weights of " + std::to_string(s.bits) + " bits cannot be packed: only 2, 3, 4, 5, 6 and 8";
  }
  if (s.group != 32 && s.group != 64 && s.group != 128) {
    return "affine groups of " + std::to_string(s.group) + " columns cannot be packed: only 32, 64 and 128";
  }
  if (s.cols % s.group != 0) return "affine weights must have whole groups of columns";
  if (!is_plain(s.scale_format) || (s.rows > 0 && (s.scales == nullptr || s.biases == nullptr))) {
    return "affine weights need scales and biases";
  }
  if (s.row_bytes < s.cols * s.bits / 8 || s.scale_row_bytes < s.cols / s.group * element_bytes(s.scale_format)) {
    return "a matrix has rows shorter than its columns";
  }
  return "";
}

std::string exl3_error(const MatrixSource& s) {
  if (exl3_half_bits(s.tile_bytes, s.codebook) == 0) {
    return "EXL3 tiles of " + std::to_string(s.tile_bytes) + " bytes cannot be packed";
  }
  if (s.whole_rows % 128 != 0 || s.whole_cols % 128 != 0 || s.first_row < 0 || s.first_col < 0 ||
      s.first_row > s.whole_rows - s.rows || s.first_col > s.whole_cols - s.cols) {
    return "EXL3 matrices have multiples of 128 rows and columns, and a part lies within";
  }
  return s.column_side == nullptr || s.row_side == nullptr ? "EXL3 weights need both sides" : "";
}

}  // namespace

float scale_element(const std::byte* from, WeightFormat format, int64_t index) {
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

std::string source_error(const MatrixSource& s) {
  if (s.rows < 0 || s.cols < 1 || (s.rows > 0 && s.data == nullptr)) return "an empty matrix cannot be packed";
  switch (s.format) {
    case WeightFormat::kF32:
    case WeightFormat::kBf16:
    case WeightFormat::kF16:
      return s.row_bytes < s.cols * element_bytes(s.format) ? "a matrix has rows shorter than its columns" : "";
    case WeightFormat::kMlxAffine:
      return affine_error(s);
    case WeightFormat::kE4m3:
    case WeightFormat::kE2m1:
      return small_float_error(s);
    case WeightFormat::kExl3:
      return exl3_error(s);
    case WeightFormat::kE8m0:
      break;
  }
  return "e8m0 numbers are scales, not weights";
}

bool exact_in_bf16(const MatrixSource& s) {
  if (s.format == WeightFormat::kBf16) return true;
  if (!is_small_float(s.format) || s.global_scale != 1.0f || s.rows == 0) return false;
  // e2m1 times e4m3: at most 2 + 4 significant bits, far from the ends of the range.
  if (s.scale_format == WeightFormat::kE4m3) return s.format == WeightFormat::kE2m1;
  if (s.scale_format != WeightFormat::kE8m0) return false;
  // The smallest bf16 number is 2^-133, that of e4m3 2^-9 and that of e2m1 2^-1, of e8m0 2^-127.
  if (s.format == WeightFormat::kE2m1) return true;
  const ScaleRange range = scales_of(s);
  for (int64_t row = range.first_row; row < range.end_row; ++row) {
    const auto* scales = reinterpret_cast<const uint8_t*>(s.scales + row * s.scale_row_bytes);
    if (std::any_of(scales + range.first_col, scales + range.end_col, [](uint8_t code) { return code < 3; })) {
      return false;
    }
  }
  return true;
}

const double* WeightView::exact(const MatrixSource& s, int64_t row, int64_t first_col, int64_t count) {
  if (s.format == WeightFormat::kExl3) {
    const int64_t at = s.first_col + first_col, wanted = s.first_row + row;
    const int64_t first_block = at / 128, end_block = (at + count - 1) / 128 + 1;
    if (s.data != band_data_ || wanted / 128 != band_ || first_block < band_first_ || end_block > band_end_) {
      fill_exl3_band(s, wanted / 128, first_block, end_block);
    }
    return band_values_.data() + wanted % 128 * (band_end_ - band_first_) * 128 + at - band_first_ * 128;
  }
  values_.resize(static_cast<size_t>(count));
  const int64_t whole_row = s.first_row + row;
  const std::byte* data = s.data + whole_row * s.row_bytes;
  const std::byte* scales = s.scales + whole_row / s.block_rows * s.scale_row_bytes;
  const double global = static_cast<double>(s.global_scale);
  for (int64_t i = 0; i < count;) {
    const int64_t col = s.first_col + first_col + i;
    const int64_t block = col / s.block_cols;
    const int64_t end = i + std::min(count - i, s.block_cols - col % s.block_cols);
    const double scale = static_cast<double>(scale_element(scales, s.scale_format, block));
    for (int64_t c = col; i < end; ++i, ++c) {
      const float code = s.format == WeightFormat::kE4m3
                             ? float_of_e4m3(static_cast<uint8_t>(data[c]))
                             : float_of_e2m1(static_cast<uint8_t>(data[c / 2]) >> (c % 2 * 4) & 15);
      const double scaled = static_cast<double>(code) * scale;
      values_[static_cast<size_t>(i)] = s.divide_by_global ? scaled / global : scaled * global;
    }
  }
  return values_.data();
}

void WeightView::dequantise(const MatrixSource& s, int64_t row, int64_t first_col, int64_t count, float* out) {
  kernel_check(row >= 0 && row < s.rows && first_col >= 0 && count >= 0 && first_col <= s.cols - count,
               "dequantise: outside the matrix");
  if (count == 0) return;
  if (is_plain(s.format)) {
    for (int64_t i = 0; i < count; ++i) out[i] = scale_element(s.data + row * s.row_bytes, s.format, first_col + i);
  } else if (s.format == WeightFormat::kMlxAffine) {
    const std::byte* scales = s.scales + row * s.scale_row_bytes;
    const std::byte* biases = s.biases + row * s.scale_row_bytes;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t col = first_col + i;
      const auto code = static_cast<float>(code_at(s.data + row * s.row_bytes, s.bits, col));
      out[i] = std::fma(scale_element(scales, s.scale_format, col / s.group), code,
                        scale_element(biases, s.scale_format, col / s.group));
    }
  } else {
    const double* values = exact(s, row, first_col, count);
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(values[i]);
  }
}

void WeightView::dequantise_bf16(const MatrixSource& s, int64_t row, int64_t first_col, int64_t count, uint16_t* out) {
  if (is_small_float(s.format) || s.format == WeightFormat::kExl3) {
    kernel_check(row >= 0 && row < s.rows && first_col >= 0 && count >= 0 && first_col <= s.cols - count,
                 "dequantise: outside the matrix");
    const double* values = count > 0 ? exact(s, row, first_col, count) : nullptr;
    for (int64_t i = 0; i < count; ++i) out[i] = bf16_of_double(values[i]);
    return;
  }
  std::vector<float> values(static_cast<size_t>(count));
  dequantise(s, row, first_col, count, values.data());
  for (int64_t i = 0; i < count; ++i) out[i] = bf16_of_float(values[static_cast<size_t>(i)]);
}

}  // namespace tensorfold
