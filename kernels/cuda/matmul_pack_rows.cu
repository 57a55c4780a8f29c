#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "kernels/cuda/matmul_pack_rows.h"
#include "kernels/cuda/matmul_pack_scales.h"
#include "kernels/numerics/check.h"
#include "kernels/ops/weight_scales.h"

namespace tensorfold {
namespace {

// Code of column `col` in a row's bit stream, lowest bits first.
uint32_t code_at(const std::byte* row, int bits, int64_t col) {
  const int64_t first = col * bits;
  const uint8_t* p = reinterpret_cast<const uint8_t*>(row) + first / 8;
  uint32_t word = p[0];
  if (first % 8 + bits > 8) word |= static_cast<uint32_t>(p[1]) << 8;
  return (word >> (first % 8)) & ((1u << bits) - 1);
}

// Below 2^-5; then the product is exact.
uint16_t raised_scale(float scale) { return bf16_of_float(scale * 0x1p100f * 0x1p33f); }

bool has_large_scale(const MatrixSource& s) {
  const int64_t groups = s.cols / s.group;
  for (int64_t row = 0; row < s.rows; ++row) {
    const std::byte* scales = s.scales + row * s.scale_row_bytes;
    for (int64_t i = 0; i < groups; ++i) {
      uint16_t bits;
      std::memcpy(&bits, scales + 2 * i, 2);
      if ((bits & 0x7fff) >= 0x3d00) return true;  // 2^-5, infinity, NaN
    }
  }
  return false;
}

void stage_plain_row(const MatrixSource& s, int64_t row, uint8_t* to) {
  const std::byte* from = s.data + row * s.row_bytes;
  if (s.format == WeightFormat::kBf16) {
    std::memcpy(to, from, static_cast<size_t>(2 * s.cols));
    return;
  }
  for (int64_t c = 0; c < s.cols; ++c) {
    const uint16_t value = bf16_of_float(number_at(from, s.format, c));
    std::memcpy(to + 2 * c, &value, 2);
  }
}

void stage_affine_row(const MatrixSource& s, int64_t row, PackFormat format, int64_t stages, uint8_t* codes,
                      uint8_t* scales) {
  const std::byte* from = s.data + row * s.row_bytes;
  if (s.bits == kept_bits(format.kind)) {
    std::memcpy(codes, from, static_cast<size_t>(s.cols * s.bits / 8));
  } else {
    for (int64_t c = 0; c < s.cols; ++c) codes[c] = static_cast<uint8_t>(code_at(from, s.bits, c));
  }
  const std::byte* row_scales = s.scales + row * s.scale_row_bytes;
  const std::byte* row_biases = s.biases + row * s.scale_row_bytes;
  const int64_t set_columns = kStageColumns / format.sets;
  for (int64_t e = 0; e < stages * format.sets && e * set_columns < s.cols; ++e) {
    const int64_t group = e * set_columns / s.group;
    uint16_t scale;
    std::memcpy(&scale, row_scales + 2 * group, 2);
    if (!has_wide_scales(format.kind)) scale = raised_scale(number_at(row_scales, WeightFormat::kBf16, group));
    std::memcpy(scales + 4 * e, &scale, 2);
    std::memcpy(scales + 4 * e + 2, row_biases + 2 * group, 2);
  }
}

bool has_nan_code(const MatrixSource& s) {
  for (int64_t row = 0; row < s.rows; ++row) {
    if (row_has_nan_code(s, row)) return true;
  }
  return false;
}

void stage_e4m3_row(const MatrixSource& s, int64_t row, PackFormat format, int64_t stages, uint8_t* codes,
                    uint8_t* scales) {
  const auto* from = reinterpret_cast<const uint8_t*>(s.data + (s.first_row + row) * s.row_bytes + s.first_col);
  std::memcpy(codes, from, static_cast<size_t>(s.cols));
  const int64_t set_columns = kStageColumns / format.sets, scale_row = (s.first_row + row) / s.block_rows;
  int64_t last_block = -1;
  uint32_t split = 0;
  for (int64_t e = 0; e < stages * format.sets && e * set_columns < s.cols; ++e) {
    const int64_t block = (s.first_col + e * set_columns) / s.block_cols;
    if (block != last_block) {
      const std::optional<uint32_t> both = split_e4m3_scale(scale_at(s, scale_row, block));
      kernel_check(both.has_value(), "pack: a scale of FP8 weights changed while they were read");
      split = *both;
      last_block = block;
    }
    std::memcpy(scales + 4 * e, &split, 4);
  }
}

// A byte of scales for each 16 columns, or each 8.
void stage_e2m1_row(const MatrixSource& s, int64_t row, PackFormat format, uint8_t* codes, uint8_t* scales) {
  const int64_t whole_row = s.first_row + row;
  std::memcpy(codes, s.data + whole_row * s.row_bytes + s.first_col / 2, static_cast<size_t>(s.cols / 2));
  const auto* from = reinterpret_cast<const uint8_t*>(s.scales + whole_row / s.block_rows * s.scale_row_bytes);
  const int64_t run = 16 / format.sets;
  for (int64_t c = 0; c < s.cols; c += run) scales[c / run] = from[(s.first_col + c) / s.block_cols];
}

}  // namespace

std::string pack_source_error(const MatrixSource& s) {
  if (s.rows < 0 || s.cols < 1 || (s.rows > 0 && s.data == nullptr)) return "an empty matrix cannot be packed";
  if (s.cols % 8 != 0) {
    return "matrices of " + std::to_string(s.cols) + " columns cannot be packed for CUDA: columns come in eights";
  }
  if (s.cols > (int64_t{1} << 18)) {
    return "matrices of " + std::to_string(s.cols) + " columns cannot be packed for CUDA: at most 262144";
  }
  return source_error(s);
}

PackFormat pack_format(const MatrixSource& s) {
  if (s.format == WeightFormat::kE4m3) {
    const int sets = fp8_sets(s);
    return sets > 0 && splits_e4m3_scales(s) && !has_nan_code(s) ? PackFormat{CudaWeightKind::kFp8, sets, {}}
                                                                 : PackFormat{};
  }
  if (s.format == WeightFormat::kE2m1) {
    const int sets = fp4_sets(s);
    const std::optional<Fp4Factors> factors = sets > 0 ? fp4_factors(s) : std::nullopt;
    return factors ? PackFormat{CudaWeightKind::kFp4, sets, {*factors, *factors}} : PackFormat{};
  }
  if (s.format != WeightFormat::kMlxAffine || s.scale_format != WeightFormat::kBf16) return {};
  const bool wide = has_large_scale(s);
  const CudaWeightKind four = wide ? CudaWeightKind::kAffine4Wide : CudaWeightKind::kAffine4;
  const CudaWeightKind eight = wide ? CudaWeightKind::kAffine8Wide : CudaWeightKind::kAffine8;
  return {s.bits == 4 ? four : eight, s.group == 32 ? 2 : 1, {}};
}

void stage_row(const MatrixSource& source, int64_t row, PackFormat format, int64_t stages, uint8_t* codes,
               uint8_t* scales, WeightView& view) {
  const int64_t row_bytes = staged_row_bytes(format.kind, stages);
  const int64_t used = source.cols * kept_bits(format.kind) / 8;
  std::memset(codes + used, 0, static_cast<size_t>(row_bytes - used));
  std::memset(scales, 0, static_cast<size_t>(staged_scale_bytes(format.sets, stages)));
  switch (format.kind) {
    case CudaWeightKind::kFp8:
      stage_e4m3_row(source, row, format, stages, codes, scales);
      return;
    case CudaWeightKind::kFp4:
      stage_e2m1_row(source, row, format, codes, scales);
      return;
    case CudaWeightKind::kBf16:
      if (is_plain(source.format)) {
        stage_plain_row(source, row, codes);
      } else {
        // What has no kernel of its own, and what shares tiles with such a matrix.
        view.dequantise_bf16(source, row, 0, source.cols, reinterpret_cast<uint16_t*>(codes));
      }
      return;
    case CudaWeightKind::kAffine4:
    case CudaWeightKind::kAffine8:
    case CudaWeightKind::kAffine4Wide:
    case CudaWeightKind::kAffine8Wide:
      stage_affine_row(source, row, format, stages, codes, scales);
  }
}

}  // namespace tensorfold
