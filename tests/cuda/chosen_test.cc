// Attention over chosen keys on a GPU: pooled keys, the choice of windows, and attention over what was chosen. Values
// against double precision; the same bits in chunks, one by one, after rejected drafts, beside other sequences, eager
// and kept; attention's own bits where everything is chosen; choices of large contexts against the host's.
#include <algorithm>
#include <limits>

#include "kernels/cuda/select_windows.h"
#include "kernels/ops/stream_ops.h"
#include "kernels/reference/reference_streams.h"
#include "tests/cuda/stream_ops.h"

namespace tensorfold {
namespace {

struct Shape {
  int64_t heads, kv_heads, dim, index_heads, index_dim, tokens;

  int64_t q_cols() const { return heads * dim; }
  int64_t kv_cols() const { return kv_heads * dim; }
  int64_t index_cols() const { return index_heads * index_dim; }
  // A row's inputs: q | k | v | index q | index k.
  int64_t cols() const { return q_cols() + 2 * kv_cols() + index_cols() + index_dim; }
  int64_t index_at() const { return q_cols() + 2 * kv_cols(); }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(dim)); }
  std::vector<int32_t> kv_head_of() const {
    std::vector<int32_t> of;
    for (int64_t h = 0; h < heads; ++h) of.push_back(static_cast<int32_t>(h * kv_heads / heads));
    return of;
  }
};

std::vector<float> columns_of(const std::vector<float>& rows, int64_t cols, int64_t first, int64_t count) {
  std::vector<float> out;
  for (size_t at = 0; at < rows.size(); at += static_cast<size_t>(cols)) {
    out.insert(out.end(), rows.begin() + static_cast<int64_t>(at) + first,
               rows.begin() + static_cast<int64_t>(at) + first + count);
  }
  return out;
}

constexpr int64_t kSequences = 2;

// One attention layer and its caches for two sequences of at most `length` tokens.
class Layer {
 public:
  Layer(Ops& ops, const Shape& shape, int64_t length, int64_t most)
      : ops_(ops), shape_(shape), length_(length), most_(most), kv_head_of_(shape.kv_head_of()) {
    ops.forget_runs();
    const int64_t pages = kSequences * ((length + kPageTokens - 1) / kPageTokens);
    const RowCacheLayer layers[] = {
        {.width = 7}, {.width = shape.index_dim}, {.width = shape.index_dim, .tokens = shape.tokens}};
    row_cache_ = ops.make_row_cache(layers, pages);
    kv_cache_ = ops.make_kv_cache(2, pages, shape.kv_heads, shape.dim);
    norm_values_ = random_floats(static_cast<size_t>(shape.index_dim), 7);
    norm_ = ops.pack_vector(norm_values_);
    inv_freq_ = ops.pack_vector(kFrequencies);
    std::vector<float> ones(static_cast<size_t>(shape.q_cols() * shape.q_cols()));
    for (int64_t i = 0; i < shape.q_cols(); ++i) ones[static_cast<size_t>(i * shape.q_cols() + i)] = 1.0f;
    MatrixSource source;
    source.rows = source.cols = shape.q_cols();
    source.data = reinterpret_cast<const std::byte*>(ones.data());
    source.row_bytes = source.cols * static_cast<int64_t>(sizeof(float));
    diagonal_ = ops.pack({&source, 1});
  }

  inline static const std::vector<float> kFrequencies = {1.0f, 0.3f, 0.01f};
  const std::vector<float>& norm() const { return norm_values_; }
  RowCache& row_cache() { return *row_cache_; }
  int64_t out_cols() const { return 2 * shape_.q_cols() + most_; }

  Piece piece(int64_t which, int64_t at, int64_t rows) const {
    return {at, rows, 0, rows, pages_for(length_, which, kSequences)};
  }

  // Of each row: attention over what it chose | attention over everything | the windows.
  std::vector<float> pass(const std::vector<Piece>& pieces, const std::vector<float>& input, bool kept) {
    return run_pieces(ops_, pieces, input, shape_.cols(), kept,
                      [this](const RowBatch& rows, Tensor x) { return body(rows, x); });
  }

