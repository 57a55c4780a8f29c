// Gated streams, the dilated convolution with its state, and attention over chosen keys.
#include <algorithm>
#include <cmath>

#include "kernels/ops/stream_ops.h"
#include "kernels/reference/reference_streams.h"
#include "tests/kernels/checks.h"
#include "tests/kernels/ngram_cases.h"

namespace tensorfold {
namespace {

constexpr int64_t kRows = 21;

std::vector<float> first_rows(const std::vector<float>& all, int64_t rows, int64_t cols) {
  return {all.begin(), all.begin() + rows * cols};
}

struct Streams {
  int64_t count, width;
  std::vector<float> x, gate, inject, y, query;

  Streams(int64_t n, int64_t w, uint64_t seed) : count(n), width(w) {
    Random random(seed);
    x = random.vector(kRows * n * w);
    gate = random.vector(kRows * n * w);
    for (float& g : gate) g *= 6;
    inject = random.vector(kRows * n);
    y = random.vector(kRows * w);
    query = random.vector(kRows * n * w);
    std::fill(query.begin(), query.begin() + w, 0.0f);  // a score of exactly 0
  }
};

// Results of the four operations on the first `rows` rows, one after another.
std::vector<float> run_streams(Ops& ops, const Streams& s, int64_t rows) {
  ops.begin_pass();
  const int64_t all = s.count * s.width;
  const Tensor x = upload(ops, rows, all, first_rows(s.x, rows, all));
  const Tensor gate = upload(ops, rows, all, first_rows(s.gate, rows, all));
  const Tensor y = upload(ops, rows, s.width, first_rows(s.y, rows, s.width));
  const Tensor mixed = ops.scratch(rows, s.width), gated = ops.scratch(rows, all);
  ops.mix_streams({.x = x, .gate = gate, .count = s.count, .out = mixed});
  const Tensor query = upload(ops, rows, all, first_rows(s.query, rows, all));
  ops.gate_streams({.key = gate, .query = query, .value = y, .count = s.count, .out = gated});
  const Tensor inject = upload(ops, rows, s.count, first_rows(s.inject, rows, s.count));
  ops.inject_streams({.x = x, .inject = inject, .count = s.count, .y = y});
  ops.scaled_silu(gate, 0.25f);
  std::vector<float> out;
  for (const Tensor& t : {mixed, gated, x, gate}) {
    // Row by row, so that fewer rows are a prefix of each part.
    const std::vector<float> part = download(ops, t);
    out.insert(out.end(), part.begin(), part.end());
  }
  ops.clear(gate);
  for (const float v : download(ops, gate)) out.push_back(v);
  return out;
}

// Protects mixing, gating, injecting and the scaled silu against double precision, and across variants, threads and
// row counts.
void gated_streams(Checker& c) {
  for (const auto& [count, width] : {std::pair<int64_t, int64_t>{4, 64}, {2, 19}, {3, 5000}}) {
    const Streams s(count, width, 80);
    const int64_t all = count * width;
    const RefMatrix x = to_ref(kRows, all, s.x), gate = to_ref(kRows, all, s.gate), y = to_ref(kRows, width, s.y);
    const RefMatrix wants[] = {ref_mix_streams(x, gate, count),
                               ref_gate_streams(gate, to_ref(kRows, all, s.query), y, count),
                               ref_inject_streams(x, to_ref(kRows, count, s.inject), y, count)};
    std::vector<float> first;
    for (Variant& v : all_variants({1, 2, 3})) {
      for (int64_t rows : {kRows, int64_t{1}, int64_t{2}}) {
        const std::vector<float> got = run_streams(*v.ops, s, rows);
        const std::string what = v.name + ", " + std::to_string(rows) + " rows of " + std::to_string(width);
        if (first.empty()) {
          first = got;
          auto at = got.begin();
          for (const RefMatrix& want : wants) {
            const std::vector<float> part(at, at + static_cast<ptrdiff_t>(want.v.size()));
            c.expect(relative_error(part, want, 0.1) < 1e-5, "streams against the reference: " + what);
            at += static_cast<ptrdiff_t>(want.v.size());
          }
          for (int64_t i = 0; i < kRows * all; ++i) {
            const double z = static_cast<double>(s.gate[static_cast<size_t>(i)]) * 0.25;
            c.expect(std::abs(static_cast<double>(at[i]) - z / (1 + std::exp(-z))) < 1e-6, "scaled silu: " + what);
          }
          c.expect(std::all_of(at + kRows * all, got.end(), [](float z) { return z == 0.0f; }), "clear: " + what);
        }
        auto from = first.begin();
        auto at = got.begin();
        for (const int64_t cols : {width, all, all, all}) {
          c.expect(same_bits({at, at + rows * cols}, {from, from + rows * cols}), "streams differ: " + what);
          from += kRows * cols;
          at += rows * cols;
        }
      }
    }
  }
}

constexpr ShortConvShape kConv = {.channels = 40, .taps = 4, .dilation = 3, .context = 2, .max_window = 8};

struct Line {
  std::vector<float> x;
  std::vector<int32_t> tokens;

