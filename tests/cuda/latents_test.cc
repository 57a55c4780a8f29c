// Operations on rows with latents: norms, rotations, pooled rows and their choice. Values against double precision; the
// same bits alone and among others, in pieces and whole, for any bound on the context.
#include <cmath>
#include <numeric>

#include "tests/cuda/latent_cases.h"

namespace tensorfold {
namespace {

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

}  // namespace
}  // namespace tensorfold
