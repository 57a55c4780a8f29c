#include "kernels/cuda/matmul.h"

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>

#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/matmul_pack_piece.h"
#include "tests/cuda/gpu.h"

namespace tensorfold {
namespace {

uint16_t bf16_bits(double value) {  // nearest even, one rounding
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

float bf16_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// A matrix as a checkpoint has it, and the bf16 values that it stands for.
struct TestMatrix {
  std::vector<uint8_t> codes;
  std::vector<uint16_t> scales, biases;
  std::vector<uint16_t> values;  // [rows, cols], bf16
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

// bits 16: bf16. Pointers are into the vectors' own memory, which moving keeps.
TestMatrix make_matrix(int bits, int group, int64_t rows, int64_t cols, uint32_t seed, bool wide = false) {
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

std::unique_ptr<CudaWeight> pack(std::span<const MatrixSource> blocks, CudaPairing pairing = CudaPairing::kNone) {
  std::string error;
  std::unique_ptr<CudaWeight> weight = pack_cuda_weight(blocks, pairing, &error);
  EXPECT_NE(weight, nullptr) << error << cuda_failure();
  return weight;
}
std::unique_ptr<CudaWeight> pack(const MatrixSource& source) { return pack({&source, 1}); }

// Rows of activations on the host: stride beyond cols holds NaN, which must never count.
struct Rows {
  int64_t cols, stride;
  std::vector<uint16_t> bits;
  int64_t rows() const { return static_cast<int64_t>(bits.size()) / stride; }
  double at(int64_t r, int64_t c) const { return bf16_value(bits[r * stride + c]); }
};

Rows make_rows(int64_t rows, int64_t cols, uint32_t seed) {
  Rows x{cols, (cols + 63) / 64 * 64 + 64, {}};
  x.bits.assign(rows * x.stride, 0x7fc0);
  const std::vector<float> values = random_floats(rows * cols, seed);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) x.bits[r * x.stride + c] = bf16_bits(values[r * cols + c]);
  }
  return x;
}

// Rows [first, first + count) of x alone.
Rows some_rows(const Rows& x, int64_t first, int64_t count) {
  return {x.cols, x.stride, {x.bits.begin() + first * x.stride, x.bits.begin() + (first + count) * x.stride}};
}

struct DeviceRowsOf {
  explicit DeviceRowsOf(const Rows& x) : cols(x.cols), stride(x.stride), rows(x.rows()), memory(x.bits) {}
  DeviceInput input() const { return {reinterpret_cast<__nv_bfloat16*>(memory.data()), rows, cols, stride}; }
  int64_t cols, stride, rows;
  DeviceArray<uint16_t> memory;
};

constexpr uint32_t kPoison = 0xffffffffu;
uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// out [rows, weight rows], after checking that nothing beside it was written.
std::vector<float> product(const CudaWeight& weight, const Rows& x) {
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

void expect_near(const TestMatrix& w, const Rows& x, const std::vector<float>& out, const std::string& what) {
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

void expect_same(std::span<const float> a, std::span<const float> b, int64_t cols, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  int wrong = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (bits_of(a[i]) != bits_of(b[i]) && ++wrong <= 5) {
      ADD_FAILURE() << what << ": row " << i / cols << " column " << i % cols << ": " << a[i] << " and " << b[i];
    }
  }
  EXPECT_EQ(wrong, 0) << what << ": " << wrong << " of " << a.size() << " differ";
}

struct Format {
  int bits, group;
  bool wide = false;  // scales of 2^-5 and more
  std::string name() const {
    return std::to_string(bits) + " bits, group " + std::to_string(group) + (wide ? ", wide scales" : "");
  }
};
constexpr Format kFormats[] = {{16, 0}, {4, 64},       {4, 32},       {4, 128},      {8, 64},
                               {8, 32}, {4, 64, true}, {4, 32, true}, {8, 64, true}, {8, 32, true}};

// The packed bytes are where the kernels look: read back with their offsets, on the host, every weight is found once.
TEST(MatmulLayout, PackedPiecesAreWhereKernelsLook) {
  for (const Format& format : kFormats) {
    const int64_t cols = format.group == 32 ? 96 : format.group == 128 ? 256 : 192;
    const TestMatrix m = make_matrix(format.bits, format.group, 32, cols, 7, format.wide);
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
      out[i] = packed_piece(staged.data(), packed.kind, packed.sets, 2, stages, static_cast<int64_t>(i));
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
  const TestMatrix other = make_matrix(16, 0, 16, 128, 1);
  const MatrixSource mixed[] = {good.source, other.source};
  EXPECT_EQ(pack_cuda_weight(mixed, CudaPairing::kGateUp, &error), nullptr);
  EXPECT_NE(error.find("alike"), std::string::npos) << error;
  EXPECT_EQ(pack_cuda_weight({}, CudaPairing::kNone, &error), nullptr);
  EXPECT_NE(error, "");
}

// Each kernel computes the product: all formats, row counts at both sides of every change of kernel, odd sizes.
TEST(MatmulTest, MatchesDoublePrecision) {
  TF_NEED_GPU();
  for (const Format& format : kFormats) {
    const int64_t cols = format.group == 128 ? 384 : 224 + (format.group == 64 ? 32 : 0);
    const TestMatrix m = make_matrix(format.bits, format.group, 76, cols, 11, format.wide);
    const auto weight = pack(m.source);
    const Rows x = make_rows(131, cols, 12);
    for (int64_t rows : {1, 3, 8, 9, 16, 17, 32, 33, 64, 65, 128, 131}) {
      const Rows some = some_rows(x, 0, rows);
      expect_near(m, some, product(*weight, some), format.name() + ", " + std::to_string(rows) + " rows");
    }
  }
}

// A K that ends inside a block of 32 (and NaN behind it), and K shorter than the prefetch.
TEST(MatmulTest, ShortAndRaggedColumns) {
  TF_NEED_GPU();
  for (int64_t cols : {8, 24, 32, 40, 64, 72, 136, 520, 1032}) {
    const TestMatrix m = make_matrix(16, 0, 40, cols, 21);
    const auto weight = pack(m.source);
    for (int64_t rows : {1, 5, 12, 30, 50, 70}) {
      const Rows x = make_rows(rows, cols, 22);
      expect_near(m, x, product(*weight, x), std::to_string(cols) + " columns, " + std::to_string(rows) + " rows");
    }
  }
  for (int64_t cols : {32, 64, 96, 832}) {
    const TestMatrix m = make_matrix(4, 32, 24, cols, 23);
    const auto weight = pack(m.source);
    for (int64_t rows : {1, 12, 70}) {
      const Rows x = make_rows(rows, cols, 24);
      expect_near(m, x, product(*weight, x), std::to_string(cols) + " columns of 4 bits");
    }
  }
}

// The contract: a row's bits are the same alone, among any number of rows, at any place, beside NaNs and infinities.
TEST(MatmulTest, RowsDoNotDependOnTheirNeighbours) {
  TF_NEED_GPU();
  constexpr int64_t kRows = 200;
  for (const Format& format : kFormats) {
    const int64_t cols = format.group == 32 ? 544 : 640, n = 72;
    const TestMatrix m = make_matrix(format.bits, format.group, n, cols, 31, format.wide);
    const auto weight = pack(m.source);
    const Rows x = make_rows(kRows, cols, 32);
    std::vector<float> alone;
    for (int64_t r = 0; r < kRows; ++r) {
      const std::vector<float> one = product(*weight, some_rows(x, r, 1));
      alone.insert(alone.end(), one.begin(), one.end());
    }
    for (int64_t rows : {2, 7, 8, 11, 16, 21, 32, 45, 64, 67, 128, 150, 200}) {
      const int64_t first = (kRows - rows) / 2;
      const std::vector<float> together = product(*weight, some_rows(x, first, rows));
      expect_same(together, std::span(alone).subspan(first * n, rows * n), n,
                  format.name() + ", " + std::to_string(rows) + " rows");
      // Every third row is kept, the others are NaN and infinity.
      Rows hostile = some_rows(x, first, rows);
      for (int64_t r = 0; r < rows; ++r) {
        if (r % 3 == 1) continue;
        for (int64_t c = 0; c < cols; ++c) hostile.bits[r * x.stride + c] = r % 3 == 0 ? 0x7fc0 : 0x7f80;
      }
      const std::vector<float> beside = product(*weight, hostile);
      for (int64_t r = 1; r < rows; r += 3) {
        expect_same(std::span(beside).subspan(r * n, n), std::span(alone).subspan((first + r) * n, n), n,
                    format.name() + ", hostile neighbours, row " + std::to_string(r) + " of " + std::to_string(rows));
      }
    }
  }
}

// A quantised weight gives the bytes of its dequantised bf16 copy; odd bit widths too.
TEST(MatmulTest, QuantisedEqualsDequantised) {
  TF_NEED_GPU();
  for (const Format& format : {Format{4, 64}, Format{4, 32}, Format{4, 128}, Format{8, 64}, Format{8, 32},
                               Format{2, 64}, Format{3, 64}, Format{5, 32}, Format{6, 128}}) {
    const TestMatrix m = make_matrix(format.bits, format.group, 52, 768, 41, format.wide);
    const auto quantised = pack(m.source);
    const auto plain = pack(m.dequantised());
    for (int64_t rows : {1, 10, 24, 60, 90}) {
      const Rows x = make_rows(rows, 768, 42);
      expect_same(product(*quantised, x), product(*plain, x), 52,
                  format.name() + ", " + std::to_string(rows) + " rows");
    }
  }
}

// Kernels convert codes in two ways, by the size of the scales around: all small, all large, and both in one tile, with
// scales just below and at the limit of 2^-5, of either sign, zero and subnormal.
TEST(MatmulTest, SmallAndLargeScales) {
  TF_NEED_GPU();
  constexpr int64_t kRows = 48, kCols = 1152;
  for (const Format& format : {Format{4, 64}, Format{4, 32}, Format{8, 64}, Format{8, 32}}) {
    for (int kind = 0; kind < 4; ++kind) {
      TestMatrix m = make_matrix(format.bits, format.group, kRows, kCols, 44, format.wide);
      const int64_t groups = kCols / format.group;
      constexpr uint16_t kSmall[] = {0x3cff, 0xbcff, 0x3c01, 0x0000, 0x8000, 0x0001, 0x807f, 0x3a55};
      constexpr uint16_t kLarge[] = {0x3d00, 0xbd00, 0x3f81};
      for (size_t i = 0; i < m.scales.size(); ++i) {
        // Kind 2: one large scale of a tile; 3: a matrix whose later columns are large.
        const int64_t row = static_cast<int64_t>(i) / groups, group = static_cast<int64_t>(i) % groups;
        const bool large = kind == 1 || (kind == 2 && row == 21 && group == 7) || (kind == 3 && 2 * group >= groups);
        m.scales[i] = large ? kLarge[i % 3] : kSmall[i % 8];
      }
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t c = 0; c < kCols; ++c) {
          const uint8_t byte = m.codes[r * m.source.row_bytes + c * format.bits / 8];
          const int code = format.bits == 8 ? byte : byte >> (c % 2 * 4) & 15;
          const int64_t g = r * groups + c / format.group;
          m.values[r * kCols + c] = bf16_bits(static_cast<double>(bf16_value(m.scales[g])) * code +
                                              static_cast<double>(bf16_value(m.biases[g])));
        }
      }
      const auto quantised = pack(m.source);
      const auto plain = pack(m.dequantised());
      for (int64_t rows : {1, 8, 13, 30}) {
        const Rows x = make_rows(rows, kCols, 45);
        expect_same(product(*quantised, x), product(*plain, x), kRows,
                    format.name() + ", kind " + std::to_string(kind) + ", " + std::to_string(rows) + " rows");
      }
    }
  }
}

// Scales of f16 and f32, and weights of f16 and f32, are their stated roundings to bf16.
TEST(MatmulTest, OtherFormatsAreRoundedWhenPacked) {
  TF_NEED_GPU();
  const int64_t rows = 20, cols = 64;
  const std::vector<float> values = random_floats(rows * cols, 51, 0.1f);
  TestMatrix rounded = make_matrix(16, 0, rows, cols, 1);
  for (size_t i = 0; i < values.size(); ++i) rounded.values[i] = bf16_bits(values[i]);
  MatrixSource wide = rounded.dequantised();
  wide.format = WeightFormat::kF32;
  wide.data = reinterpret_cast<const std::byte*>(values.data());
  wide.row_bytes = cols * 4;
  const Rows x = make_rows(9, cols, 52);
  expect_same(product(*pack(wide), x), product(*pack(rounded.dequantised()), x), rows, "fp32 weights");

  TestMatrix m = make_matrix(4, 32, rows, cols, 53);
  std::vector<float> scales, biases;
  for (size_t i = 0; i < m.scales.size(); ++i) {
    scales.push_back(values[i] * 0.01f);
    biases.push_back(values[i + 100]);
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const uint32_t code = m.codes[(r * cols + c) / 2] >> (c % 2 * 4) & 15;
      const size_t g = static_cast<size_t>(r * 2 + c / 32);
      m.values[r * cols + c] = bf16_bits(std::fma(scales[g], static_cast<float>(code), biases[g]));
    }
  }
  m.source.scale_format = WeightFormat::kF32;
  m.source.scales = reinterpret_cast<const std::byte*>(scales.data());
  m.source.biases = reinterpret_cast<const std::byte*>(biases.data());
  m.source.scale_row_bytes = 8;
  expect_same(product(*pack(m.source), x), product(*pack(m.dequantised()), x), rows, "fp32 scales");
}

// Several jobs in one launch, of several formats and more than fit one launch, are the jobs one after another; stacked
// blocks of different formats and odd heights come out in order.
TEST(MatmulTest, ManyJobsAndStackedBlocks) {
  TF_NEED_GPU();
  const int64_t cols = 192;
  const TestMatrix a = make_matrix(4, 64, 24, cols, 61), b = make_matrix(8, 64, 10, cols, 62),
                   c = make_matrix(16, 0, 50, cols, 63), d = make_matrix(4, 64, 7, cols, 64);
  const MatrixSource blocks[] = {a.source, d.source, b.source, c.source};
  const auto stacked = pack(blocks);
  ASSERT_NE(stacked, nullptr);
  EXPECT_EQ(stacked->segments().size(), 3u);
  const std::unique_ptr<CudaWeight> parts[] = {pack(a.source), pack(d.source), pack(b.source), pack(c.source)};
  for (int64_t rows : {1, 13, 40, 80}) {
    const Rows x = make_rows(rows, cols, 65);
    const std::vector<float> all = product(*stacked, x);
    const int64_t n = 24 + 7 + 10 + 50;
    int64_t first = 0;
    for (const auto& part : parts) {
      const std::vector<float> want = product(*part, x);
      const int64_t width = part->out_features();
      for (int64_t r = 0; r < rows; ++r) {
        expect_same(std::span(all).subspan(r * n + first, width), std::span(want).subspan(r * width, width), width,
                    "stacked, row " + std::to_string(r) + " first feature " + std::to_string(first));
      }
      first += width;
    }
    // 8 jobs of 3 segments: more than a launch takes. Slices of x as inputs.
    const DeviceRowsOf device(x);
    DeviceArray<float> out(8 * rows * n);
    out.poison();
    std::vector<CudaMatmulJob> jobs;
    for (int64_t j = 0; j < 8; ++j) {
      jobs.push_back({stacked.get(), device.input(), {out.data() + j * rows * n, rows, n, n}});
    }
    cuda_matmul(nullptr, jobs);
    const std::vector<float> got = out.get();
    EXPECT_EQ(cuda_failure(), "");
    for (int64_t j = 0; j < 8; ++j) {
      expect_same(std::span(got).subspan(j * rows * n, rows * n), all, n, "job " + std::to_string(j));
    }
  }
}

// The configurations of launches that fill the device give the bits of those that do not: a view of the first rows
// takes the deep one of the skinny kernels, the whole matrix the shallow one.
TEST(MatmulTest, WideLaunchesAndViewsOfRows) {
  TF_NEED_GPU();
  for (const Format& format : {Format{16, 0}, Format{4, 64}, Format{4, 32}, Format{8, 64}, Format{8, 32}}) {
    const int64_t n = 40000, cols = 576, part = 48;
    const TestMatrix small = make_matrix(format.bits, format.group, part, cols, 71, format.wide);
    std::vector<MatrixSource> blocks(n / part, small.source);
    blocks.push_back(small.source.slice_rows(0, n % part));
    const auto weight = pack(blocks);
    const auto view = view_cuda_weight_rows(*weight, part * 8, part);
    ASSERT_NE(view, nullptr);
    EXPECT_EQ(view_cuda_weight_rows(*weight, 8, 16), nullptr);
    EXPECT_EQ(view->bytes() * (n / 16), weight->bytes() * (part / 16));
    for (int64_t rows : {1, 16}) {
      const Rows x = make_rows(rows, cols, 72);
      const std::vector<float> wide = product(*weight, x), narrow = product(*view, x);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t first = 0; first + part <= n; first += part) {
          const auto got = std::span(wide).subspan(r * n + first, part),
                     want = std::span(narrow).subspan(r * part, part);
          if (!same_bits<float>(got, want)) {
            expect_same(got, want, part, format.name() + ", features from " + std::to_string(first));
            return;
          }
        }
      }
    }
  }
}