 private:
  Tensor body(const RowBatch& rows, Tensor x) {
    const int64_t q_cols = shape_.q_cols(), kv_cols = shape_.kv_cols();
    ops_.kv_write(*kv_cache_, 1, x.columns(q_cols, kv_cols), x.columns(q_cols + kv_cols, kv_cols), rows);
    ops_.row_write(*row_cache_, 1, x.columns(shape_.index_at() + shape_.index_cols(), shape_.index_dim), rows);
    PoolMeansArgs means;
    means.from = 1;
    means.into = 2;
    means.tokens = shape_.tokens;
    means.norm = norm_.get();
    means.eps = 1e-6f;
    means.inv_freq = inv_freq_.get();
    means.rows = rows;
    ops_.pool_means(*row_cache_, means);
    const Tensor out = ops_.scratch(rows.rows(), out_cols());
    SelectWindowsArgs select;
    select.layer = 2;
    select.tokens = shape_.tokens;
    select.heads = shape_.index_heads;
    select.q = x.columns(shape_.index_at(), shape_.index_cols());
    select.scale = 0.5f;
    select.out = out.columns(2 * q_cols, most_);
    select.rows = rows;
    ops_.select_windows(*row_cache_, select);
    AttentionArgs args;
    args.q = x.columns(0, q_cols);
    args.out = ops_.scratch_input(rows.rows(), q_cols);
    args.heads = shape_.heads;
    args.head_dim = shape_.dim;
    args.kv_head_of = kv_head_of_;
    args.scale = shape_.scale();
    args.rows = rows;
    // What only products read is rounded: a product with ones on the diagonal gives it back.
    ops_.sparse_attention(*kv_cache_, 1, args, select.out, shape_.tokens);
    ops_.matmul(*diagonal_, args.out, out.columns(0, q_cols));
    ops_.attention(*kv_cache_, 1, args);
    ops_.matmul(*diagonal_, args.out, out.columns(q_cols, q_cols));
    return out;
  }

  Ops& ops_;
  Shape shape_;
  int64_t length_, most_;
  std::vector<int32_t> kv_head_of_;
  std::unique_ptr<RowCache> row_cache_;
  std::unique_ptr<KvCache> kv_cache_;
  std::vector<float> norm_values_;
  std::unique_ptr<Vector> norm_, inv_freq_;
  std::unique_ptr<Weight> diagonal_;
};

// Queries, keys and values are bf16 already, so that rounding them is no part of an error.
std::vector<float> sequence_of(const Shape& shape, int64_t length, uint32_t seed) {
  std::vector<float> rows = random_floats(static_cast<size_t>(length * shape.cols()), seed);
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t column = static_cast<int64_t>(i) % shape.cols();
    if (column < shape.q_cols()) rows[i] *= 4;  // some keys matter much
    if (column < shape.index_at()) rows[i] = rounded_to_bf16(rows[i]);
  }
  return rows;
}

// Rows [from, length) in passes of `chunk` rows after one of all rows before. `drafts`: after each pass, rows of noise
// that are not kept. `beside`: each pass has rows of another sequence too.
std::vector<float> run_chunks(Layer& layer, const Shape& shape, const std::vector<float>& rows, int64_t from,
                              int64_t chunk, bool drafts, bool beside, bool kept) {
  const int64_t length = static_cast<int64_t>(rows.size()) / shape.cols();
  const std::vector<float> noise = sequence_of(shape, length, 99);
  if (from > 0) layer.pass({layer.piece(0, 0, from)}, part_of(rows, 0, from, shape.cols()), false);
  std::vector<float> out;
  int64_t other = 0;
  for (int64_t at = from; at < length; at += chunk) {
    const int64_t count = std::min(chunk, length - at);
    std::vector<Piece> pieces;
    std::vector<float> input;
    const int64_t before = beside ? 3 : 0;
    if (beside) {
      if (other + before > length) other = 0;
      pieces.push_back(layer.piece(1, other, before));
      input = part_of(noise, other, before, shape.cols());
      other += before;
    }
    pieces.push_back(layer.piece(0, at, count));
    const std::vector<float> own = part_of(rows, at, count, shape.cols());
    input.insert(input.end(), own.begin(), own.end());
    const std::vector<float> got = part_of(layer.pass(pieces, input, kept), before, count, layer.out_cols());
    out.insert(out.end(), got.begin(), got.end());
    const int64_t wrong = std::min<int64_t>(5, length - at - count);
    if (drafts && wrong > 0) {
      layer.pass({layer.piece(0, at + count, wrong)}, part_of(noise, at + count, wrong, shape.cols()), kept);
    }
  }
  return out;
}

void check_everything_chosen(const Shape& shape, const std::vector<float>& rows, const std::string& what,
                             int64_t cols) {
  EXPECT_TRUE(
      equal_bits(columns_of(rows, cols, 0, shape.q_cols()), columns_of(rows, cols, shape.q_cols(), shape.q_cols())))
      << what << ": everything is chosen, but attention's bits are others";
}

