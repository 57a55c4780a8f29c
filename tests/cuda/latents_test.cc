// Operations on latents: values against double precision; the same bits alone and among others, in graphs, for any
// bound on the context and any number of heads.
#include "kernels/reference/latents.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/latent_ops.h"
#include "tests/cuda/gpu.h"

namespace tensorfold {
namespace {

using Floats = std::vector<float>;

// Rounded to bf16, so that a kernel's rounding of inputs changes nothing.
Floats bf16_floats(size_t count, uint32_t seed, float scale = 1.0f) {
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
Floats whole_floats(size_t count, uint32_t seed, int most) {
  std::mt19937 engine(seed);
  Floats values(count);
  for (float& value : values) value = static_cast<float>(static_cast<int>(engine() % (2 * most + 1)) - most);
  return values;
}

std::vector<double> part(const Floats& values, int64_t first, int64_t count) {
  return {values.begin() + first, values.begin() + first + count};
}

std::unique_ptr<Ops> gpu_ops(bool graphs = false) {
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
  std::vector<int32_t> tokens;
  std::vector<int64_t> positions;
  std::vector<RowGroup> groups;
  int64_t least_keys = 0;

  explicit Pass(const std::vector<Span>& spans) {
    for (const Span& s : spans) {
      groups.push_back({static_cast<int64_t>(positions.size()), s.rows, s.position, 0, s.rows, s.pages});
      for (int64_t i = 0; i < s.rows; ++i) positions.push_back(s.position + i);
    }
    tokens.resize(positions.size());
  }
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

Tensor uploaded(Ops& ops, int64_t rows, int64_t cols, const Floats& values) {
  const Tensor t = ops.scratch(rows, cols);
  ops.upload(std::span<const float>(values).first(static_cast<size_t>(rows * cols)), t);
  return t;
}

// Pages of a sequence, neither in order nor side by side.
std::vector<int32_t> pages_of(int64_t count, int32_t first, int32_t step, int32_t of) {
  std::vector<int32_t> pages;
  for (int64_t i = 0; i < count; ++i) pages.push_back((first + static_cast<int32_t>(i) * step) % of);
  return pages;
}

// Fills whole pages of a cache of one layer with a row a token from [tokens, width].
void fill(RowCache& cache, const std::vector<int32_t>& pages, const Floats& rows, int64_t width) {
  const auto page_floats = static_cast<size_t>(kPageTokens * width);
  for (size_t i = 0; i < pages.size(); ++i) {
    Floats page(page_floats, 0.0f);
    const size_t first = i * page_floats, count = std::min(page_floats, rows.size() - std::min(rows.size(), first));
    std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(first), count, page.begin());
    cache.load_page(pages[i], std::as_bytes(std::span<const float>(page)));
  }
}

void expect_close(std::span<const float> got, const std::vector<double>& want, double error, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], error) << what << ", value " << i;
}

void expect_same(std::span<const float> got, std::span<const float> want, const std::string& what) {
  ASSERT_TRUE(same_bits(got, want)) << what;
}

std::span<const float> row_of(const Floats& values, int64_t row, int64_t cols) {
  return std::span<const float>(values).subspan(static_cast<size_t>(row * cols), static_cast<size_t>(cols));
}

// --- Row by row -----------------------------------------------------------------------------------------------------

// Protects norms, limits and rotations against double precision, and rows against their neighbours.
TEST(CudaLatents, RowsByThemselves) {
  TF_NEED_GPU();
  constexpr int64_t kRows = 9, kCols = 72, kHeads = 3, kDim = kCols / kHeads, kPairs = 5;
  constexpr float kLimit = 0.8f;
  const auto ops = gpu_ops();
  const Floats x = random_floats(kRows * kCols, 1, 3.0f), weight = random_floats(kCols, 2),
               bias = random_floats(kCols, 3);
  const Floats frequencies = {1.0f, 0.3f, 0.1f, 0.01f, 0.0003f};
  const auto weights = ops->pack_vector(weight), biases = ops->pack_vector(bias), freq = ops->pack_vector(frequencies);
  const std::vector<int32_t> pages(4, 0);
  const auto run = [&](int64_t first, int64_t rows) {
    ops->begin_pass();
    return Pass({{pages, 100 + first, rows}}).run(*ops, [&](const RowBatch& batch, Tensor) {
      const Floats own(x.begin() + first * kCols, x.begin() + (first + rows) * kCols);
      const Tensor all = ops->scratch(rows, 4 * kCols);
      const auto result = [&](int64_t i) { return all.columns(i * kCols, kCols); };
      ops->layer_norm(uploaded(*ops, rows, kCols, own), *weights, *biases, 1e-6f, result(0));
      ops->silu_mul_limited(uploaded(*ops, rows, kCols, own), kLimit, all.columns(kCols, kCols / 2));
      const RopeTable table = ops->rope_table(batch, *freq, 1.0);
      ops->upload(own, result(2));
      ops->rope_pairs(result(2), kHeads, kDim, table, false);
      ops->upload(own, result(3));
      ops->rope_pairs(result(3), kHeads, kDim, table, true);
      return all;
    });
  };
  const Floats together = run(0, kRows);
  for (int64_t r = 0; r < kRows; ++r) {
    const auto got = row_of(together, r, 4 * kCols);
    const Floats alone = run(r, 1);
    for (const int64_t first : {int64_t{0}, 2 * kCols}) {  // what is between was not wholly written
      const auto count = static_cast<size_t>(first == 0 ? kCols + kCols / 2 : 2 * kCols),
                 at = static_cast<size_t>(first);
      expect_same(row_of(alone, 0, 4 * kCols).subspan(at, count), got.subspan(at, count), "alone");
    }
    const std::vector<double> own = part(x, r * kCols, kCols);
    const double mean = std::accumulate(own.begin(), own.end(), 0.0) / kCols;
    double variance = 0;
    for (const double value : own) variance += (value - mean) * (value - mean) / kCols;
    std::vector<double> normed, limited, turned = own, back = own;
    for (size_t i = 0; i < own.size(); ++i) {
      normed.push_back((own[i] - mean) / std::sqrt(variance + 1e-6) * weight[i] + bias[i]);
    }
    for (size_t i = 0; i < kCols / 2; ++i) {
      const double gate = std::min<double>(own[i], kLimit), up = own[i + kCols / 2];
      limited.push_back(gate / (1 + std::exp(-gate)) * std::clamp<double>(up, -double{kLimit}, kLimit));
    }
    std::vector<double> angles, opposite;
    for (const float f : frequencies) angles.push_back(static_cast<double>(100 + r) * f);
    for (const double angle : angles) opposite.push_back(-angle);
    for (int64_t h = 0; h < kHeads; ++h) {
      ref_rope_pairs(std::span(turned).subspan(static_cast<size_t>(h * kDim), kDim), angles);
      ref_rope_pairs(std::span(back).subspan(static_cast<size_t>(h * kDim), kDim), opposite);
    }
    expect_close(got.subspan(0, kCols), normed, 1e-5, "norm");
    expect_close(got.subspan(kCols, kCols / 2), limited, 1e-5, "limited silu");
    expect_close(got.subspan(2 * kCols, kCols), turned, 1e-5, "rotation");
    expect_close(got.subspan(3 * kCols, kCols), back, 1e-5, "rotation back");
  }
  static_assert(2 * kPairs <= kDim);
}

// --- Cached rows ----------------------------------------------------------------------------------------------------

// Protects pooled rows: windows that end in the pass and no others, plain and overlapping with norm and rotation, the
// same whether a sequence comes whole or in pieces.
TEST(CudaLatents, PooledRows) {
  TF_NEED_GPU();
  constexpr int64_t kLength = 150, kWidth = 24, kTokens = 4, kPages = 8;
  const auto ops = gpu_ops();
  const std::vector<RowCacheLayer> layers = {{2 * kWidth, 1}, {kWidth, kTokens}, {4 * kWidth, 1}, {kWidth, kTokens}};
  const Floats plain = random_floats(kLength * 2 * kWidth, 21), halves = random_floats(kLength * 4 * kWidth, 22);
  const Floats plain_bias = random_floats(kTokens * kWidth, 23), halves_bias = random_floats(kTokens * 2 * kWidth, 24);
  const Floats norm = random_floats(kWidth, 25), frequencies = {1.0f, 0.3f, 0.01f};
  const auto biases = ops->pack_vector(plain_bias), wide_biases = ops->pack_vector(halves_bias),
             norms = ops->pack_vector(norm), freq = ops->pack_vector(frequencies);
  const std::vector<int32_t> pages = pages_of((kLength + kPageTokens - 1) / kPageTokens, 5, 3, kPages);
  const auto pooled = [&](int64_t chunk) {  // bytes of the sequence's pages
    const auto cache = ops->make_row_cache(layers, kPages);
    for (int64_t first = 0; first < kLength; first += chunk) {
      const int64_t rows = std::min(chunk, kLength - first);
      ops->begin_pass();
      Pass({{pages, first, rows}}).run(*ops, [&](const RowBatch& batch, Tensor) {
        const auto write = [&](int64_t layer, const Floats& from, int64_t cols) {
          const Tensor t =
              uploaded(*ops, rows, cols, {from.begin() + first * cols, from.begin() + (first + rows) * cols});
          ops->row_write(*cache, layer, t, batch);
          return t;
        };
        const Tensor out = write(0, plain, 2 * kWidth);
        write(2, halves, 4 * kWidth);
        PoolArgs pool;
        pool.into = 1;
        pool.tokens = kTokens;
        pool.bias = biases.get();
        pool.rows = batch;
        ops->pool_rows(*cache, pool);
        pool.from = 2;
        pool.into = 3;
        pool.overlap = true;
        pool.bias = wide_biases.get();
        pool.norm = norms.get();
        pool.eps = 1e-6f;
        pool.inv_freq = freq.get();
        ops->pool_rows(*cache, pool);
        return out;
      });
    }
    std::vector<Floats> all;
    for (const int32_t page : pages) {
      Floats values(static_cast<size_t>(cache->page_bytes() / 4));
      cache->save_page(page, std::as_writable_bytes(std::span<float>(values)));
      all.push_back(values);
    }
    return all;
  };
  const std::vector<Floats> whole = pooled(kLength);
  for (const int64_t chunk : {int64_t{1}, int64_t{7}, int64_t{64}}) {
    const std::vector<Floats> pieces = pooled(chunk);
    for (size_t i = 0; i < whole.size(); ++i) expect_same(pieces[i], whole[i], "chunks of " + std::to_string(chunk));
  }
  constexpr int64_t kOfPage = kPageTokens / kTokens;
  const auto row = [&](int64_t window, bool overlap) {
    const Floats& page = whole[static_cast<size_t>(window / kOfPage)];
    const int64_t before = kPageTokens * 2 * kWidth + (overlap ? kOfPage * kWidth + kPageTokens * 4 * kWidth : 0);
    return std::span<const float>(page).subspan(static_cast<size_t>(before + window % kOfPage * kWidth), kWidth);
  };
  const auto put = [](RefMatrix& m, int64_t at, const std::vector<double>& values) {
    std::copy(values.begin(), values.end(), m.v.begin() + at * m.cols);
  };
  const Floats untouched(kWidth, 0.0f);
  for (int64_t w = 0; w < (kLength + kTokens - 1) / kTokens; ++w) {
    if ((w + 1) * kTokens > kLength) {  // not whole
      expect_same(row(w, false), untouched, "a window that is not whole");
      expect_same(row(w, true), untouched, "a window that is not whole");
      continue;
    }
    RefMatrix keys(kTokens, kWidth), gates = keys, bias = keys;
    const int64_t before = w > 0 ? kTokens : 0;
    RefMatrix k(before + kTokens, kWidth), g = k, b = k;
    for (int64_t j = 0; j < kTokens; ++j) {
      const int64_t token = w * kTokens + j;
      put(keys, j, part(plain, token * 2 * kWidth, kWidth));
      put(gates, j, part(plain, token * 2 * kWidth + kWidth, kWidth));
      put(bias, j, part(plain_bias, j * kWidth, kWidth));
    }
    for (int64_t j = 0; j < before + kTokens; ++j) {
      const int64_t half = j < before ? 0 : kWidth, token = w * kTokens + j - before;
      put(k, j, part(halves, token * 4 * kWidth + half, kWidth));
      put(g, j, part(halves, token * 4 * kWidth + 2 * kWidth + half, kWidth));
      put(b, j, part(halves_bias, j % kTokens * 2 * kWidth + half, kWidth));
    }
    expect_close(row(w, false), ref_pool(keys, gates, bias), 1e-5, "window " + std::to_string(w));
    RefMatrix entry(1, kWidth);
    entry.v = ref_pool(k, g, b);
    entry = ref_rms_norm(entry, 1, norm, 1e-6);
    std::vector<double> angles;
    for (const float f : frequencies) angles.push_back(static_cast<double>(w * kTokens) * f);
    ref_rope_pairs(entry.v, angles);
    expect_close(row(w, true), entry.v, 2e-5, "overlapping window " + std::to_string(w));
  }
}

// A sequence of keys, each a window, and queries of its last rows.
struct SelectCase {
  int64_t windows, width, heads, most;
  Floats keys, q, weights;  // q and weights: of 24 rows
  static constexpr int64_t kQueries = 24;