// The large tiles of long prompts give the bits of the skinny kernels.
TEST(MatmulTest, LargeTiles) {
  TF_NEED_GPU();
  for (const Format& format : kFormats) {
    const int64_t n = 2500, cols = format.group == 32 ? 352 : 384, rows = 1100;
    const TestMatrix small = make_matrix(format.bits, format.group, 50, cols, 81, format.wide);
    const std::vector<MatrixSource> blocks(n / 50, small.source);
    const auto weight = pack(blocks);
    const auto narrow_weight = pack(small.source);
    const Rows x = make_rows(rows, cols, 82);
    const std::vector<float> wide = product(*weight, x);
    for (int64_t first = 0; first < rows; first += 50) {
      const std::vector<float> narrow = product(*narrow_weight, some_rows(x, first, 50));
      for (int64_t r = 0; r < 50; ++r) {
        for (int64_t o = 0; o < n; o += 50) {
          const auto got = std::span(wide).subspan((first + r) * n + o, 50),
                     want = std::span(narrow).subspan(r * 50, 50);
          if (!same_bits<float>(got, want)) {
            expect_same(got, want, 50,
                        format.name() + ", row " + std::to_string(first + r) + ", features from " + std::to_string(o));
            return;
          }
        }
      }
    }
  }
}

// Gate and up in one launch: silu(gate) * up of the products, whatever the rows; nothing written beside.
TEST(MatmulTest, GateUp) {
  TF_NEED_GPU();
  for (const Format& format : kFormats) {
    const int64_t half = 44, cols = format.group == 32 ? 96 : 128;
    const TestMatrix gate = make_matrix(format.bits, format.group, half, cols, 91, format.wide);
    const TestMatrix up = make_matrix(format.bits, format.group, half, cols, 92, format.wide);
    const MatrixSource blocks[] = {gate.source, up.source};
    const auto weight = pack(blocks, CudaPairing::kGateUp);
    const auto gate_only = pack(gate.source), up_only = pack(up.source);
    std::vector<uint16_t> reference;
    for (int64_t rows : {130, 1, 8, 15, 31, 64, 65}) {
      const Rows x = some_rows(make_rows(130, cols, 93), 0, rows);
      const DeviceRowsOf device(x);
      const int64_t stride = half + 12;
      DeviceArray<uint16_t> out((rows + 2) * stride);
      out.poison();
      cuda_matmul_silu_mul(nullptr, *weight, device.input(),
                           {reinterpret_cast<__nv_bfloat16*>(out.data()), rows, half, stride});
      const std::vector<uint16_t> got = out.get();
      EXPECT_EQ(cuda_failure(), "");
      if (rows == 130) reference = got;
      const std::vector<float> g = product(*gate_only, x), u = product(*up_only, x);
      for (int64_t i = 0; i < (rows + 2) * stride; ++i) {
        const int64_t r = i / stride, c = i % stride;
        if (r >= rows || c >= half) {
          ASSERT_EQ(got[i], 0xffff) << "written outside: row " << r << " column " << c;
          continue;
        }
        const double a = g[r * half + c], want = a / (1 + std::exp(-a)) * u[r * half + c];
        ASSERT_NEAR(bf16_value(got[i]), want, 0.006 * std::abs(want) + 1e-6)
            << format.name() << ", " << rows << " rows: row " << r << " column " << c;
        ASSERT_EQ(got[i], reference[i]) << format.name() << ", " << rows << " rows: row " << r << " column " << c;
      }
    }
  }
}

