// EXL3: trellis tiles, codebooks and the Hadamard transform of a band of rows.
//
// Layout and formulas: the public exllamav3 format. A tile holds 256 values in the fragment order of a GPU's matrix
// instruction; value p is a function of the 16 bits that end at bit (p + 1) * bits of the tile's stream, which wraps.
#include <array>
#include <cmath>
#include <cstring>

#include "kernels/numerics/check.h"
#include "kernels/ops/dequantise.h"
#include "kernels/ops/small_floats.h"

namespace tensorfold {
namespace {

constexpr int64_t kBlock = 128;
constexpr int64_t kTile = 16;

// Nearest f16 number, ties to even, of a number under 65504.
double round_to_f16(double value) {
  if (value == 0) return value;
  int exponent = 0;
  std::frexp(value, &exponent);
  const int quantum = exponent - 11 < -24 ? -24 : exponent - 11;
  return std::ldexp(std::nearbyint(std::ldexp(value, -quantum)), quantum);
}

float compute_value(Exl3Codebook codebook, uint32_t state) {
  if (codebook == Exl3Codebook::kMul1) {
    const uint32_t x = state * 0x83DCD12Du;
    const uint32_t sum = (x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24);
    const double h = static_cast<double>(float_of_f16(static_cast<uint16_t>(0x6400 + sum)));
    return static_cast<float>(
        round_to_f16(h * static_cast<double>(float_of_f16(0x1EEE)) + static_cast<double>(float_of_f16(0xC931))));
  }
  uint32_t x = codebook == Exl3Codebook::kMcg ? state * 0xCBAC1FEDu : state * 89226354u + 64248484u;
  x = (x & 0x8FFF8FFFu) ^ 0x3B603B60u;
  const double sum = static_cast<double>(float_of_f16(static_cast<uint16_t>(x))) +
                     static_cast<double>(float_of_f16(static_cast<uint16_t>(x >> 16)));
  return static_cast<float>(round_to_f16(sum));
}

const float* codebook_table(Exl3Codebook codebook) {
  const auto make = [](Exl3Codebook which) {
    std::vector<float> table(65536);
    for (uint32_t state = 0; state < 65536; ++state) table[state] = compute_value(which, state);
    return table;
  };
  switch (codebook) {
    case Exl3Codebook::kMcg: {
      static const std::vector<float> mcg = make(Exl3Codebook::kMcg);
      return mcg.data();
    }
    case Exl3Codebook::kMul1: {
      static const std::vector<float> mul1 = make(Exl3Codebook::kMul1);
      return mul1.data();
    }
    case Exl3Codebook::k3Inst:
      break;
  }
  static const std::vector<float> inst = make(Exl3Codebook::k3Inst);
  return inst.data();
}

// 128 numbers `stride` apart times the Sylvester matrix of +-1.
void hadamard(double* x, int64_t stride) {
  for (int64_t half = 1; half < kBlock; half *= 2) {
    for (int64_t i = 0; i < kBlock; i += 2 * half) {
      for (int64_t j = i; j < i + half; ++j) {
        const double a = x[j * stride], b = x[(j + half) * stride];
        x[j * stride] = a + b;
        x[(j + half) * stride] = a - b;
      }
    }
  }
}

double side(const std::byte* sides, int64_t index) {
  uint16_t half;
  std::memcpy(&half, sides + 2 * index, 2);
  return static_cast<double>(float_of_f16(half));
}

}  // namespace

float exl3_value(Exl3Codebook codebook, uint16_t state) { return codebook_table(codebook)[state]; }

int exl3_half_bits(int64_t tile_bytes, Exl3Codebook codebook) {
  if (tile_bytes % 16 != 0 || tile_bytes < 32 || tile_bytes > 256) return 0;
  const int half_bits = static_cast<int>(tile_bytes / 16);
  const bool halves = codebook == Exl3Codebook::kMul1 && half_bits < 8;
  return half_bits % 2 == 0 || halves ? half_bits : 0;
}

void decode_exl3_tile(const std::byte* tile, int half_bits, Exl3Codebook codebook, float out[256]) {
  const float* table = codebook_table(codebook);
  const int total = 128 * half_bits;
  // Stream bytes, first bit highest: the bytes of each 32-bit word backwards; and the first ones again, for the wrap.
  uint8_t stream[256 + 4];
  for (int i = 0; i < total / 8; ++i) stream[i] = static_cast<uint8_t>(tile[i / 4 * 4 + 3 - i % 4]);
  for (int i = 0; i < 4; ++i) stream[total / 8 + i] = stream[i];
  for (int p = 0; p < 256; ++p) {
    const int start = ((p + 1) * half_bits / 2 - 16 + total) % total;
    const uint32_t bits = static_cast<uint32_t>(stream[start / 8]) << 16 |
                          static_cast<uint32_t>(stream[start / 8 + 1]) << 8 | stream[start / 8 + 2];
    const int lane = p / 8, j = p % 8;
    const int k = 2 * (lane % 4) + (j & 1) + 8 * (j >> 1 & 1), n = lane / 4 + 8 * (j >> 2);
    out[k * kTile + n] = table[bits >> (8 - start % 8) & 0xFFFF];
  }
}

void WeightView::fill_exl3_band(const MatrixSource& s, int64_t band, int64_t first_block, int64_t end_block) {
  const int half_bits = exl3_half_bits(s.tile_bytes, s.codebook);
  kernel_check(half_bits > 0, "dequantise: EXL3 tiles of no known width");
  const int64_t width = (end_block - first_block) * kBlock, tile_columns = s.whole_rows / kTile;
  band_values_.resize(static_cast<size_t>(kBlock * width));
  for (int64_t k_tile = first_block * 8; k_tile < end_block * 8; ++k_tile) {
    for (int64_t n_tile = 0; n_tile < 8; ++n_tile) {
      float tile[256];
      decode_exl3_tile(s.data + (k_tile * tile_columns + band * 8 + n_tile) * s.tile_bytes, half_bits, s.codebook,
                       tile);
      double* out = band_values_.data() + n_tile * kTile * width + (k_tile - first_block * 8) * kTile;
      for (int64_t k = 0; k < kTile; ++k) {
        for (int64_t n = 0; n < kTile; ++n) out[n * width + k] = static_cast<double>(tile[k * kTile + n]);
      }
    }
  }
  for (int64_t column = 0; column < width; ++column) hadamard(band_values_.data() + column, width);
  for (int64_t row = 0; row < kBlock; ++row) {
    double* values = band_values_.data() + row * width;
    for (int64_t column = 0; column < width; column += kBlock) hadamard(values + column, 1);
    const double row_side = side(s.row_side, band * kBlock + row);
    for (int64_t i = 0; i < width; ++i) {
      values[i] = values[i] / 128.0 * (row_side * side(s.column_side, first_block * kBlock + i));
    }
  }
  band_data_ = s.data;
  band_ = band;
  band_first_ = first_block;
  band_end_ = end_block;
}

}  // namespace tensorfold