  Line(int64_t rows, uint64_t seed) {
    Random random(seed);
    x = random.vector(rows * kConv.channels);
    for (int64_t i = 0; i < rows; ++i) tokens.push_back(static_cast<int32_t>(random.below(20)));
  }
};

// Rows [position, position + rows) of a line, with what their n-grams find.
std::vector<float> conv_pass(Ops& ops, const Line& line, const std::vector<float>& weights, RecurrentState* state,
                             int64_t position, int64_t rows, int64_t accepted, int64_t certain, const Ngrams& ngrams,
                             std::vector<float>* found) {
  ops.begin_pass();
  const auto conv = ops.pack_vector(weights);
  const RowGroup group{0, rows, position, accepted, certain, {}};
  const std::vector<RecurrentState*> layers[] = {{state}};
  RowBatch batch = batch_of({&group, 1});
  batch.tokens = std::span(line.tokens).subspan(static_cast<size_t>(position), static_cast<size_t>(rows));
  batch.recurrent = layers;
  const Tensor looked_up = ops.scratch(rows, 3 * Ngrams::kCols);
  const std::vector<const Weight*> tables = borrowed(ngrams.tables);
  ops.embed_ngrams({.heads = &ngrams.heads,
                    .shape = &kConv,
                    .tables = tables,
                    .first_head = 1,
                    .out = looked_up,
                    .rows = batch,
                    .layer = 0});
  *found = download(ops, looked_up);
  ShortConvArgs args;
  args.shape = &kConv;
  args.x = upload(ops, rows, kConv.channels,
                  {line.x.begin() + position * kConv.channels, line.x.begin() + (position + rows) * kConv.channels});
  args.conv = conv.get();
  args.out = ops.scratch(rows, kConv.channels);
  args.rows = batch;
  ops.short_conv(args);
  return download(ops, args.out);
}

// Protects the dilated convolution and the tokens that its state keeps: against double precision, in chunks of any
// size, in windows of which any number of rows is accepted, and when the state is put away between passes.
void short_conv(Checker& c) {
  constexpr int64_t kLength = 50;
  const Line line(kLength, 81), wrong(kLength, 82);
  const std::vector<float> weights = Random(83).vector(kConv.channels * kConv.taps);
  const RefMatrix want = ref_short_conv(kConv, to_ref(kLength, kConv.channels, line.x), weights);
  std::vector<float> first;
  const auto check = [&](const std::string& what, const std::vector<float>& got, int64_t at, int64_t rows,
                         const Ngrams& ngrams, const std::vector<float>& found) {
    const auto begin = first.begin() + at * kConv.channels;
    c.expect(same_bits(first_rows(got, rows, kConv.channels), {begin, begin + rows * kConv.channels}), what);
    for (int64_t r = 0; r < rows; ++r) {
      const auto own = found.begin() + r * 3 * Ngrams::kCols;
      c.expect(std::vector<float>(own, own + 3 * Ngrams::kCols) == ngrams.want(line.tokens, at + r),
               what + ": n-grams");
    }
  };
  std::vector<float> found;
  for (Variant& v : all_variants({1, 2})) {
    const Ngrams ngrams(*v.ops);
    for (int64_t chunk : {kLength, int64_t{1}, int64_t{7}}) {
      const auto state = v.ops->make_recurrent_state(kConv);
      for (int64_t at = 0; at < kLength; at += chunk) {
        const int64_t rows = std::min(chunk, kLength - at);
        const std::vector<float> got = conv_pass(*v.ops, line, weights, state.get(), at, rows, 0, rows, ngrams, &found);
        if (first.empty()) first = got;
        check(v.name + " chunk " + std::to_string(chunk), got, at, rows, ngrams, found);
      }
    }
    Random random(84);
    for (int trial = 0; trial < 5; ++trial) {
      auto state = v.ops->make_recurrent_state(kConv);
      int64_t at = 0, accepted = 0;
      while (at + 9 < kLength) {
        const int64_t tentative = random.below(9), good = random.below(tentative + 1);
        Line drafted = line;
        for (int64_t r = at + 1 + good; r < at + 1 + tentative; ++r) {
          std::copy_n(wrong.x.begin() + r * kConv.channels, kConv.channels, drafted.x.begin() + r * kConv.channels);
          drafted.tokens[static_cast<size_t>(r)] = wrong.tokens[static_cast<size_t>(r)];
        }
        const std::vector<float> got =
            conv_pass(*v.ops, drafted, weights, state.get(), at, 1 + tentative, accepted, 1, ngrams, &found);
        check(v.name + ": window at " + std::to_string(at), got, at, 1 + good, ngrams, found);
        at += 1 + good;
        accepted = good;
        std::vector<std::byte> kept(static_cast<size_t>(state->bytes()));
        state->save(kept);
        state = v.ops->make_recurrent_state(kConv);
        c.expect(state->load(kept, tentative), v.name + ": a state that was saved cannot be loaded");
      }
    }
  }
  c.expect(relative_error(first, want, 0.1) < 1e-5, "short convolution against the reference");
}

// A sequence of queries, keys and index keys; windows of 4 tokens, of which at most 6 are chosen.
struct Chosen {
  static constexpr int64_t kLength = 90, kHeads = 4, kDim = 24, kIndexHeads = 3, kIndexDim = 20, kTokens = 4, kMost = 6;
  std::vector<float> q, k, v, index_q, index_k, norm, inv_freq = {1.0f, 0.3f, 0.01f};
  std::vector<int32_t> pages = {2, 0}, kv_head_of = {0, 0, 1, 1};

