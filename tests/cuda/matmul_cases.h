// Matrices in every format that the CUDA backend packs, with the bf16 values that they stand for; products of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/cuda/cuda_weight.h"
#include "kernels/ops/small_floats.h"
#include "tests/cuda/gpu.h"

namespace tensorfold {

inline uint16_t bf16_bits(double value) {  // nearest even, one rounding
  if (std::isnan(value)) return 0x7fc0;
  if (value == 0 || std::isinf(value))
    return static_cast<uint16_t>((std::signbit(value) ? 0x8000 : 0) | (value == 0 ? 0 : 0x7f80));
  int exponent;
  std::frexp(value, &exponent);
  const int unit = std::max(exponent, -125) - 8;
  const auto rounded = static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit));
  uint32_t bits;
  std::memcpy(&bits, &rounded, 4);
  return static_cast<uint16_t>(bits >> 16);
}

inline float bf16_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// A matrix as a checkpoint has it, and the bf16 values that it stands for.
struct TestMatrix {
  std::vector<uint8_t> codes;
  std::vector<uint16_t> scales, biases;
  std::vector<uint8_t> small_scales;  // of FP8 and FP4, in their own format
  std::vector<uint16_t> values;       // [rows, cols], bf16
  MatrixSource source;

  double at(int64_t row, int64_t col) const { return bf16_value(values[row * source.cols + col]); }
  /// The same values stored as bf16.
  MatrixSource dequantised() const {
    MatrixSource s;
    s.format = WeightFormat::kBf16;
    s.rows = source.rows;
    s.cols = source.cols;
    s.data = reinterpret_cast<const std::byte*>(values.data());
    s.row_bytes = source.cols * 2;
    return s;
  }
};

struct Format {
  int bits, group;
  bool wide = false;            // scales of 2^-5 and more
  std::string_view small = {};  // FP8 and FP4: its name
  std::string name() const {
    if (!small.empty()) return std::string(small);
    return std::to_string(bits) + " bits, group " + std::to_string(group) + (wide ? ", wide scales" : "");
  }
};

// FP8 and FP4: blocks of random scales. Columns are told apart by `group`: 32 where a stage has two sets of scales.
inline TestMatrix make_small_float_matrix(std::string_view name, int64_t rows, int64_t cols, uint32_t seed) {
  TestMatrix m;
  std::mt19937 engine(seed);
  MatrixSource& s = m.source;
  s.rows = rows;
  s.cols = cols;
  const bool four = name.find("fp4") != std::string_view::npos;
  s.format = four ? WeightFormat::kE2m1 : WeightFormat::kE4m3;
  s.row_bytes = four ? cols / 2 : cols;
  s.scale_format = name.starts_with("mx") ? WeightFormat::kE8m0 : four ? WeightFormat::kE4m3 : WeightFormat::kF32;
  if (name == "fp8 tensor") {
    s.block_rows = s.block_cols = MatrixSource::kWhole;
  } else if (name == "fp8 blocks") {
    s.block_rows = 24;
    s.block_cols = 128;
  } else {
    s.block_cols = name.starts_with("mx") ? 32 : 16;
  }
  if (name == "nvfp4") s.global_scale = 0.000237f;
  if (name == "nvfp4 divided") {
    s.global_scale = 4093.7f;
    s.divide_by_global = true;
  }
  const int64_t scale_rows = (rows - 1) / s.block_rows + 1, scale_cols = (cols - 1) / s.block_cols + 1;
  const int64_t bytes = s.scale_format == WeightFormat::kF32 ? 4 : 1;
  s.scale_row_bytes = scale_cols * bytes;
  std::vector<double> scales(static_cast<size_t>(scale_rows * scale_cols));
  m.small_scales.resize(scales.size() * static_cast<size_t>(bytes));
  for (size_t i = 0; i < scales.size(); ++i) {
    const uint32_t random = engine();
    if (bytes == 4) {
      const float scale = 0.0003f + static_cast<float>(random % 100000) * 3e-8f;
      std::memcpy(&m.small_scales[4 * i], &scale, 4);
      scales[i] = scale;
    } else if (s.scale_format == WeightFormat::kE8m0) {
      m.small_scales[i] = static_cast<uint8_t>(115 + random % 12);
      scales[i] = float_of_e8m0(m.small_scales[i]);
    } else {
      m.small_scales[i] = static_cast<uint8_t>(random % 127);  // 0 and subnormal ones too
      scales[i] = float_of_e4m3(m.small_scales[i]);
    }
  }
  m.codes.resize(static_cast<size_t>(rows * s.row_bytes));
  m.values.resize(static_cast<size_t>(rows * cols));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      double code;
      if (four) {
        const uint32_t random = engine() & 15, bits = random == 8 ? 0 : random;  // no -0: its sign may be lost
        m.codes[r * s.row_bytes + c / 2] |= static_cast<uint8_t>(bits << (c % 2 * 4));
        code = float_of_e2m1(static_cast<uint8_t>(m.codes[r * s.row_bytes + c / 2] >> (c % 2 * 4)));
      } else {
        uint8_t bits = static_cast<uint8_t>(engine());
        if ((bits & 0x7f) == 0x7f || bits == 0x80) bits = 0;
        m.codes[r * s.row_bytes + c] = bits;
        code = float_of_e4m3(bits);
      }
      const double scaled = code * scales[r / s.block_rows * scale_cols + c / s.block_cols];
      const double global = s.global_scale;
      m.values[r * cols + c] = bf16_bits(s.divide_by_global ? scaled / global : scaled * global);
    }
  }
  s.data = reinterpret_cast<const std::byte*>(m.codes.data());
  s.scales = reinterpret_cast<const std::byte*>(m.small_scales.data());
  return m;
}

