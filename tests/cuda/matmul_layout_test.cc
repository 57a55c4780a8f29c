// The host's half of packing: where codes and scales lie, and what scales of FP8 and FP4 become. Runs without a GPU.
#include <bit>
#include <cmath>
#include <numeric>
#include <optional>
#include <random>
#include <string>

#include "kernels/cuda/matmul_pack_piece.h"
#include "kernels/cuda/matmul_pack_scales.h"
#include "tests/cuda/matmul_cases.h"

namespace tensorfold {
namespace {

// What the kernels make of column i of a lane's 8, in double.
uint16_t small_float_value(const PackFormat& packed, const uint8_t* stage, int half, int upper, int lane, int i) {
  const bool four = packed.kind == CudaWeightKind::kFp4;
  uint32_t word, code = 0;
  double hi, lo;
  if (four) {
    std::memcpy(&word, stage + affine4_offset(half, upper, lane), 4);
    for (int b = 0; b < 4; ++b) code |= (word >> (fp4_bit(i / 2, b) + 16 * (i % 2)) & 1) << b;
    uint32_t factors[4];
    std::memcpy(factors, stage + fp4_factors_offset(packed.sets), 16);
    const uint32_t bits = stage[fp4_scale_offset(packed.sets, lane) + 2 * half + upper] * factors[2];
    const double scale = static_cast<double>(std::bit_cast<float>(bits)) * std::bit_cast<float>(factors[3]) *
                         std::bit_cast<float>(factors[upper]) * 0x1p-126;
    EXPECT_EQ(static_cast<double>(static_cast<float>(scale)), scale) << "the kernels multiply in fp32";
    hi = bf16_value(bf16_bits(scale));
    lo = bf16_value(bf16_bits(scale - hi));
  } else {
    std::memcpy(&word, stage + affine8_offset(half, upper, lane) + 4 * (i / 4), 4);
    for (int b = 0; b < 8; ++b) code |= (word >> (fp8_bit(i % 4 / 2, b) + 16 * (i % 2)) & 1) << b;
    uint16_t parts[2];
    std::memcpy(parts, stage + scale_offset(packed.kind, packed.sets, packed.sets == 2 ? half : 0, lane / 4, upper), 4);
    hi = bf16_value(parts[0]) * 0x1p-120;
    lo = bf16_value(parts[1]) * 0x1p-120;
  }
  const double number = four ? float_of_e2m1(static_cast<uint8_t>(code)) : float_of_e4m3(static_cast<uint8_t>(code));
  return bf16_bits(number * hi + bf16_value(bf16_bits(number * lo)));
}

// The packed bytes are where the kernels look: read back with their offsets, on the host, every weight is found once.
TEST(MatmulLayout, PackedPiecesAreWhereKernelsLook) {
  for (const Format& format : kFormats) {
    const int64_t cols = format.group == 32 ? 96 : format.group == 128 ? 256 : 192;
    const TestMatrix m = make_matrix(format, 32, cols, 7);
    const PackFormat packed = pack_format(m.source);
    EXPECT_EQ(has_wide_scales(packed.kind), format.wide) << format.name();
    const int64_t stages = (cols + 63) / 64, row_bytes = staged_row_bytes(packed.kind, stages);
    const int64_t scale_bytes = staged_scale_bytes(packed.sets, stages);
    std::vector<uint8_t> staged(32 * (row_bytes + scale_bytes), 0xee);
    WeightView view;
    for (int64_t r = 0; r < 32; ++r) {
      stage_row(m.source, r, packed, stages, &staged[r * row_bytes], staged.data() + 32 * row_bytes + r * scale_bytes,
                view);
    }
    const int bytes = stage_bytes(packed.kind, packed.sets);
    std::vector<uint4> out(2 * stages * bytes / 16);
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = packed_piece(staged.data(), packed.kind, packed.sets,
                            factors_piece(packed.factors[0], packed.factors[1]), 2, stages, static_cast<int64_t>(i));
    }
    const auto* memory = reinterpret_cast<const uint8_t*>(out.data());
    for (int64_t row = 0; row < 32; ++row) {
      for (int64_t col = 0; col < stages * 64; ++col) {
        const uint8_t* stage = memory + (row / 16 * stages + col / 64) * bytes;
        const int half = col / 32 % 2, t = col / 8 % 4, i = col % 8, g = row % 8, upper = row / 8 % 2, lane = 4 * g + t;
        uint16_t value;
        if (packed.kind == CudaWeightKind::kBf16) {
          // Column 8 t + 4 step + {0, 1} of both rows, then {2, 3}: words (row, upper, row, upper).
          std::memcpy(&value, stage + bf16_offset(half, i / 4, lane) + 8 * (i / 2 % 2) + 4 * upper + 2 * (i % 2), 2);
        } else if (!format.small.empty()) {
          value = small_float_value(packed, stage, half, upper, lane, i);
        } else {
          uint32_t code;
          if (kept_bits(packed.kind) == 4) {
            std::memcpy(&code, stage + affine4_offset(half, upper, lane), 4);
            code = code >> affine4_bit(i) & 15;
          } else {
            code = stage[affine8_offset(half, upper, lane) + i];
          }
          uint16_t scale[2];
          std::memcpy(scale, stage + scale_offset(packed.kind, packed.sets, packed.sets == 2 ? half : 0, g, upper), 4);
          const double one = has_wide_scales(packed.kind) ? bf16_value(scale[0]) : bf16_value(scale[0]) * 0x1p-133;
          value = bf16_bits(one * code + bf16_value(scale[1]));
        }
        ASSERT_EQ(value, col < cols ? m.values[row * cols + col] : 0)
            << format.name() << " row " << row << " column " << col;
      }
    }
  }
}

// Shapes and formats that cannot be packed are refused with a sentence, before any device is asked for.
TEST(MatmulLayout, RefusesWhatCannotBePacked) {
  const TestMatrix good = make_matrix(4, 64, 16, 128, 1);
  MatrixSource bad = good.source;
  bad.bits = 7;
  EXPECT_NE(pack_source_error(bad).find("7 bits"), std::string::npos);
  bad = good.source;
  bad.group = 16;
  EXPECT_NE(pack_source_error(bad).find("groups of 16"), std::string::npos);
  bad = make_matrix(16, 0, 4, 12, 1).source;
  EXPECT_NE(pack_source_error(bad).find("12 columns"), std::string::npos);
  EXPECT_EQ(pack_source_error(good.source), "");
  std::string error;
  const TestMatrix other = make_matrix(16, 0, 32, 128, 1);
  const MatrixSource mixed[] = {good.source, other.source};
  EXPECT_EQ(pack_cuda_weight(mixed, CudaPairing::kGateUp, &error), nullptr);
  EXPECT_NE(error.find("equal rows"), std::string::npos) << error;
  EXPECT_EQ(pack_cuda_weight({}, CudaPairing::kNone, &error), nullptr);
  EXPECT_NE(error, "");
}

// Scales of FP8 in two parts give every weight its one rounding, also where the scale is next to a point at which a
// weight changes, or such a point itself.
TEST(MatmulLayout, PartsOfFp8ScalesChangeNoWeight) {
  std::mt19937_64 engine(5);
  const auto check = [](double scale) {
    const std::optional<uint32_t> parts = split_e4m3_scale(scale);
    ASSERT_TRUE(parts) << scale;
    const double hi = bf16_value(static_cast<uint16_t>(*parts)) * 0x1p-120;
    const double lo = bf16_value(static_cast<uint16_t>(*parts >> 16)) * 0x1p-120;
    for (int code = 0; code < 256; ++code) {
      if ((code & 0x7f) == 0x7f) continue;
      const double number = float_of_e4m3(static_cast<uint8_t>(code));
      const double got = bf16_value(bf16_bits(number * hi + bf16_value(bf16_bits(number * lo))));
      ASSERT_EQ(got, bf16_value(bf16_bits(number * scale))) << "scale " << scale << ", code " << code;
    }
  };
  // As a scale times a global scale has.
  const auto of_48_bits = [](double x) { return std::bit_cast<double>(std::bit_cast<uint64_t>(x) & ~uint64_t{31}); };
  for (int significand = 8; significand < 16; ++significand) {
    for (int half = 257; half < 512; half += 2) {
      const double edge = static_cast<double>(half) / significand * 0x1p-14;
      for (const double by : {0.0, 0x1p-40, -0x1p-40, 0x1p-24, -0x1p-24, 0x1p-16, -0x1p-16, 0x1.1p-14, -0x1.1p-14}) {
        check(of_48_bits(edge * (1 + by)));
        check(static_cast<double>(static_cast<float>(-edge * (1 + by))));
      }
    }
  }
  for (int i = 0; i < 20000; ++i)
    check(std::ldexp(static_cast<double>(engine() >> 16), static_cast<int>(engine() % 60) - 110));
  EXPECT_EQ(split_e4m3_scale(0.0), 0u);
  EXPECT_FALSE(split_e4m3_scale(0x1p7));
  EXPECT_FALSE(split_e4m3_scale(0x1p-100));
  EXPECT_FALSE(split_e4m3_scale(NAN));
}

// The same for FP4's global scales, all scales of blocks and all codes.
TEST(MatmulLayout, FactorsOfFp4ChangeNoWeight) {
  std::mt19937_64 engine(6);
  std::vector<uint8_t> scales(127), codes(8 * 127);
  std::iota(scales.begin(), scales.end(), uint8_t{0});
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(0x10 * (2 * i % 16 + 1) + 2 * i % 16);
  MatrixSource s;
  s.format = WeightFormat::kE2m1;
  s.scale_format = WeightFormat::kE4m3;
  s.rows = 1;
  s.cols = 16 * 127;
  s.row_bytes = s.cols / 2;
  s.scale_row_bytes = 127;
  s.block_cols = 16;
  s.data = reinterpret_cast<const std::byte*>(codes.data());
  s.scales = reinterpret_cast<const std::byte*>(scales.data());
  std::vector<uint16_t> values(static_cast<size_t>(s.cols));
  const auto check = [&](float global, bool divide) {
    s.global_scale = global;
    s.divide_by_global = divide;
    const std::optional<Fp4Factors> factors = fp4_factors(s);
    ASSERT_TRUE(factors) << global;
    WeightView().dequantise_bf16(s, 0, 0, s.cols, values.data());
    for (int64_t c = 0; c < s.cols; ++c) {
      const double scale = static_cast<double>(float_of_e4m3(scales[c / 16])) * factors->factor * 0x1p-126;
      ASSERT_EQ(static_cast<double>(static_cast<float>(scale)), scale);
      const double hi = bf16_value(bf16_bits(scale)), lo = bf16_value(bf16_bits(scale - hi));
      const double number = float_of_e2m1(codes[c / 2] >> (c % 2 * 4) & 15);
      ASSERT_EQ(bf16_value(bf16_bits(number * hi + bf16_value(bf16_bits(number * lo)))), bf16_value(values[c]))
          << "global scale " << global << ", scale " << int{scales[c / 16]} << ", code " << number;
    }
  };
  for (int i = 0; i < 300; ++i) {
    const auto global =
        static_cast<float>(std::ldexp(static_cast<double>(engine() >> 11), -53 - 9 - static_cast<int>(engine() % 20)));
    check(global, false);
    check(1.0f / global, true);
  }
  for (int significand : {8, 9, 11, 13, 15, 24, 33, 39, 45}) {
    for (int half = 257; half < 512; half += 22) {
      const double edge = static_cast<double>(half) / significand * 0x1p-18;
      for (const double by : {0.0, 0x1p-24, -0x1p-24, 0x1p-19, -0x1p-19}) {
        check(static_cast<float>(edge * (1 + by)), false);
        check(static_cast<float>(1 / (edge * (1 + by))), true);
      }
    }
  }
  s.global_scale = 1.0f;  // scales up to 448
  s.divide_by_global = false;
  EXPECT_FALSE(fp4_factors(s));
  EXPECT_EQ(fp4_sets(s), 1);
  s.first_col = 8;
  EXPECT_EQ(fp4_sets(s), 2);
  s.first_col = 4;
  EXPECT_EQ(fp4_sets(s), 0) << "a block begins inside a lane's columns";
}

}  // namespace
}  // namespace tensorfold
