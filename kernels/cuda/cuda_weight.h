// Packed weights of the CUDA backend.
//
// A weight is a list of segments (blocks stacked in one format are one segment), each a list of tiles of 16 packed
// rows, each a list of stages of 64 columns; rows and columns beyond the matrix are zeros. So the warp that owns a tile
// reads one contiguous run. Inside a stage, lane (g = lane / 4, t = lane % 4) of that warp owns of each half of 32
// columns (half = 0, 1) the 8 columns 32 half + 8 t … + 7 of rows g and g + 8:
//   kBf16    2,048 bytes: for each half, for each step of 16 columns of the product (step = 0, 1): 32 lanes x 4 words
//   of
//            2 values, the A fragment: columns 4 step + {0, 1} of row g, of row g + 8, columns 4 step + {2, 3} of both.
//   kAffine4 512 bytes: 32 lanes x 4 words (half 0 row g, half 0 row g + 8, half 1 row g, half 1 row g + 8); a word has
//            column 2 j at bit 4 j and column 2 j + 1 at bit 16 + 4 j, so that a shift and a mask make a pair.
//   kAffine8 1,024 bytes: for each half 32 lanes x (8 codes of row g, 8 codes of row g + 8).
//   kFp8     1,024 bytes: as kAffine8, but a word has the codes of columns 0 to 3 (4 to 7) at the bits of fp8_bit().
//   kFp4     512 bytes: as kAffine4, with codes at the bits of fp4_bit(). Then 64 bytes a set: a set holds a scale (a
//   byte,
//            as stored) for 16 columns; two sets for 8 each, where blocks begin inside 16. For each g, for each of
//            these runs of columns of 32: those of half 0 row g, row g + 8, half 1 row g, row g + 8. Then 16 bytes: the
//            factors of rows g and of rows g + 8, and how a byte becomes a number (Fp4Factors).
//   affine, after the codes: for each set, for each g: scale and bias (bf16 each) of row g, of row g + 8. A set holds
//            for 64 columns (1 a stage) or for 32 (2 a stage: quantisation groups of 32). A scale is stored times
//            2^133, which lets a code be multiplied as it is cut out of its word (matmul_format.cuh); that is exact
//            below 2^-5. A matrix with a larger scale is kAffine4Wide or kAffine8Wide: the same with scales as they
//            are, slower. kFp8 has there, instead of scale and bias, the two parts of a scale (matmul_pack_scales.h).
// Values are bf16: bf16 as they are; f16 and f32 rounded to nearest even; affine is fma(scale, code, bias) in bf16, one
// rounding of the exact value, when scales and biases are bf16; FP8 and FP4 are code times scale times global scale,
// one rounding of the exact value (matmul_pack_scales.h). Codes of 2, 3, 5 and 6 bits are stored as 8. Affine weights
// with other scales are dequantised when packing: fp32 fma, then rounded to bf16 (two roundings). A group of 128 is
// stored as two of 64.
#pragma once

#include <memory>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/cuda/matmul.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

enum class CudaWeightKind : uint8_t { kBf16, kAffine4, kAffine8, kAffine4Wide, kAffine8Wide, kFp8, kFp4 };

inline constexpr int kTileRows = 16;
inline constexpr int kStageColumns = 64;

