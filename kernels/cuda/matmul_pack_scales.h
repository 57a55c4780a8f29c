// Scales of FP8 and FP4 weights as the kernels want them.
//
// A weight is round(c S) in bf16, c its code's number and S its block's scale times the matrix' global one: a real
// number of many bits. The kernels compute fma(c, hi, round(c lo)) in bf16, S ~ hi + lo. That is the same number for
// all codes c, because S may be moved: round(c S) changes only where c S passes a number half-way between two of bf16,
// so all S between two such points give the same weights. The points of all significands c are at least 2^-12.9 (e4m3:
// 8 to 15) or 2^-14.5 (e2m1 times e4m3) of their value apart, and what hi and lo lose is at most 2^-16 of it. S that is
// such a point itself has at most 9 bits, and nothing is lost.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/ops/matrix_source.h"

namespace tensorfold {

/// hi (low half) and lo (high half) of a scale of e4m3 codes, times 2^120: the kernels read a code as c 2^-120. Nothing
/// for scales that are not 0 and outside 2^-90 to 2^6, of either sign.
std::optional<uint32_t> split_e4m3_scale(double scale);

/// What a lane needs to make hi and lo of an FP4 block from the byte of its scale: the number is
/// bits(byte * multiplier) * first * factor, S times 2^126, all of it exact in fp32.
struct Fp4Factors {
  float factor = 0.0f;      // the global scale, moved, of at most 18 bits, times 2^126
  uint32_t multiplier = 0;  // 2^20 for e4m3, 2^23 for e8m0
  float first = 0.0f;       // 2^120, or 1
  bool operator==(const Fp4Factors&) const = default;
};

/// Nothing where an FP4 matrix has scales of another format, negative ones, or too large or small ones (S of 2 and
/// more, or less than 2^-90 and not 0). Reads all of its scales.
std::optional<Fp4Factors> fp4_factors(const MatrixSource& source);

/// Scale sets of an FP4 matrix: 1 for a scale for 16 columns, 2 for 8 (blocks begin inside 16 columns, but not inside
/// 8), or 0 where blocks begin elsewhere.
int fp4_sets(const MatrixSource& source);

/// Scale sets that a stage of 64 columns of an FP8 matrix needs (1, or 2 where blocks are of 32 columns), or 0 where
/// blocks begin elsewhere.
int fp8_sets(const MatrixSource& source);

/// All scales of an FP8 matrix can be split. Reads them.
bool splits_e4m3_scales(const MatrixSource& source);

}  // namespace tensorfold