  SelectCase(int64_t count, int64_t dim, int64_t of_heads, int64_t chosen, uint32_t seed)
      : windows(count), width(dim), heads(of_heads), most(chosen) {
    keys = whole_floats(static_cast<size_t>(windows * width), seed, 2);
    q = whole_floats(static_cast<size_t>(kQueries * heads * width), seed + 1, 2);
    weights = whole_floats(static_cast<size_t>(kQueries * heads), seed + 2, 2);
  }
  int64_t pages() const { return (windows + kPageTokens - 1) / kPageTokens; }
  // What query i chooses at `position`.
  Floats expected(int64_t i, int64_t position) const {
    std::vector<std::pair<double, int64_t>> order;
    for (int64_t w = 0; w <= position; ++w) {
      const float* key = keys.data() + w * width;
      double score = 0;
      for (int64_t h = 0; h < heads; ++h) {
        double product = 0;
        for (int64_t d = 0; d < width; ++d)
          product += double{q[static_cast<size_t>((i * heads + h) * width + d)]} * key[d];
        score += weights[static_cast<size_t>(i * heads + h)] * 0.5 * std::max(0.25 * product, 0.0);
      }
      order.emplace_back(-score, w);
    }
    std::sort(order.begin(), order.end());
    order.resize(std::min<size_t>(order.size(), static_cast<size_t>(most)));
    Floats chosen;
    for (const auto& [score, w] : order) chosen.push_back(static_cast<float>(w));
    std::sort(chosen.begin(), chosen.end());
    chosen.resize(static_cast<size_t>(most), -1.0f);
    return chosen;
  }
};

// Protects the choice, ties included (whole numbers make many): few and many windows, one, two and three levels of
// choosing, tiles of rows and rows alone, several sequences, any bound on the context.
TEST(CudaLatents, SelectedRows) {
  TF_NEED_GPU();
  const auto ops = gpu_ops();
  for (const SelectCase& c :
       {SelectCase(90, 32, 4, 4, 31), SelectCase(700, 40, 18, 135, 32), SelectCase(5000, 128, 32, 512, 33),
        SelectCase(40000, 32, 3, 100, 34), SelectCase(140000, 16, 2, 4096, 35), SelectCase(900, 64, 70, 64, 36)}) {
    const auto pages = static_cast<int32_t>(c.pages());
    const int32_t step = pages % 3 == 0 ? 1 : 3;
    const std::vector<int32_t> table = pages_of(pages, 2 % pages, step, pages);
    const std::vector<RowCacheLayer> layers = {{c.width, 1}};
    const auto cache = ops->make_row_cache(layers, pages);
    fill(*cache, table, c.keys, c.width);
    const auto run = [&](int64_t first, const std::vector<Span>& spans, int64_t least_keys) {
      ops->begin_pass();
      Pass pass(spans);
      pass.least_keys = least_keys;
      return pass.run(*ops, [&](const RowBatch& batch, Tensor) {
        const int64_t rows = batch.rows(), wide = c.heads * c.width;
        SelectArgs args;
        args.heads = c.heads;
        args.q = uploaded(*ops, rows, wide, {c.q.begin() + first * wide, c.q.end()});
        args.weights = uploaded(*ops, rows, c.heads, {c.weights.begin() + first * c.heads, c.weights.end()});
        args.scale = 0.25f;
        args.weight_scale = 0.5f;
        args.out = ops->scratch(rows, c.most);
        args.rows = batch;
        ops->select_rows(*cache, args);
        return args.out;
      });
    };
    const std::string what = std::to_string(c.windows) + " windows";
    // Query i stands at position i * step from the end; the last ones together as rows of a prompt.
    const Floats prompt = run(0, {{table, c.windows - 24, 24}}, 0);
    const Floats other_bound = run(0, {{table, c.windows - 24, 24}}, 200000);
    for (int64_t i = 0; i<24; i += c.windows> 10000 ? 9 : 1) {
      const auto got = row_of(prompt, i, c.most);
      const Floats want = c.expected(i, c.windows - 24 + i);
      for (size_t j = 0; j < want.size(); ++j) ASSERT_EQ(got[j], want[j]) << what << ", row " << i << ", place " << j;
      expect_same(run(i, {{table, c.windows - 24 + i, 1}}, 0), got, what + ", alone");
      expect_same(row_of(other_bound, i, c.most), got, what + ", another bound");
    }
    // Rows of several sequences, short ones among them.
    const int64_t middle = c.windows / 2;
    const Floats users = run(0, {{table, 1, 1}, {table, middle, 2}, {table, c.windows - 1, 1}}, 0);
    const int64_t positions[] = {1, middle, middle + 1, c.windows - 1};
    for (int64_t i = 0; i < 4; ++i) {
      const Floats want = c.expected(i, positions[i]);
      expect_same(row_of(users, i, c.most), want, what + ", user " + std::to_string(i));
    }
  }
}

// Protects scores that are no numbers: they come last, and spoil no other row.
TEST(CudaLatents, NanScoresComeLast) {
  TF_NEED_GPU();
  const auto ops = gpu_ops();
  constexpr int64_t kWindows = 64, kWidth = 32, kMost = 60;
  const std::vector<RowCacheLayer> layers = {{kWidth, 1}};
  const auto cache = ops->make_row_cache(layers, 1);
  Floats keys(kWindows * kWidth, 1.0f);
  for (const int64_t bad : {3, 40, 41, 63}) keys[static_cast<size_t>(bad * kWidth + 7)] = std::nanf("");
  const std::vector<int32_t> table = {0};
  fill(*cache, table, keys, kWidth);
  ops->begin_pass();
  const Floats got = Pass({{table, kWindows - 1, 1}}).run(*ops, [&](const RowBatch& batch, Tensor) {
    SelectArgs args;
    args.heads = 1;
    args.q = uploaded(*ops, 1, kWidth, Floats(kWidth, -1.0f));
    args.weights = uploaded(*ops, 1, 1, {1.0f});
    args.out = ops->scratch(1, kMost);
    args.rows = batch;
    ops->select_rows(*cache, args);
    return args.out;
  });
  Floats want;
  for (int64_t w = 0; w < kWindows; ++w) {
    if (w != 3 && w != 40 && w != 41 && w != 63) want.push_back(static_cast<float>(w));
  }
  expect_same(got, want, "places");
}

// --- Attention ------------------------------------------------------------------------------------------------------

enum class Mode { kChosen, kAll, kWindow, kWindowChosen };

// Latents of a sequence, pooled rows of its windows of 4, queries and choices of its last rows.
struct AttentionCase {
  static constexpr int64_t kTokens = 4, kRows = 70, kWindow = 100;
  int64_t length, width, heads, most;
  Floats latents, pooled, q, selected, sinks;

