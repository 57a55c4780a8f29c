// Weights as a checkpoint stores them: what a backend packs and dequantise.h turns into values.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tensorfold {

/// How the numbers of a weight are stored. The value of a weight *is* what dequantising to fp32 gives (contract,
/// section 3): bf16 and f16 widen exactly; MLX affine is fma(scale, q, bias), one rounding; the small floats are
/// (value * scale) * global scale, or divided by it, and EXL3 its transformed trellis, one rounding of the exact value
/// (dequantise.h). kE8m0 occurs as scales only.
enum class WeightFormat : uint8_t { kF32, kBf16, kF16, kMlxAffine, kE4m3, kE2m1, kExl3, kE8m0 };

/// bf16, f16, f32: `data` are the values themselves.
constexpr bool is_plain(WeightFormat format) {
  return format == WeightFormat::kF32 || format == WeightFormat::kBf16 || format == WeightFormat::kF16;
}

/// Which function turns a 16-bit state of an EXL3 trellis into a value.
enum class Exl3Codebook : uint8_t { k3Inst, kMcg, kMul1 };

/// A [rows, cols] weight matrix in the checkpoint's own bytes (host memory, usually a mapped file). Does not own them;
/// they must stay valid until the matrix has been packed.
struct MatrixSource {
  WeightFormat format = WeightFormat::kF32;
  int64_t rows = 0;
  int64_t cols = 0;                 // logical columns (values, not words)
  const std::byte* data = nullptr;  // first row
  int64_t row_bytes = 0;            // distance between rows of `data`
  // MLX affine only: bits 2..8 (no 7), group 32/64/128, scales and biases [rows, cols / group] in scale_format.
  int bits = 0;
  int group = 0;
  WeightFormat scale_format = WeightFormat::kBf16;
  const std::byte* scales = nullptr;
  const std::byte* biases = nullptr;
  int64_t scale_row_bytes = 0;  // distance between rows of scales (and biases)

  // FP8 (kE4m3: a byte a value) and FP4 (kE2m1: two a byte, the lower half first): one scale for block_rows x
  // block_cols values, in scale_format. `data` and `scales` stay those of the whole matrix; first_row and first_col say
  // where this part of it begins, so that it may begin anywhere.
  static constexpr int64_t kWhole = int64_t{1} << 62;  // a block as large as the matrix
  int64_t block_rows = 1;
  int64_t block_cols = 0;
  float global_scale = 1.0f;
  bool divide_by_global = false;
  int64_t first_row = 0;
  int64_t first_col = 0;

  // EXL3: `data` is the trellis, `tile_bytes` for each tile of 16 x 16 values, [whole_cols / 16, whole_rows / 16]
  // tiles; sides are f16 factors of the whole matrix' columns and rows. first_row and first_col as above.
  Exl3Codebook codebook = Exl3Codebook::k3Inst;
  int64_t tile_bytes = 0;
  int64_t whole_rows = 0;
  int64_t whole_cols = 0;
  const std::byte* column_side = nullptr;
  const std::byte* row_side = nullptr;

  /// Rows [first, first + count).
  MatrixSource slice_rows(int64_t first, int64_t count) const;
  /// Columns [first, first + count); both must be multiples of column_unit().
  MatrixSource slice_cols(int64_t first, int64_t count) const;
  /// Columns can only be cut at multiples of this: the group of MLX affine, or 1.
  int64_t column_unit() const { return format == WeightFormat::kMlxAffine ? group : 1; }
};

}  // namespace tensorfold
