// The weight view: any part of a MatrixSource as numbers, by the definition of its format.
//
// The value of a weight, exactly, before the one rounding to fp32 (CPU) or bf16 (CUDA):
//   plain      the value itself
//   affine     scale * q + bias                                    (MLX; rounded to fp32 by one fma, then to bf16)
//   FP8, FP4   value * scale, times the global scale or divided by it
//   EXL3       row_side[n] * (H W H)[n, k] / 128 * column_side[k], W the trellis' f16 values, H block-diagonal
//              128-point Hadamard matrices of +-1
// FP8 and FP4 products of two factors are exact in float64. Times (or over) a third the float64 result is within 2^-53,
// which no rounding to fp32 or bf16 of such products can tell from the exact one. EXL3 is computed in float64: the
// transform's sums are exact there, the products with the sides are within 2^-53.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/ops/ops.h"

namespace tensorfold {

/// What is wrong with a source, as a sentence, or empty.
std::string source_error(const MatrixSource& source);

/// Number `index` of an array of scales, or of other numbers: f32, bf16, f16, e4m3 or e8m0. Exact.
float scale_element(const std::byte* from, WeightFormat format, int64_t index);

/// Every value of this source is a bf16 number, so that bf16 loses nothing. May read the scales.
bool exact_in_bf16(const MatrixSource& source);

/// Reads values of matrices, row after row. Keeps what neighbouring rows share (EXL3: a band of 128 rows, in float64),
/// so use one for a run of rows and then drop it: sources must stay valid while it lives. One thread uses it.
class WeightView {
 public:
  /// fp32 values of columns [first_col, first_col + count) of a row.
  void dequantise(const MatrixSource& source, int64_t row, int64_t first_col, int64_t count, float* out);
  /// The same rounded to bf16.
  void dequantise_bf16(const MatrixSource& source, int64_t row, int64_t first_col, int64_t count, uint16_t* out);

 private:
  const double* exact(const MatrixSource& source, int64_t row, int64_t first_col, int64_t count);
  void fill_exl3_band(const MatrixSource& source, int64_t band, int64_t first_block, int64_t end_block);

  std::vector<double> values_;
  // EXL3: 128 rows of the column blocks [band_first_, band_end_) of 128.
  std::vector<double> band_values_;
  const std::byte* band_data_ = nullptr;
  int64_t band_ = -1;
  int64_t band_first_ = 0;
  int64_t band_end_ = 0;
};

/// Value of an EXL3 state, an f16 number.
float exl3_value(Exl3Codebook codebook, uint16_t state);

/// Bits of a tile of 256 values that take `tile_bytes`, or 0 if no width does: 1 to 8 bits, and 1.5, 2.5 and 3.5 for
/// mul1. In half bits: 7 is 3.5.
int exl3_half_bits(int64_t tile_bytes, Exl3Codebook codebook);

/// Values of a tile, [16 of K][16 of N].
void decode_exl3_tile(const std::byte* tile, int half_bits, Exl3Codebook codebook, float out[256]);

}  // namespace tensorfold