  AttentionCase(int64_t tokens, int64_t dim, int64_t of_heads, int64_t chosen, uint32_t seed)
      : length(tokens), width(dim), heads(of_heads), most(chosen) {
    latents = bf16_floats(static_cast<size_t>(length * width), seed);
    pooled = bf16_floats(static_cast<size_t>(length / kTokens * width), seed + 1);
    q = bf16_floats(static_cast<size_t>(kRows * heads * width), seed + 2);
    sinks = random_floats(static_cast<size_t>(heads), seed + 3, 2.0f);
    std::mt19937 engine(seed + 4);
    for (int64_t i = 0; i < kRows; ++i) {
      std::vector<float> order(static_cast<size_t>((position(i) + 1) / kTokens));
      std::iota(order.begin(), order.end(), 0.0f);
      std::shuffle(order.begin(), order.end(), engine);
      order.resize(std::min<size_t>(order.size(), static_cast<size_t>(most)));
      std::sort(order.begin(), order.end());
      order.resize(static_cast<size_t>(most), -1.0f);
      selected.insert(selected.end(), order.begin(), order.end());
    }
  }
  int64_t position(int64_t i) const { return length - kRows + i; }
  int64_t page_count() const { return (length + kPageTokens - 1) / kPageTokens; }
  std::vector<std::vector<double>> list(int64_t i, Mode mode) const {
    std::vector<std::vector<double>> rows;
    const int64_t windows = (position(i) + 1) / kTokens;
    const bool chooses = mode == Mode::kChosen || mode == Mode::kWindowChosen;
    const auto token = [&](int64_t p) { rows.push_back(part(latents, p * width, width)); };
    for (int64_t j = 0; mode != Mode::kAll && j < (chooses ? most : windows); ++j) {
      const auto w = chooses ? static_cast<int64_t>(selected[static_cast<size_t>(i * most + j)]) : j;
      if (w < 0) break;
      for (int64_t t = 0; mode == Mode::kChosen && t < kTokens; ++t) token(w * kTokens + t);
      if (mode != Mode::kChosen) rows.push_back(part(pooled, w * width, width));
    }
    int64_t first = mode == Mode::kAll ? 0 : windows * kTokens;
    if (mode == Mode::kWindow || mode == Mode::kWindowChosen) first = std::max<int64_t>(0, position(i) + 1 - kWindow);
    for (int64_t p = first; p <= position(i); ++p) token(p);
    return rows;
  }
};

class AttentionRunner {
 public:
  AttentionRunner(Ops& ops, const AttentionCase& c) : ops_(ops), case_(c) {
    const auto count = static_cast<int32_t>(c.page_count());
    table_ = pages_of(count, 1, 1, count + 1);
    const std::vector<RowCacheLayer> layers = {{c.width, 1}, {c.width, AttentionCase::kTokens}};
    cache_ = ops.make_row_cache(layers, count + 1);
    const int64_t tokens = kPageTokens * c.width, pooled = tokens / AttentionCase::kTokens;
    for (int64_t i = 0; i < count; ++i) {
      Floats page(static_cast<size_t>(tokens + pooled), 0.0f);
      const auto copy = [&](const Floats& from, int64_t size, int64_t at) {
        const int64_t first = i * size, own = std::clamp<int64_t>(static_cast<int64_t>(from.size()) - first, 0, size);
        std::copy_n(from.begin() + first, own, page.begin() + at);
      };
      copy(c.latents, tokens, 0);
      copy(c.pooled, pooled, tokens);
      cache_->load_page(table_[static_cast<size_t>(i)], std::as_bytes(std::span<const float>(page)));
    }
  }