/// Bits of a weight without its scales.
__host__ __device__ constexpr int kept_bits(CudaWeightKind kind) {
  if (kind == CudaWeightKind::kBf16) return 16;
  return kind == CudaWeightKind::kAffine4 || kind == CudaWeightKind::kAffine4Wide || kind == CudaWeightKind::kFp4 ? 4
                                                                                                                  : 8;
}
__host__ __device__ constexpr bool has_wide_scales(CudaWeightKind kind) {
  return kind == CudaWeightKind::kAffine4Wide || kind == CudaWeightKind::kAffine8Wide;
}
/// Bytes of a stage of a tile.
__host__ __device__ constexpr int stage_bytes(CudaWeightKind kind, int sets) {
  return 128 * kept_bits(kind) + 64 * sets + (kind == CudaWeightKind::kFp4 ? 16 : 0);
}
/// Where in a stage a lane's piece is; `upper` means row g + 8.
__host__ __device__ constexpr int bf16_offset(int half, int step, int lane) {
  return (half * 2 + step) * 512 + lane * 16;
}
__host__ __device__ constexpr int affine4_offset(int half, int upper, int lane) {
  return lane * 16 + half * 8 + upper * 4;
}
__host__ __device__ constexpr int affine8_offset(int half, int upper, int lane) {
  return half * 512 + lane * 16 + upper * 8;
}
/// Where the scale and bias (4 bytes) of a row of a set are.
__host__ __device__ constexpr int scale_offset(CudaWeightKind kind, int sets, int set, int g, int upper) {
  return 128 * kept_bits(kind) + g * 8 * sets + set * 8 + upper * 4;
}
/// Bit of a 4-bit code in its word; i is the column within the lane's 8.
__host__ __device__ constexpr int affine4_bit(int i) { return 4 * (i / 2) + 16 * (i % 2); }

/// kFp4: bit, in a half of a word, of bit b (3 is the sign) of the half's code j (0 to 3), which is column 2 j or 2 j
/// + 1. A shift and a mask of the halves' bits {15, 8, 7, 6} make codes 0, 1 and 2 a sign, an exponent and a mantissa
/// of bf16.
__host__ __device__ constexpr int fp4_bit(int j, int b) {
  constexpr int kBits[4][4] = {{6, 7, 8, 15}, {3, 4, 5, 12}, {0, 1, 2, 9}, {11, 10, 13, 14}};
  return kBits[j][b];
}
/// kFp8: the same for bit b (7 is the sign) of the half's code j (0, 1); the mask is {15, 10 … 4}.
__host__ __device__ constexpr int fp8_bit(int j, int b) {
  if (j == 0) return b == 7 ? 15 : 4 + b;
  return b == 7 ? 11 : b < 4 ? b : 8 + b;
}
/// kFp4: where the scales of a lane's 8 columns of both halves are, and the factors.
__host__ __device__ constexpr int fp4_scale_offset(int sets, int lane) {
  return 512 + lane / 4 * 8 * sets + lane % 4 * sets / 2 * 4;
}
__host__ __device__ constexpr int fp4_factors_offset(int sets) { return 512 + 64 * sets; }

/// Consecutive packed rows of one format.
struct CudaWeightSegment {
  CudaWeightKind kind = CudaWeightKind::kBf16;
  int sets = 0;           // scale sets a stage, affine only
  int64_t first_row = 0;  // its first row's place in the matrix
  int64_t rows = 0;       // rows of the matrix (kGateUp: both of a pair counted)
  int64_t tiles = 0;
  int64_t stages = 0;             // a tile
  std::shared_ptr<void> memory;   // device memory, shared with views
  const uint8_t* data = nullptr;  // first tile

  int64_t tile_bytes() const { return stages * stage_bytes(kind, sets); }
  int64_t bytes() const { return tiles * tile_bytes(); }
};

/// Immutable once packed; may be used by several threads and streams of its device.
class CudaWeight : public Weight {
 public:
  CudaWeight(int64_t rows, int64_t cols, CudaPairing pairing, std::vector<CudaWeightSegment> segments)
      : rows_(rows), cols_(cols), pairing_(pairing), segments_(std::move(segments)) {}

  int64_t out_features() const override { return rows_; }
  int64_t in_features() const override { return cols_; }
  int64_t bytes() const override {
    int64_t bytes = 0;
    for (const CudaWeightSegment& segment : segments_) bytes += segment.bytes();
    return bytes;
  }
  CudaPairing pairing() const { return pairing_; }
  const std::vector<CudaWeightSegment>& segments() const { return segments_; }

 private:
  int64_t rows_;
  int64_t cols_;
  CudaPairing pairing_;
  std::vector<CudaWeightSegment> segments_;
};

}  // namespace tensorfold