// An embedding row is the weights' own values.
TEST(MatmulTest, EmbedGivesTheWeights) {
  TF_NEED_GPU();
  for (const Format& format : kFormats) {
    const int64_t cols = format.group == 32 ? 1120 : 1152;
    const TestMatrix m = make_matrix(format.bits, format.group, 57, cols, 101, format.wide);
    const auto table = pack(m.source);
    const std::vector<int32_t> tokens = {0, 56, 7, 8, 15, 16, 33, 7};
    const DeviceArray<int32_t> ids(tokens);
    const int64_t stride = cols + 3, rows = static_cast<int64_t>(tokens.size());
    DeviceArray<float> out(rows * stride);
    out.poison();
    cuda_embed(nullptr, *table, ids.data(), {out.data(), rows, cols, stride});
    const std::vector<float> got = out.get();
    EXPECT_EQ(cuda_failure(), "");
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < stride; ++c) {
        const uint32_t want = c < cols ? static_cast<uint32_t>(m.values[tokens[r] * cols + c]) << 16 : kPoison;
        ASSERT_EQ(bits_of(got[r * stride + c]), want) << format.name() << " row " << r << " column " << c;
      }
    }
  }
}

// Captured into a graph and run again over new activations, a product reads the new ones; a chain of dependent launches
// sees each one's results.
TEST(MatmulTest, GraphsAndDependentLaunches) {
  TF_NEED_GPU();
  const int64_t size = 512;
  const TestMatrix m = make_matrix(4, 64, 2 * size, size, 111);
  const MatrixSource blocks[] = {m.source.slice_rows(0, size), m.source.slice_rows(size, size)};
  const auto weight = pack(blocks, CudaPairing::kGateUp);
  for (int64_t rows : {1, 16, 64, 100}) {
    const Rows first = make_rows(rows, size, 112), second = make_rows(rows, size, 113);
    DeviceRowsOf x(first);
    DeviceArray<uint16_t> a(rows * size), b(rows * size);
    const DeviceInput a_in{reinterpret_cast<__nv_bfloat16*>(a.data()), rows, size, size};
    const DeviceInput b_in{reinterpret_cast<__nv_bfloat16*>(b.data()), rows, size, size};
    cudaStream_t stream;
    ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    const auto chain = [&] {
      cuda_matmul_silu_mul(stream, *weight, x.input(), a_in);
      for (int i = 0; i < 4; ++i) {
        cuda_matmul_silu_mul(stream, *weight, a_in, b_in);
        cuda_matmul_silu_mul(stream, *weight, b_in, a_in);
      }
    };
    const auto run_waiting = [&] {  // each launch alone
      cuda_matmul_silu_mul(stream, *weight, x.input(), a_in);
      cudaStreamSynchronize(stream);
      for (int i = 0; i < 4; ++i) {
        cuda_matmul_silu_mul(stream, *weight, a_in, b_in);
        cudaStreamSynchronize(stream);
        cuda_matmul_silu_mul(stream, *weight, b_in, a_in);
        cudaStreamSynchronize(stream);
      }
      return a.get();
    };
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    chain();
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess) << cuda_failure();
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (const Rows* input : {&first, &second, &first}) {
      x.memory.put(input->bits);
      const std::vector<uint16_t> want = run_waiting();
      for (int repeat = 0; repeat < 3; ++repeat) {
        a.poison();
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
        EXPECT_EQ(a.get(), want) << rows << " rows, graph";
        a.poison();
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        chain();
        EXPECT_EQ(a.get(), want) << rows << " rows, stream";
      }
    }
    EXPECT_EQ(cuda_failure(), "");
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

// Shapes that do not fit are an error, not a launch.
TEST(MatmulTest, RefusesShapesThatDoNotFit) {
  TF_NEED_GPU();
  const TestMatrix m = make_matrix(4, 64, 16, 128, 121);
  const auto weight = pack(m.source);
  const DeviceRowsOf x(make_rows(2, 64, 122));
  DeviceArray<float> out(64);
  const CudaMatmulJob job{weight.get(), x.input(), {out.data(), 2, 16, 16}};
  cuda_matmul(nullptr, {&job, 1});
  EXPECT_NE(cuda_failure().find("shapes"), std::string::npos);
}

}  // namespace
}  // namespace tensorfold