  // Heads [head, head + heads) of queries [first, first + rows): one sequence, or a sequence each.
  Floats run(Mode mode, int64_t first, int64_t rows, int64_t head, int64_t heads, bool apart = false,
             int64_t least_keys = 0) {
    ops_.begin_pass();
    std::vector<Span> spans;
    for (int64_t i = 0; i < (apart ? rows : 1); ++i) {
      spans.push_back({table_, case_.position(first + i), apart ? 1 : rows});
    }
    Pass pass(spans);
    pass.least_keys = least_keys;
    return pass.run(ops_, [&](const RowBatch& batch, Tensor) {
      const Inputs in = upload(first, rows, head, heads);
      return attend(mode, batch, in, heads);
    });
  }
  // The same in a kept run, as it comes out of the graph.
  Floats graph(Mode mode, int64_t first, int64_t rows, int64_t heads) {
    ops_.begin_pass();
    const int64_t wide = case_.heads * case_.width;
    const Tensor q = ops_.persistent(AttentionCase::kRows, wide),
                 selected = ops_.persistent(AttentionCase::kRows, case_.most);
    ops_.upload({case_.q.begin() + first * wide, case_.q.begin() + (first + rows) * wide}, q.row_range(0, rows));
    ops_.upload({case_.selected.begin() + first * case_.most, case_.selected.begin() + (first + rows) * case_.most},
                selected.row_range(0, rows));
    const auto sinks = ops_.pack_vector(case_.sinks);
    const Pass pass({{table_, case_.position(first), rows}});
    Floats out;
    for (int i = 0; i < 2; ++i) {
      out = pass.run(
          ops_,
          [&](const RowBatch& batch, Tensor) {
            return attend(mode, batch, {q.row_range(0, batch.rows()), selected.row_range(0, batch.rows()), sinks.get()},
                          heads);
          },
          {}, true);
    }
    ops_.forget_runs();
    return out;
  }

