#include "kernels/cuda/matmul.h"

#include <cmath>
#include <limits>
#include <string>

#include "kernels/cuda/rowwise.h"
#include "kernels/numerics/tree.h"
#include "tests/cuda/matmul_cases.h"

namespace tensorfold {
namespace {

// Each kernel computes the product: all formats, row counts at both sides of every change of kernel, odd sizes.
TEST(MatmulTest, MatchesDoublePrecision) {
  TF_NEED_GPU();
  for (const Format& format : kFormats) {
    const int64_t cols = format.group == 128 ? 384 : 224 + (format.group == 64 ? 32 : 0);
    const TestMatrix m = make_matrix(format, 76, cols, 11);
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
    const TestMatrix m = make_matrix(format, n, cols, 31);
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
  for (const Format& format :
       {Format{4, 64}, Format{4, 32}, Format{4, 128}, Format{8, 64}, Format{8, 32}, Format{2, 64}, Format{3, 64},
        Format{5, 32}, Format{6, 128}, Format{8, 64, false, "fp8 tensor"}, Format{8, 64, false, "fp8 blocks"},
        Format{8, 32, false, "mxfp8"}, Format{4, 64, false, "nvfp4"}, Format{4, 64, false, "nvfp4 divided"},
        Format{4, 32, false, "mxfp4"}}) {
    const TestMatrix m = make_matrix(format, 52, 768, 41);
    const auto quantised = pack(m.source);
    const auto plain = pack(m.dequantised());
    for (int64_t rows : {1, 10, 24, 60, 90}) {
      const Rows x = make_rows(rows, 768, 42);
      expect_same(product(*quantised, x), product(*plain, x), 52,
                  format.name() + ", " + std::to_string(rows) + " rows");
    }
  }
}

// Parts of FP8 and FP4 matrices that begin inside blocks, those with a way of their own and those without; slices that
// begin at different places are one segment; a matrix with a NaN is kept as bf16.
TEST(MatmulTest, PartsOfSmallFloats) {
  TF_NEED_GPU();
  struct Part {
    std::string_view format;
    int64_t first_col;
    CudaWeightKind kind;
  };
  for (const Part& part : {Part{"fp8 tensor", 40, CudaWeightKind::kFp8}, Part{"fp8 blocks", 64, CudaWeightKind::kFp8},
                           Part{"fp8 blocks", 40, CudaWeightKind::kBf16}, Part{"mxfp8", 32, CudaWeightKind::kFp8},
                           Part{"mxfp8", 48, CudaWeightKind::kBf16}, Part{"nvfp4", 48, CudaWeightKind::kFp4},
                           Part{"nvfp4", 8, CudaWeightKind::kFp4}, Part{"nvfp4", 4, CudaWeightKind::kBf16},
                           Part{"mxfp4", 80, CudaWeightKind::kFp4}}) {
    const TestMatrix m = make_small_float_matrix(part.format, 70, 512, 47);
    const auto slice = [&](const MatrixSource& s) { return s.slice_rows(13, 49).slice_cols(part.first_col, 200); };
    const MatrixSource quantised_part = slice(m.source);
    const auto quantised = pack(quantised_part), plain = pack(slice(m.dequantised()));
    EXPECT_EQ(quantised->segments()[0].kind, part.kind) << part.format << " from column " << part.first_col;
    for (int64_t rows : {1, 12, 70}) {
      const Rows x = make_rows(rows, 200, 48);
      expect_same(product(*quantised, x), product(*plain, x), 49, std::string(part.format) + ", a part");
    }
  }
  TestMatrix broken = make_small_float_matrix("fp8 tensor", 16, 64, 49);
  broken.codes[100] = 0xff;
  EXPECT_EQ(pack(broken.source)->segments()[0].kind, CudaWeightKind::kBf16);
  const TestMatrix m = make_small_float_matrix("nvfp4", 32, 48, 50);
  const MatrixSource slices[] = {m.source.slice_cols(0, 24), m.source.slice_cols(24, 24)};
  const MatrixSource plain_slices[] = {m.dequantised().slice_cols(0, 24), m.dequantised().slice_cols(24, 24)};
  const auto stacked = pack(slices), plain = pack(plain_slices);
  EXPECT_EQ(stacked->segments().size(), 1u);
  for (int64_t rows : {1, 12, 40, 70}) {
    const Rows x = make_rows(rows, 24, 51);
    expect_same(product(*stacked, x), product(*plain, x), 64, "stacked slices of nvfp4");
  }
}

// Kernels convert codes in two ways, by the size of the scales around: all small, all large, and both in one tile, with
// scales just below and at the limit of 2^-5, of either sign, zero and subnormal.
TEST(MatmulTest, SmallAndLargeScales) {
  TF_NEED_GPU();
  constexpr int64_t kRows = 48, kCols = 1152;
  for (const Format& format : {Format{4, 64}, Format{4, 32}, Format{8, 64}, Format{8, 32}}) {
    for (int kind = 0; kind < 4; ++kind) {
      TestMatrix m = make_matrix(format, kRows, kCols, 44);
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

// The configurations of launches that fill the device give the bits of those that do not: one tile a warp and pairs,
// one turn and several, units long and short, K that ends inside a unit and inside a stage; against a view of the first
// rows, whose launch has a tile a block.
TEST(MatmulTest, WideLaunchesAndViewsOfRows) {
  TF_NEED_GPU();
  constexpr int64_t kPart = 48;
  for (const Format& format : kFormats) {
    const int64_t group = std::max(format.group, 32);
    for (int64_t cols : {576 / group * group + group, 1184 / group * group}) {
      for (int64_t n : {15000, 40000, 130000}) {
        const TestMatrix small = make_matrix(format, kPart, cols, 71);
        std::vector<MatrixSource> blocks(n / kPart, small.source);
        blocks.push_back(small.source.slice_rows(0, n % kPart));
        const auto weight = pack(blocks);
        const auto view = view_cuda_weight_rows(*weight, kPart * 8, kPart);
        ASSERT_NE(view, nullptr);
        EXPECT_EQ(view_cuda_weight_rows(*weight, 8, 16), nullptr);
        EXPECT_EQ(view->bytes() * ((n + 15) / 16), weight->bytes() * (kPart / 16));
        for (int64_t rows : {1, 8, 9, 16}) {
          const Rows x = make_rows(rows, cols, 72);
          const std::vector<float> wide = product(*weight, x), narrow = product(*view, x);
          for (int64_t r = 0; r < rows; ++r) {
            for (int64_t first = 0; first + kPart <= n; first += kPart) {
              const auto got = std::span(wide).subspan(r * n + first, kPart),
                         want = std::span(narrow).subspan(r * kPart, kPart);
              if (same_bits<float>(got, want)) continue;
              expect_same(got, want, kPart,
                          format.name() + ", " + std::to_string(cols) + " columns, " + std::to_string(rows) +
                              " rows, features from " + std::to_string(first));
              return;
            }
          }
        }
      }
    }
  }
}

// The large tiles of long prompts give the bits of the skinny kernels: where they fill one wave of an H200, and where a
// last wave has little left, which small tiles take (8,000 features: 288 blocks of large tiles for 132
// multiprocessors), with columns of blocks that are not whole, in a product alone, in stacked jobs, and in a pair of
// gate and up.
TEST(MatmulTest, LargeTiles) {
  TF_NEED_GPU();
  constexpr int64_t kPart = 50, kRows = 1100;
  for (const Format& format : kFormats) {
    const int64_t cols = format.group == 32 ? 352 : 384;
    const TestMatrix small = make_matrix(format, kPart, cols, 81);
    const auto narrow_weight = pack(small.source);
    const Rows x = make_rows(kRows, cols, 82);
    std::vector<float> narrow;
    for (int64_t first = 0; first < kRows; first += kPart) {
      const std::vector<float> some = product(*narrow_weight, some_rows(x, first, kPart));
      narrow.insert(narrow.end(), some.begin(), some.end());
    }
    const auto differs = [&](std::span<const float> wide, int64_t n, const std::string& what) {
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t o = 0; o < n; o += kPart) {
          const std::span<const float> got = wide.subspan(r * n + o, kPart),
                                       want = std::span(narrow).subspan(r * kPart, kPart);
          if (same_bits<float>(got, want)) continue;
          expect_same(got, want, kPart, what + ", row " + std::to_string(r) + ", features from " + std::to_string(o));
          return true;
        }
      }
      return false;
    };
    for (int64_t n : {2500, 8000}) {
      const std::vector<MatrixSource> blocks(n / kPart, small.source);
      if (differs(product(*pack(blocks), x), n, format.name())) return;
    }
    // Three jobs: 3 x 12 columns of 9 blocks are 324.
    constexpr int64_t kJobs = 3, kEach = 2900;
    const auto third = pack(std::vector<MatrixSource>(kEach / kPart, small.source));
    const DeviceRowsOf device(x);
    DeviceArray<float> out(kJobs * kRows * kEach);
    out.poison();
    std::vector<CudaMatmulJob> jobs;
    for (int64_t j = 0; j < kJobs; ++j) {
      jobs.push_back({third.get(), device.input(), {out.data() + j * kRows * kEach, kRows, kEach, kEach}});
    }
    cuda_matmul(nullptr, jobs);
    const std::vector<float> all = out.get();
    EXPECT_EQ(cuda_failure(), "");
    for (int64_t j = 0; j < kJobs; ++j) {
      if (differs(std::span(all).subspan(j * kRows * kEach, kRows * kEach), kEach, format.name() + ", a job")) return;
    }
    // Gate and up of 4,000 pairs against themselves in a few rows.
    constexpr int64_t kPairs = 4000;
    const TestMatrix pairs = make_matrix(format, kPairs, cols, 83);
    const MatrixSource gate_up[] = {pairs.source, pairs.source};
    const auto weight = pack(gate_up, CudaPairing::kGateUp);
    const auto activated = [&](const Rows& some) {
      const DeviceRowsOf input(some);
      DeviceArray<uint16_t> result(some.rows() * kPairs);
      result.poison();
      cuda_matmul_silu_mul(nullptr, *weight, input.input(),
                           {reinterpret_cast<__nv_bfloat16*>(result.data()), some.rows(), kPairs, kPairs});
      EXPECT_EQ(cuda_failure(), "");
      return result.get();
    };
    const std::vector<uint16_t> wide = activated(x);
    for (const int64_t first : {int64_t{0}, int64_t{640}, kRows - 16}) {
      const std::vector<uint16_t> few = activated(some_rows(x, first, 16));
      for (int64_t i = 0; i < 16 * kPairs; ++i) {
        ASSERT_EQ(wide[first * kPairs + i], few[i])
            << format.name() << ", row " << first + i / kPairs << " pair " << i % kPairs;
      }
    }
  }
}

// Products that add up every two outputs where that pays (4 bits, many rows) give the bits of additions, and so do
// those that do not.
TEST(MatmulTest, ProductsThatAreAddedUp) {
  TF_NEED_GPU();
  int multiprocessors = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  struct Case {
    int64_t parts, rows, n;
    int added;  // of 4 bits, with 132 multiprocessors
  };
  constexpr int64_t kPart = 50;
  for (const Format& format : kFormats) {
    const int64_t cols = format.group == 32 ? 352 : 384;
    for (const Case& c : {Case{2, 1100, 7300, 2}, Case{4, 1100, 7300, 2}, Case{8, 2200, 2800, 2},
                          Case{4, 1100, 2500, 1}, Case{4, 90, 500, 1}, Case{2, 20, 500, 1}}) {
      const std::string what = format.name() + ", " + std::to_string(c.parts) + " parts of " + std::to_string(c.n);
      const Rows x = make_rows(c.rows, cols, 85);
      const DeviceRowsOf device(x);
      const int64_t size = c.rows * c.n;
      DeviceArray<float> apart(c.parts * size), together(c.parts * size), sum(size);
      std::vector<std::unique_ptr<CudaWeight>> weights;
      std::vector<CudaMatmulJob> jobs;
      for (int64_t part = 0; part < c.parts; ++part) {
        const TestMatrix small = make_matrix(format, kPart, cols, 86 + static_cast<uint32_t>(part));
        weights.push_back(pack(std::vector<MatrixSource>(c.n / kPart, small.source)));
        jobs.push_back({weights.back().get(), device.input(), {apart.data() + part * size, c.rows, c.n, c.n}});
      }
      cuda_matmul(nullptr, jobs);
      together.poison();
      for (int64_t part = 0; part < c.parts; ++part) jobs[part].out.data = together.data() + part * size;
      const int added = cuda_matmul_sum(nullptr, jobs);
      if (multiprocessors == 132) {
        const CudaWeightKind kind = weights[0]->segments()[0].kind;
        const bool adds = kind == CudaWeightKind::kAffine4 || kind == CudaWeightKind::kFp4;
        EXPECT_EQ(added, adds ? c.added : 1) << what;
      }
      ASSERT_TRUE(added >= 1 && c.parts % added == 0) << what;
      const std::vector<float> got = together.get();
      for (int64_t first = 0; first < c.parts; first += added) {
        CudaTreeSum tree;
        tree.part_stride = c.n;
        for (int64_t part = first; part < first + added; ++part) {
          tree.parts[tree.part_count++] = apart.data() + part * size;
        }
        for (const AddStep& step : fold_plan(added, {0, added})) tree.steps[tree.step_count++] = step;
        const int root = 0;
        DeviceMatrix out = {sum.data(), c.rows, c.n, c.n};
        cuda_fold(nullptr, tree, c.rows, c.n, &root, 1, &out);
        const std::vector<float> want = sum.get();
        EXPECT_EQ(cuda_failure(), "");
        const auto sums = std::span(got).subspan(first * size, size);
        if (same_bits<float>(sums, want)) continue;
        expect_same(sums, want, c.n, what + ", sum from part " + std::to_string(first));
        return;
      }
    }
  }
}

// Gate and up in one launch: silu(gate) * up of the products, whatever the rows; nothing written beside.
TEST(MatmulTest, GateUp) {
  TF_NEED_GPU();
  for (const Format& format : kFormats) {
    const int64_t half = 44, cols = format.group == 32 ? 96 : 128;
    const TestMatrix gate = make_matrix(format, half, cols, 91);
    const TestMatrix up = make_matrix(format, half, cols, 92);
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
    const TestMatrix m = make_matrix(format, 57, cols, 101);
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