void check_passes(Ops& ops, const Shape& shape, int64_t length, int64_t most, int64_t from, const std::string& what) {
  const std::vector<float> rows = sequence_of(shape, length, 31);
  std::vector<float> first;
  int64_t cols = 0;
  {
    Layer layer(ops, shape, length, most);
    cols = layer.out_cols();
    first = run_chunks(layer, shape, rows, 0, length, false, false, false);
  }
  if (most * shape.tokens >= length) check_everything_chosen(shape, first, what, cols);
  const std::vector<float> want = part_of(first, from, length - from, cols);
  struct Way {
    int64_t chunk;
    bool drafts, beside, kept;
  };
  for (const Way& way : {Way{1, false, false, false}, Way{1, true, false, true}, Way{7, true, false, false},
                         Way{7, false, true, true}, Way{1, false, true, true}, Way{60, true, true, false}}) {
    Layer layer(ops, shape, length, most);
    const std::vector<float> got = run_chunks(layer, shape, rows, from, way.chunk, way.drafts, way.beside, way.kept);
    EXPECT_TRUE(equal_bits(got, want)) << what << ": chunk " << way.chunk << (way.drafts ? ", drafts" : "")
                                       << (way.beside ? ", beside another" : "") << (way.kept ? ", kept" : "");
  }
}

constexpr Shape kSmall = {4, 2, 32, 3, 20, 4};
constexpr Shape kManyHeads = {20, 1, 64, 5, 72, 4};  // two tiles of queries, of index heads and of index dims
constexpr Shape kWide = {8, 2, 128, 4, 128, 16};
constexpr Shape kWidest = {8, 2, 256, 2, 32, 8};

// Protects: the same bits in every kind of pass; lists in one split and in several; attention's own bits.
TEST(CudaChosen, SameBitsInEveryPass) {
  TF_NEED_GPU();
  const std::unique_ptr<Ops> ops = gpu_ops();
  check_passes(*ops, kSmall, 200, 6, 0, "small");
  check_passes(*ops, kSmall, 200, 50, 0, "small, everything");
  check_passes(*ops, kManyHeads, 1100, 160, 1030, "many heads");
  check_passes(*ops, kManyHeads, 1100, 275, 1030, "many heads, everything");
  check_passes(*ops, kWide, 700, 20, 640, "wide");
  check_passes(*ops, kWidest, 1000, 100, 940, "widest");
  check_passes(*ops, kWidest, 1000, 125, 940, "widest, everything");
}

TEST(CudaChosen, SameBitsInEveryPassFp8) {
  TF_NEED_GPU();
  const std::unique_ptr<Ops> ops = gpu_ops("fp8");
  check_passes(*ops, kSmall, 200, 6, 60, "small");
  check_passes(*ops, kSmall, 200, 50, 60, "small, everything");
  check_passes(*ops, kManyHeads, 700, 175, 640, "many heads, everything");
  check_passes(*ops, kWide, 700, 44, 640, "wide, everything");
  check_passes(*ops, kWidest, 1000, 100, 940, "widest");
  check_passes(*ops, kWidest, 1000, 125, 940, "widest, everything");
}

