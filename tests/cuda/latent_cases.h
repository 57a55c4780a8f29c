// For tests of operations on latents on a GPU: inputs, passes over spans of sequences, comparisons.
#pragma once

#include <algorithm>
#include <functional>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/latent_ops.h"
#include "kernels/reference/latents.h"
#include "tests/cuda/gpu.h"

namespace tensorfold {

using Floats = std::vector<float>;

// Rounded to bf16, so that a kernel's rounding of inputs changes nothing.
inline Floats bf16_floats(size_t count, uint32_t seed, float scale = 1.0f) {
  Floats values = random_floats(count, seed, scale);
  for (float& value : values) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    bits = (bits + 0x8000u) & 0xffff0000u;
    std::memcpy(&value, &bits, 4);
  }
  return values;
}

// Small whole numbers: sums of their products are exact in every order.
inline Floats whole_floats(size_t count, uint32_t seed, int most) {
  std::mt19937 engine(seed);
  Floats values(count);
  for (float& value : values) value = static_cast<float>(static_cast<int>(engine() % (2 * most + 1)) - most);
  return values;
}

inline std::vector<double> part(const Floats& values, int64_t first, int64_t count) {
  return {values.begin() + first, values.begin() + first + count};
}

inline std::unique_ptr<Ops> gpu_ops(bool graphs = false) {
  CudaOptions options;
  options.graphs = graphs;
  std::string error;
  std::unique_ptr<Ops> ops = make_cuda_ops(options, &error);
  EXPECT_NE(ops, nullptr) << error;
  return ops;
}

// Some rows of a sequence: its page table and the position of the first.
struct Span {
  std::vector<int32_t> pages;
  int64_t position = 0;
  int64_t rows = 1;
};

// One pass over spans. Inputs of all rows are made by `body`, which gets how many there are.
struct Pass {
  std::vector<Span> spans;  // groups point into it
  std::vector<int32_t> tokens;
  std::vector<int64_t> positions;
  std::vector<RowGroup> groups;
  int64_t least_keys = 0;

  explicit Pass(std::vector<Span> of) : spans(std::move(of)) {
    for (const Span& s : spans) {
      groups.push_back({static_cast<int64_t>(positions.size()), s.rows, s.position, 0, s.rows, s.pages});
      for (int64_t i = 0; i < s.rows; ++i) positions.push_back(s.position + i);
    }
    tokens.resize(positions.size());
  }
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;
  Floats run(Ops& ops, const Ops::RunBody& body, Tensor input = {}, bool keep = false) const {
    RowBatch rows;
    rows.tokens = tokens;
    rows.positions = positions;
    rows.groups = groups;
    rows.least_keys = least_keys;
    const Tensor out = ops.run(RunKind::kForward, rows, input, keep, body);
    Floats values(static_cast<size_t>(out.rows * out.cols));
    ops.download(out, values);
    EXPECT_EQ(ops.finish_pass(), "");
    return values;
  }
};

inline Tensor uploaded(Ops& ops, int64_t rows, int64_t cols, const Floats& values) {
  const Tensor t = ops.scratch(rows, cols);
  ops.upload(std::span<const float>(values).first(static_cast<size_t>(rows * cols)), t);
  return t;
}

// Pages of a sequence, neither in order nor side by side.
inline std::vector<int32_t> pages_of(int64_t count, int32_t first, int32_t step, int32_t of) {
  std::vector<int32_t> pages;
  for (int64_t i = 0; i < count; ++i) pages.push_back((first + static_cast<int32_t>(i) * step) % of);
  return pages;
}

// Fills whole pages of a cache of one layer with a row a token from [tokens, width].
inline void fill(RowCache& cache, const std::vector<int32_t>& pages, const Floats& rows, int64_t width) {
  const auto page_floats = static_cast<size_t>(kPageTokens * width);
  for (size_t i = 0; i < pages.size(); ++i) {
    Floats page(page_floats, 0.0f);
    const size_t first = i * page_floats, count = std::min(page_floats, rows.size() - std::min(rows.size(), first));
    std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(first), count, page.begin());
    cache.load_page(pages[i], std::as_bytes(std::span<const float>(page)));
  }
}

inline void expect_close(std::span<const float> got, const std::vector<double>& want, double error,
                         const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], error) << what << ", value " << i;
}

inline void expect_same(std::span<const float> got, std::span<const float> want, const std::string& what) {
  ASSERT_TRUE(same_bits(got, want)) << what;
}

inline std::span<const float> row_of(const Floats& values, int64_t row, int64_t cols) {
  return std::span<const float>(values).subspan(static_cast<size_t>(row * cols), static_cast<size_t>(cols));
}

}  // namespace tensorfold