 private:
  struct Inputs {
    Tensor q, selected;
    const Vector* sinks = nullptr;
  };
  Inputs upload(int64_t first, int64_t rows, int64_t head, int64_t heads) {
    const AttentionCase& c = case_;
    Floats q;
    for (int64_t r = first; r < first + rows; ++r) {
      const auto at = c.q.begin() + (r * c.heads + head) * c.width;
      q.insert(q.end(), at, at + heads * c.width);
    }
    sinks_ = ops_.pack_vector(
        std::span<const float>(c.sinks).subspan(static_cast<size_t>(head), static_cast<size_t>(heads)));
    return {uploaded(ops_, rows, heads * c.width, q),
            uploaded(ops_, rows, c.most, {c.selected.begin() + first * c.most, c.selected.end()}), sinks_.get()};
  }
  Tensor attend(Mode mode, const RowBatch& batch, const Inputs& in, int64_t heads) {
    LatentAttentionArgs args;
    args.q = in.q;
    args.out = ops_.scratch(in.q.rows, in.q.cols);
    args.heads = heads;
    args.scale = 0.11f;
    args.tokens = AttentionCase::kTokens;
    args.rows = batch;
    const bool window = mode == Mode::kWindow || mode == Mode::kWindowChosen;
    if (mode == Mode::kChosen || mode == Mode::kWindowChosen) args.selected = in.selected;
    if (window) {
      args.window = AttentionCase::kWindow;
      args.pooled = 1;
      args.sinks = in.sinks;
    }
    ops_.latent_attention(*cache_, args);
    return args.out;
  }