// Protects the values: pooled keys, the choice, and attention over it.
TEST(CudaChosen, AgreesWithDoublePrecision) {
  TF_NEED_GPU();
  const std::unique_ptr<Ops> ops = gpu_ops();
  for (const auto& [shape, length, most] : {std::tuple<Shape, int64_t, int64_t>{kSmall, 150, 6},
                                            {kManyHeads, 300, 20},
                                            {kWide, 400, 9},
                                            {kWidest, 700, 70}}) {
    const std::vector<float> rows = sequence_of(shape, length, 32);
    Layer layer(*ops, shape, length, most);
    const std::vector<float> got = run_chunks(layer, shape, rows, 0, length, false, false, false);
    const RefMatrix keys =
        ref_of(length, shape.index_dim,
               columns_of(rows, shape.cols(), shape.index_at() + shape.index_cols(), shape.index_dim));
    const RefMatrix pooled = ref_pool_means(keys, shape.tokens, layer.norm(), 1e-6, Layer::kFrequencies);
    // The first page of the sequence: its pooled rows are the last part of its bytes.
    const int64_t page_rows = kPageTokens / shape.tokens;
    RowCache& cache = layer.row_cache();
    std::vector<std::byte> bytes(static_cast<size_t>(cache.page_bytes()));
    cache.save_page(pages_for(length, 0, kSequences)[0], bytes);
    std::vector<float> stored(static_cast<size_t>(page_rows * shape.index_dim));
    std::memcpy(stored.data(), bytes.data() + bytes.size() - stored.size() * sizeof(float),
                stored.size() * sizeof(float));
    RefMatrix first_page(page_rows, shape.index_dim);
    first_page.v.assign(pooled.v.begin(), pooled.v.begin() + page_rows * shape.index_dim);
    EXPECT_LT(error_of(stored, first_page, 0.1), 2e-5);

    double margin = 0;
    const RefMatrix index_q =
        ref_of(length, shape.index_cols(), columns_of(rows, shape.cols(), shape.index_at(), shape.index_cols()));
    const auto windows = ref_select_windows(index_q, pooled, shape.index_heads, shape.tokens, most, &margin);
    EXPECT_GT(margin, 1e-5) << "near-ties: take another seed";
    const auto part = [&](int64_t first, int64_t count) {
      return ref_of(length, count, columns_of(rows, shape.cols(), first, count));
    };
    const RefMatrix want =
        ref_sparse_attention(part(0, shape.q_cols()), part(shape.q_cols(), shape.kv_cols()),
                             part(shape.q_cols() + shape.kv_cols(), shape.kv_cols()), shape.heads, shape.dim,
                             shape.kv_head_of(), windows, shape.tokens, double{shape.scale()});
    const int64_t cols = layer.out_cols();
    EXPECT_LT(error_of(columns_of(got, cols, 0, shape.q_cols()), want, 1.0), 2e-2) << shape.dim;
    const std::vector<float> chosen = columns_of(got, cols, 2 * shape.q_cols(), most);
    for (int64_t r = 0; r < length; ++r) {
      std::vector<float> expected(static_cast<size_t>(most), -1.0f);
      const std::vector<int64_t>& row = windows[static_cast<size_t>(r)];
      for (size_t i = 0; i < row.size(); ++i) expected[i] = static_cast<float>(row[i]);
      ASSERT_EQ(part_of(chosen, r, 1, most), expected) << "row " << r;
    }
  }
}

// --- Large contexts -------------------------------------------------------------------------------------------------

// A pooled layer of one sequence, and what the host chooses from it by the very same scores.
struct Windows {
  static constexpr int64_t kTokens = 4, kWidth = 12, kHeads = 5;
  int64_t count;
  std::vector<float> keys;  // [count, kWidth]

  // `steps`: values are whole numbers of quarters in +-steps, so that many scores are equal; 0: no such thing.
  Windows(int64_t n, int steps, uint32_t seed) : count(n), keys(random_floats(static_cast<size_t>(n * kWidth), seed)) {
    if (steps > 0) quarter(&keys, steps);
    for (int64_t i = 1000; i < n; i += 4999) keys[static_cast<size_t>(i * kWidth)] = NAN;
  }
  static void quarter(std::vector<float>* values, int steps) {
    const float most = static_cast<float>(steps);
    for (float& v : *values) v = std::clamp(std::round(v * 2.0f), -most, most) * 0.25f;
  }

  float score(const float* q, int64_t window, float scale) const {
    const float* key = keys.data() + window * kWidth;
    float total = 0.0f;
    for (int64_t h = 0; h < kHeads; ++h) {
      float chain[4] = {};
      for (int64_t d = 0; d < kWidth; ++d) chain[d % 4] = std::fma(q[h * kWidth + d], key[d], chain[d % 4]);
      const float product = (chain[0] + chain[1]) + (chain[2] + chain[3]);
      total += product < 0.0f ? 0.0f : product;
    }
    return total * scale;
  }
  std::vector<float> choice(const float* q, int64_t position, int64_t most, float scale) const {
    const int64_t windows = (position + 1) / kTokens, chosen = std::min(windows, most);
    std::vector<Candidate> all;
    for (int64_t w = 0; w < windows; ++w) all.push_back({score(q, w, scale), static_cast<int32_t>(w)});
    std::partial_sort(all.begin(), all.begin() + chosen, all.end(), candidate_before);
    std::vector<float> out;
    for (int64_t i = 0; i < chosen; ++i) out.push_back(static_cast<float>(all[static_cast<size_t>(i)].id));
    std::sort(out.begin(), out.end());
    out.resize(static_cast<size_t>(most), -1.0f);
    return out;
  }
  // Row caches take whole pages.
  void fill(RowCache& cache, const std::vector<int32_t>& pages) const {
    const int64_t of_page = kPageTokens / kTokens * kWidth;
    for (size_t i = 0; i < pages.size(); ++i) {
      std::vector<float> values(static_cast<size_t>(of_page));
      const int64_t first = static_cast<int64_t>(i) * of_page;
      const int64_t there = std::clamp<int64_t>(static_cast<int64_t>(keys.size()) - first, 0, of_page);
      std::copy_n(keys.begin() + first, there, values.begin());
      cache.load_page(pages[i], std::as_bytes(std::span<const float>(values)));
    }
  }
};