// bits 16: bf16. Pointers are into the vectors' own memory, which moving keeps.
inline TestMatrix make_matrix(int bits, int group, int64_t rows, int64_t cols, uint32_t seed, bool wide = false) {
  TestMatrix m;
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.0f, 0.05f);
  m.values.resize(rows * cols);
  MatrixSource& s = m.source;
  s.rows = rows;
  s.cols = cols;
  if (bits == 16) {
    for (uint16_t& value : m.values) value = bf16_bits(normal(engine));
    s = m.dequantised();
    return m;
  }
  s.format = WeightFormat::kMlxAffine;
  s.bits = bits;
  s.group = group;
  s.row_bytes = cols * bits / 8;
  s.scale_row_bytes = cols / group * 2;
  m.codes.assign(rows * s.row_bytes + 1, 0);
  m.scales.resize(rows * cols / group);
  m.biases.resize(rows * cols / group);
  for (size_t i = 0; i < m.scales.size(); ++i) {
    // Below 2^-5, some subnormal; or, where wide, some large.
    const double odd = wide ? 300.0 : 0x1p-127;
    const double scale = normal(engine) * std::ldexp(1.0, 1 - bits) * (engine() % 16 == 0 ? odd : 1.0);
    m.scales[i] = bf16_bits(wide ? scale : std::clamp(scale, -0.031, 0.031));
    m.biases[i] = bf16_bits(normal(engine));
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const uint32_t code = engine() & ((1u << bits) - 1);
      const int64_t bit = c * bits;
      uint8_t* at = m.codes.data() + r * s.row_bytes + bit / 8;
      const uint32_t shifted = code << (bit % 8);
      at[0] |= static_cast<uint8_t>(shifted);
      if (shifted >> 8 != 0) at[1] |= static_cast<uint8_t>(shifted >> 8);
      const int64_t g = r * (cols / group) + c / group;
      m.values[r * cols + c] =
          bf16_bits(static_cast<double>(bf16_value(m.scales[g])) * code + static_cast<double>(bf16_value(m.biases[g])));
    }
  }
  s.data = reinterpret_cast<const std::byte*>(m.codes.data());
  s.scales = reinterpret_cast<const std::byte*>(m.scales.data());
  s.biases = reinterpret_cast<const std::byte*>(m.biases.data());
  return m;
}

inline TestMatrix make_matrix(const Format& format, int64_t rows, int64_t cols, uint32_t seed) {
  if (!format.small.empty()) return make_small_float_matrix(format.small, rows, cols, seed);
  return make_matrix(format.bits, format.group, rows, cols, seed, format.wide);
}

inline std::unique_ptr<CudaWeight> pack(std::span<const MatrixSource> blocks,
                                        CudaPairing pairing = CudaPairing::kNone) {
  std::string error;
  std::unique_ptr<CudaWeight> weight = pack_cuda_weight(blocks, pairing, &error);
  EXPECT_NE(weight, nullptr) << error << cuda_failure();
  return weight;
}
inline std::unique_ptr<CudaWeight> pack(const MatrixSource& source) { return pack({&source, 1}); }

// Rows of activations on the host: stride beyond cols holds NaN, which must never count.
struct Rows {
  int64_t cols, stride;
  std::vector<uint16_t> bits;
  int64_t rows() const { return static_cast<int64_t>(bits.size()) / stride; }
  double at(int64_t r, int64_t c) const { return bf16_value(bits[r * stride + c]); }
};