  Ops& ops_;
  const AttentionCase& case_;
  std::vector<int32_t> table_;
  std::unique_ptr<RowCache> cache_;
  std::unique_ptr<Vector> sinks_;
};

// Protects attention over lists: values against double precision; the same bits alone, among rows of its sequence and
// of others, for a part of the heads, for longer bounds (more splits and waves of them), and in graphs.
TEST(CudaLatents, Attention) {
  TF_NEED_GPU();
  const auto ops = gpu_ops(true);
  for (const AttentionCase& c : {AttentionCase(200, 32, 8, 8, 41), AttentionCase(3000, 512, 40, 150, 42),
                                 AttentionCase(900, 104, 5, 135, 43), AttentionCase(2600, 256, 17, 600, 44)}) {
    AttentionRunner runner(*ops, c);
    const int64_t rows = AttentionCase::kRows, wide = c.heads * c.width;
    for (const Mode mode : {Mode::kChosen, Mode::kAll, Mode::kWindow, Mode::kWindowChosen}) {
      const std::string what = "width " + std::to_string(c.width) + " mode " + std::to_string(static_cast<int>(mode));
      const Floats prompt = runner.run(mode, 0, rows, 0, c.heads);
      const Floats apart = runner.run(mode, 0, 30, 0, c.heads, true);
      const Floats bound = runner.run(mode, 0, rows, 0, c.heads, false, 300000);
      expect_same(bound, prompt, what + ", another bound");
      for (const int64_t r : {int64_t{0}, int64_t{13}, int64_t{29}, rows - 1}) {
        const auto got = row_of(prompt, r, wide);
        expect_same(runner.run(mode, r, 1, 0, c.heads), got, what + ", alone");
        if (r < 30) expect_same(row_of(apart, r, wide), got, what + ", beside other sequences");
        const int64_t some = std::min<int64_t>(3, c.heads);
        const auto last = static_cast<size_t>(some * c.width);
        expect_same(runner.run(mode, r, 1, c.heads - some, some), got.last(last), what + ", some heads");
        const std::vector<std::vector<double>> list = c.list(r, mode);
        for (int64_t h = 0; h < c.heads; h += 4) {
          const double sink = c.sinks[static_cast<size_t>(h)];
          const bool sinks = mode == Mode::kWindow || mode == Mode::kWindowChosen;
          const std::vector<double> want = ref_latent_attention(part(c.q, (r * c.heads + h) * c.width, c.width), list,
                                                                double{0.11f}, sinks ? &sink : nullptr);
          // Weights are rounded to bf16.
          expect_close(got.subspan(static_cast<size_t>(h * c.width), static_cast<size_t>(c.width)), want, 0.02, what);
        }
      }
      const Floats graph = runner.graph(mode, 5, 3, c.heads);
      for (int64_t i = 0; i < 3; ++i)
        expect_same(row_of(graph, i, wide), row_of(prompt, 5 + i, wide), what + ", graph");
    }
  }
}

}  // namespace
}  // namespace tensorfold