// Protects the choice where blocks share a row's windows, on two levels and more: equal scores, NaN, rows whose windows
// just fit; many rows at once; eager and kept.
TEST(CudaChosen, LargeContextsChooseWhatTheHostDoes) {
  TF_NEED_GPU();
  constexpr int64_t kCount = 40000, kWidth = Windows::kWidth, kTokens = Windows::kTokens;
  constexpr float kSelectScale = 0.37f;
  const std::unique_ptr<Ops> ops = gpu_ops();
  const std::vector<int64_t> positions = {kCount * kTokens - 1,
                                          kCount * kTokens - 2,
                                          100002,
                                          8192 * kTokens - 1,
                                          8192 * kTokens + 3,
                                          8191 * kTokens + 2,
                                          23,
                                          2,
                                          2051 * kTokens - 1,
                                          65535};
  for (const int steps : {0, 1, 3}) {
    const Windows windows(kCount, steps, 51);
    const RowCacheLayer layers[] = {{.width = kWidth, .tokens = kTokens}};
    const std::vector<int32_t> pages = pages_for(kCount * kTokens, 0, 1);
    const auto cache = ops->make_row_cache(layers, static_cast<int64_t>(pages.size()));
    windows.fill(*cache, pages);
    const int64_t cols = Windows::kHeads * kWidth, rows = static_cast<int64_t>(positions.size());
    std::vector<float> q = random_floats(static_cast<size_t>(rows * cols), 52);
    if (steps > 0) Windows::quarter(&q, steps);
    for (const int64_t most : {int64_t{1}, int64_t{5}, int64_t{512}, kMostChosen}) {
      ops->forget_runs();
      const auto select = [&](const RowBatch& batch, Tensor x) {
        SelectWindowsArgs args;
        args.layer = 0;
        args.tokens = kTokens;
        args.heads = Windows::kHeads;
        args.q = x;
        args.scale = kSelectScale;
        args.out = ops->scratch(batch.rows(), most);
        args.rows = batch;
        ops->select_windows(*cache, args);
        return args.out;
      };
      std::vector<Piece> pieces;
      std::vector<float> want;
      for (int64_t r = 0; r < rows; ++r) {
        pieces.push_back({positions[static_cast<size_t>(r)], 1, 0, 1, pages});
        const std::vector<float> row =
            windows.choice(q.data() + r * cols, positions[static_cast<size_t>(r)], most, kSelectScale);
        want.insert(want.end(), row.begin(), row.end());
      }
      for (const bool kept : {false, true}) {
        EXPECT_EQ(run_pieces(*ops, pieces, q, cols, kept, select), want) << most << " of steps " << steps << kept;
      }
      // One sequence's last rows, as a prompt has them.
      const Piece prompt = {kCount * kTokens - rows, rows, 0, rows, pages};
      want.clear();
      for (int64_t r = 0; r < rows; ++r) {
        const std::vector<float> row = windows.choice(q.data() + r * cols, prompt.first + r, most, kSelectScale);
        want.insert(want.end(), row.begin(), row.end());
      }
      EXPECT_EQ(run_pieces(*ops, {prompt}, q, cols, false, select), want) << most << " of steps " << steps;
    }
  }
}

// Protects the order of scores as numbers: candidate_before, but for the window's number.
TEST(ScoreKey, IsTheOrder) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> scores = {infinity, 3.4e38f, 1.0f,  1e-38f,    1e-45f, 0.0f,
                                     -0.0f,    -1e-45f, -1.0f, -infinity, NAN};
  const auto key = [](float score) {
    uint32_t bits = 0;
    std::memcpy(&bits, &score, 4);
    return score_key(bits);
  };
  for (size_t i = 0; i < scores.size(); ++i) {
    EXPECT_NE(key(scores[i]), 0u);
    for (size_t j = 0; j < scores.size(); ++j) {
      // The first of two equal ones by their numbers, whichever they are.
      const bool before = candidate_before({scores[i], 0}, {scores[j], 1});
      const bool after = candidate_before({scores[j], 0}, {scores[i], 1});
      EXPECT_EQ(key(scores[i]) > key(scores[j]), before && !after) << scores[i] << " and " << scores[j];
    }
  }
}

}  // namespace
}  // namespace tensorfold