  explicit Chosen(uint64_t seed) {
    Random random(seed);
    q = random.vector(kLength * kHeads * kDim);
    k = random.vector(kLength * 2 * kDim);
    v = random.vector(kLength * 2 * kDim);
    for (float& x : q) x *= 4;
    index_q = random.vector(kLength * kIndexHeads * kIndexDim);
    index_k = random.vector(kLength * kIndexDim);
    norm = random.vector(kIndexDim);
  }
};

// The whole sequence in chunks: attention's results, then the chosen windows. With `draft` rows of noise follow each
// chunk and are not kept.
std::vector<float> run_chosen(Ops& ops, const Chosen& s, int64_t chunk, int64_t most, bool draft = false) {
  const RowCacheLayer layers[] = {
      {.width = 7}, {.width = Chosen::kIndexDim}, {.width = Chosen::kIndexDim, .tokens = 4}};
  const auto rows_cache = ops.make_row_cache(layers, 3);
  const auto cache = ops.make_kv_cache(2, 3, 2, Chosen::kDim);
  std::vector<float> out, chosen;
  const auto pass = [&](int64_t at, int64_t rows, bool noise) {
    ops.begin_pass();
    const auto norm = ops.pack_vector(s.norm), inv_freq = ops.pack_vector(s.inv_freq);
    const RowGroup group{0, rows, at, 0, rows, s.pages};
    std::vector<int32_t> tokens(static_cast<size_t>(rows));
    RowBatch batch = batch_of({&group, 1});
    batch.tokens = tokens;
    const auto part = [&](const std::vector<float>& all, int64_t cols) {
      std::vector<float> values(all.begin() + at * cols, all.begin() + (at + rows) * cols);
      for (float& x : values) x = noise ? 3.0f - x : x;
      return upload(ops, rows, cols, values);
    };
    ops.kv_write(*cache, 1, part(s.k, 2 * Chosen::kDim), part(s.v, 2 * Chosen::kDim), batch);
    ops.row_write(*rows_cache, 1, part(s.index_k, Chosen::kIndexDim), batch);
    PoolMeansArgs means;
    means.from = 1;
    means.into = 2;
    means.tokens = Chosen::kTokens;
    means.norm = norm.get();
    means.eps = 1e-6f;
    means.inv_freq = inv_freq.get();
    means.rows = batch;
    ops.pool_means(*rows_cache, means);
    SelectWindowsArgs select;
    select.layer = 2;
    select.tokens = Chosen::kTokens;
    select.heads = Chosen::kIndexHeads;
    select.q = part(s.index_q, Chosen::kIndexHeads * Chosen::kIndexDim);
    select.scale = 0.5f;
    select.out = ops.scratch(rows, most);
    select.rows = batch;
    ops.select_windows(*rows_cache, select);
    AttentionArgs args;
    args.q = part(s.q, Chosen::kHeads * Chosen::kDim);
    args.out = ops.scratch(rows, Chosen::kHeads * Chosen::kDim);
    args.heads = Chosen::kHeads;
    args.head_dim = Chosen::kDim;
    args.kv_head_of = s.kv_head_of;
    args.scale = 0.2f;
    args.rows = batch;
    ops.sparse_attention(*cache, 1, args, select.out, Chosen::kTokens);
    if (noise) return;
    const std::vector<float> got = download(ops, args.out), windows = download(ops, select.out);
    out.insert(out.end(), got.begin(), got.end());
    chosen.insert(chosen.end(), windows.begin(), windows.end());
    if (most < Chosen::kLength / Chosen::kTokens) return;
    // Everything is chosen: attention itself.
    ops.attention(*cache, 1, args);
    const std::vector<float> dense = download(ops, args.out);
    if (!same_bits(dense, got)) out.clear();
  };
  for (int64_t at = 0; at < Chosen::kLength; at += chunk) {
    const int64_t rows = std::min(chunk, Chosen::kLength - at);
    pass(at, rows, false);
    if (draft && at + rows < Chosen::kLength) pass(at + rows, std::min<int64_t>(5, Chosen::kLength - at - rows), true);
  }
  out.insert(out.end(), chosen.begin(), chosen.end());
  return out;
}

// Protects attention over chosen keys: the choice and the values against double precision; the same bits in any chunks,
// on every variant, after drafts that left rows behind; and attention's own bits where everything is chosen.
void chosen_keys(Checker& c) {
  const Chosen s(85);
  constexpr int64_t kCols = Chosen::kHeads * Chosen::kDim, kLength = Chosen::kLength;
  const RefMatrix pooled =
      ref_pool_means(to_ref(kLength, Chosen::kIndexDim, s.index_k), Chosen::kTokens, s.norm, 1e-6, s.inv_freq);
  double margin = 0;
  const auto windows = ref_select_windows(to_ref(kLength, Chosen::kIndexHeads * Chosen::kIndexDim, s.index_q), pooled,
                                          Chosen::kIndexHeads, Chosen::kTokens, Chosen::kMost, &margin);
  c.expect(margin > 1e-5, "the fixture's choices are no near-ties");
  const RefMatrix want = ref_sparse_attention(to_ref(kLength, kCols, s.q), to_ref(kLength, 2 * Chosen::kDim, s.k),
                                              to_ref(kLength, 2 * Chosen::kDim, s.v), Chosen::kHeads, Chosen::kDim,
                                              s.kv_head_of, windows, Chosen::kTokens, 0.2);
  std::vector<float> first, everything;
  for (Variant& v : all_variants({1, 2, 3})) {
    for (int64_t chunk : {kLength, int64_t{1}, int64_t{7}}) {
      const std::vector<float> got = run_chosen(*v.ops, s, chunk, Chosen::kMost);
      if (first.empty()) first = got;
      c.expect(same_bits(got, first), v.name + " chunk " + std::to_string(chunk));
      const std::vector<float> drafted = run_chosen(*v.ops, s, chunk, Chosen::kMost, true);
      c.expect(same_bits(drafted, first), v.name + " chunk " + std::to_string(chunk) + " with drafts");
      const std::vector<float> all = run_chosen(*v.ops, s, chunk, 30);
      if (everything.empty()) everything = all;
      c.expect(!all.empty() && same_bits(all, everything), v.name + " chunk " + std::to_string(chunk) + ", all chosen");
    }
  }
  for (int64_t r = 0; r < kLength; ++r) {
    for (int64_t i = 0; i < Chosen::kMost; ++i) {
      const std::vector<int64_t>& row = windows[static_cast<size_t>(r)];
      const float expected =
          i < static_cast<int64_t>(row.size()) ? static_cast<float>(row[static_cast<size_t>(i)]) : -1;
      c.expect(first[static_cast<size_t>(kLength * kCols + r * Chosen::kMost + i)] == expected,
               "choice of row " + std::to_string(r));
    }
  }
  c.expect(relative_error({first.begin(), first.begin() + kLength * kCols}, want, 0.1) < 2e-5,
           "sparse attention against the reference");
}

// Protects ties: windows of equal scores are taken in ascending order.
void chosen_ties(Checker& c) {
  Chosen s(86);
  std::fill(s.index_q.begin(), s.index_q.end(), 0.0f);  // every score is 0
  for (Variant& v : all_variants({1})) {
    const std::vector<float> got = run_chosen(*v.ops, s, 90, Chosen::kMost);
    const auto last = got.end() - Chosen::kMost;
    c.expect(same_bits({last, got.end()}, {0, 1, 2, 3, 4, 5}), v.name + ": ties");
  }
}

}  // namespace

uint64_t streams_hash(Ops& ops) {
  std::vector<float> found;
  const auto state = ops.make_recurrent_state(kConv);
  const Line line(30, 88);
  const std::vector<float> conv = conv_pass(ops, line, Random(89).vector(kConv.channels * kConv.taps), state.get(), 0,
                                            30, 0, 30, Ngrams(ops), &found);
  return hash_bits(conv, hash_bits(run_streams(ops, Streams(4, 50, 87), kRows)));
}

uint64_t chosen_keys_hash(Ops& ops) { return hash_bits(run_chosen(ops, Chosen(90), 11, Chosen::kMost)); }

std::vector<NamedCheck> stream_checks() {
  return {{"gated_streams", gated_streams},
          {"short_conv", short_conv},
          {"chosen_keys", chosen_keys},
          {"chosen_ties", chosen_ties}};
}

}  // namespace tensorfold