inline Rows make_rows(int64_t rows, int64_t cols, uint32_t seed) {
  Rows x{cols, (cols + 63) / 64 * 64 + 64, {}};
  x.bits.assign(rows * x.stride, 0x7fc0);
  const std::vector<float> values = random_floats(rows * cols, seed);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) x.bits[r * x.stride + c] = bf16_bits(values[r * cols + c]);
  }
  return x;
}

// Rows [first, first + count) of x alone.
inline Rows some_rows(const Rows& x, int64_t first, int64_t count) {
  return {x.cols, x.stride, {x.bits.begin() + first * x.stride, x.bits.begin() + (first + count) * x.stride}};
}

struct DeviceRowsOf {
  explicit DeviceRowsOf(const Rows& x) : cols(x.cols), stride(x.stride), rows(x.rows()), memory(x.bits) {}
  DeviceInput input() const { return {reinterpret_cast<__nv_bfloat16*>(memory.data()), rows, cols, stride}; }
  int64_t cols, stride, rows;
  DeviceArray<uint16_t> memory;
};

inline constexpr uint32_t kPoison = 0xffffffffu;
inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// out [rows, weight rows], after checking that nothing beside it was written.
inline std::vector<float> product(const CudaWeight& weight, const Rows& x) {
  const DeviceRowsOf device(x);
  const int64_t n = weight.out_features(), stride = n + 5;
  DeviceArray<float> out((x.rows() + 3) * stride);
  out.poison();
  const CudaMatmulJob job{&weight, device.input(), {out.data(), x.rows(), n, stride}};
  cuda_matmul(nullptr, {&job, 1});
  const std::vector<float> raw = out.get();
  EXPECT_EQ(cuda_failure(), "");
  std::vector<float> result(x.rows() * n);
  int wrong = 0;
  for (size_t i = 0; i < raw.size(); ++i) {
    const int64_t r = static_cast<int64_t>(i) / stride, c = static_cast<int64_t>(i) % stride;
    if (r < x.rows() && c < n) {
      result[r * n + c] = raw[i];
    } else if (bits_of(raw[i]) != kPoison && ++wrong < 4) {
      ADD_FAILURE() << "written outside: row " << r << " of " << x.rows() << ", column " << c << " of " << n;
    }
  }
  return result;
}

inline void expect_near(const TestMatrix& w, const Rows& x, const std::vector<float>& out, const std::string& what) {
  const int64_t n = w.source.rows;
  int wrong = 0;
  for (int64_t r = 0; r < x.rows(); ++r) {
    for (int64_t o = 0; o < n; ++o) {
      double sum = 0, magnitude = 0;
      for (int64_t c = 0; c < x.cols; ++c) {
        const double term = w.at(o, c) * x.at(r, c);
        sum += term;
        magnitude += std::abs(term);
      }
      const double difference = std::abs(out[r * n + o] - sum);
      if (!(difference <= 4e-6 * magnitude + 1e-30) && ++wrong <= 5) {
        ADD_FAILURE() << what << ": row " << r << " feature " << o << ": " << out[r * n + o] << ", should be " << sum;
      }
    }
  }
  EXPECT_EQ(wrong, 0) << what << ": " << wrong << " of " << x.rows() * n << " wrong";
}

inline void expect_same(std::span<const float> a, std::span<const float> b, int64_t cols, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  int wrong = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (bits_of(a[i]) != bits_of(b[i]) && ++wrong <= 5) {
      ADD_FAILURE() << what << ": row " << i / cols << " column " << i % cols << ": " << a[i] << " and " << b[i];
    }
  }
  EXPECT_EQ(wrong, 0) << what << ": " << wrong << " of " << a.size() << " differ";
}

inline constexpr Format kFormats[] = {{16, 0},
                                      {4, 64},
                                      {4, 32},
                                      {4, 128},
                                      {8, 64},
                                      {8, 32},
                                      {4, 64, true},
                                      {4, 32, true},
                                      {8, 64, true},
                                      {8, 32, true},
                                      {8, 64, false, "fp8 tensor"},
                                      {8, 64, false, "fp8 blocks"},
                                      {8, 32, false, "mxfp8"},
                                      {4, 64, false, "nvfp4"},
                                      {4, 64, false, "nvfp4 divided"},
                                      {4, 32, false, "mxfp4"}};

}  // namespace tensorfold
