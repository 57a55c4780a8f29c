#include "kernels/cuda/matmul_pack_scales.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/ops/small_floats.h"
#include "kernels/ops/weight_scales.h"

namespace tensorfold {
namespace {

double rounded(double value) { return static_cast<double>(float_of_bf16(bf16_of_double(value))); }

// Where c S lies between two numbers of bf16: its distance from the point half-way, in parts of c S. A number of bf16
// has 8 significant bits.
double distance_from_half(double product) {
  int exponent;
  const double scaled = std::frexp(product, &exponent) * 256;  // 128 to 256
  return (scaled - std::floor(scaled) - 0.5) / scaled;
}

// The kernels' arithmetic, for one code.
bool gives_the_weight(double hi, double lo, double code, double scale) {
  return rounded(code * hi + rounded(code * lo)) == rounded(code * scale);
}

constexpr std::array<int, 8> kE4m3Significands = {8, 9, 10, 11, 12, 13, 14, 15};

// Significands of e2m1 (1 and 1.5, as 2 and 3) times those of e4m3.
std::vector<int> fp4_significands(WeightFormat scale_format) {
  std::vector<int> all;
  for (int code : {2, 3}) {
    if (scale_format == WeightFormat::kE8m0) {
      all.push_back(code);
    } else {
      for (int scale : kE4m3Significands) all.push_back(code * scale);
    }
  }
  return all;
}

// `value` with at most `bits` significant bits, nearest.
double with_bits(double value, int bits) {
  int exponent;
  const double fraction = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(fraction, bits)), exponent - bits);
}

// A number at least `margin` of itself away from every point where one of the weights changes, with the same weights as
// `value`; `value` itself where it is such a point.
double moved_from_edges(double value, std::span<const int> significands, double margin) {
  double least = 0, most = HUGE_VAL;
  for (const int significand : significands) {
    const double distance = distance_from_half(significand * value);
    if (distance == 0) return value;
    const double edge = value * (1 - distance);  // to first order: the points are few, and far apart
    if (distance > 0) {
      least = std::max(least, edge * (1 + margin));
    } else {
      most = std::min(most, edge * (1 - margin));
    }
  }
  return std::clamp(value, std::min(least, most), std::max(least, most));
}

// 1 where blocks begin at multiples of `columns`, 2 at those of half as many, else 0.
int sets_of_runs(const MatrixSource& s, int64_t columns) {
  if (s.block_cols >= s.first_col + s.cols) return 1;
  for (const int sets : {1, 2}) {
    if (s.first_col % (columns / sets) == 0 && s.block_cols % (columns / sets) == 0) return sets;
  }
  return 0;
}

}  // namespace

std::optional<uint32_t> split_e4m3_scale(double scale) {
  if (scale == 0) return 0;
  const double magnitude = std::fabs(scale);
  if (!(magnitude >= 0x1p-90 && magnitude < 0x1p6)) return std::nullopt;
  const double moved = std::copysign(moved_from_edges(magnitude, kE4m3Significands, 0x1p-14), scale);
  const double hi = rounded(moved), lo = rounded(moved - hi);
  for (const int code : kE4m3Significands) {
    if (!gives_the_weight(hi, lo, code, scale)) return std::nullopt;
  }
  return static_cast<uint32_t>(bf16_of_double(hi * 0x1p120)) | static_cast<uint32_t>(bf16_of_double(lo * 0x1p120))
                                                                   << 16;
}

std::optional<Fp4Factors> fp4_factors(const MatrixSource& s) {
  const bool e8m0 = s.scale_format == WeightFormat::kE8m0;
  if (s.format != WeightFormat::kE2m1 || !(e8m0 || s.scale_format == WeightFormat::kE4m3)) return std::nullopt;
  const double global =
      s.divide_by_global ? 1.0 / static_cast<double>(s.global_scale) : static_cast<double>(s.global_scale);
  if (!(global > 0 && std::isfinite(global))) return std::nullopt;
  const ScaleRange range = scales_of(s);
  uint8_t least = 255, most = 0;  // that are not 0
  for (int64_t row = range.first_row; row < range.end_row; ++row) {
    const auto* scales = reinterpret_cast<const uint8_t*>(s.scales + row * s.scale_row_bytes);
    for (int64_t col = range.first_col; col < range.end_col; ++col) {
      most = std::max(most, scales[col]);
      if (scales[col] != 0 || e8m0) least = std::min(least, scales[col]);
    }
  }
  const auto number = [&](uint8_t code) {
    return static_cast<double>(e8m0 ? float_of_e8m0(code) : float_of_e4m3(code));
  };
  if (!e8m0 && most >= 0x7f) return std::nullopt;  // negative, NaN
  if (e8m0 && (least == 0 || most == 255)) return std::nullopt;
  if (most > 0 && !(number(most) * global < 2)) return std::nullopt;
  if (least <= most && !(number(least) * global >= 0x1p-90)) return std::nullopt;
  const std::vector<int> significands = fp4_significands(s.scale_format);
  const double moved = with_bits(moved_from_edges(global, significands, 0x1.5p-16), 18);
  for (const int scale :
       e8m0 ? std::vector<int>{1} : std::vector<int>(kE4m3Significands.begin(), kE4m3Significands.end())) {
    const double exact = scale * moved, hi = rounded(exact), lo = rounded(exact - hi);
    for (const double code : {1.0, 1.5}) {
      if (!gives_the_weight(hi, lo, code, scale * global)) return std::nullopt;
    }
  }
  return Fp4Factors{static_cast<float>(moved * 0x1p126), e8m0 ? 1u << 23 : 1u << 20, e8m0 ? 1.0f : 0x1p120f};
}

int fp8_sets(const MatrixSource& s) { return sets_of_runs(s, 64); }
int fp4_sets(const MatrixSource& s) { return s.first_col % 2 == 0 ? sets_of_runs(s, 16) : 0; }

bool splits_e4m3_scales(const MatrixSource& s) {
  const ScaleRange range = scales_of(s);
  double last = 0;
  for (int64_t row = range.first_row; row < range.end_row; ++row) {
    for (int64_t col = range.first_col; col < range.end_col; ++col) {
      const double scale = scale_at(s, row, col);
      if (scale == last) continue;
      if (!split_e4m3_scale(scale)) return false;
      last = scale;
    }
  }
  return true;
}

}  // namespace tensorfold
