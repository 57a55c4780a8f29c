// Operations on latents: streams, pooled rows, their choice, attention over lists of rows.
#include <algorithm>
#include <cmath>

#include "kernels/ops/latent_ops.h"
#include "kernels/reference/latents.h"
#include "tests/kernels/checks.h"

namespace tensorfold {
namespace {

std::vector<double> row_of(const std::vector<float>& values, int64_t row, int64_t cols) {
  return {values.begin() + row * cols, values.begin() + (row + 1) * cols};
}

double worst(const std::vector<double>& want, const float* got) {
  double error = 0;
  for (size_t i = 0; i < want.size(); ++i) error = std::max(error, std::abs(want[i] - static_cast<double>(got[i])));
  return error;
}

// --- Streams --------------------------------------------------------------------------------------------------------

struct StreamCase {
  static constexpr int64_t kRows = 9, kCount = 4, kWidth = 300, kMix = kCount * (2 + kCount);
  static constexpr float kEps = 1e-6f;
  std::vector<float> streams, mix, scale, base, y;

  explicit StreamCase(uint64_t seed) {
    Random random(seed);
    streams = random.vector(kRows * kCount * kWidth);
    mix = random.vector(kRows * kMix);
    for (float& value : mix) value *= 3.0f;
    scale = random.vector(3);
    base = random.vector(kMix);
    y = random.vector(kRows * kWidth);
  }

  // Rows [first, first + rows) in one pass: input | weights | new streams | mean of the new streams.
  std::vector<float> run(Ops& ops, int64_t first, int64_t rows) const {
    ops.begin_pass();
    const auto part = [&](const std::vector<float>& from, int64_t cols) {
      return upload(ops, rows, cols, {from.begin() + first * cols, from.begin() + (first + rows) * cols});
    };
    const auto scales = ops.pack_vector(scale), bases = ops.pack_vector(base);
    HyperArgs args;
    args.streams = part(streams, kCount * kWidth);
    args.count = kCount;
    args.mix = part(mix, kMix);
    args.scale = scales.get();
    args.base = bases.get();
    args.eps = kEps;
    args.iterations = 20;
    args.weights = ops.scratch(rows, kCount * (1 + kCount));
    args.out = ops.scratch(rows, kWidth);
    args.zero = part(y, kWidth);
    ops.hyper_collapse(args);
    std::vector<float> all = download(ops, args.out);
    const auto append = [&](Tensor t) {
      const std::vector<float> more = download(ops, t);
      all.insert(all.end(), more.begin(), more.end());
    };
    append(args.weights);
    append(args.zero);
    args.y = part(y, kWidth);
    ops.hyper_expand(args);
    append(args.streams);
    args.mix = {};
    ops.hyper_collapse(args);
    append(args.out);
    return all;
  }
};

// Protects the streams' arithmetic against double precision, and its bits against threads, instruction sets and rows.
void hyper_streams(Checker& c) {
  constexpr int64_t kN = StreamCase::kCount, kWidth = StreamCase::kWidth, kMix = StreamCase::kMix;
  const StreamCase at(81);
  const int64_t per_row = kWidth + kN * (1 + kN) + kWidth + kN * kWidth + kWidth;
  std::vector<std::vector<float>> first;
  for (Variant& v : all_variants({1, 2})) {
    for (int64_t r = 0; r < StreamCase::kRows; ++r) {
      const std::vector<float> alone = at.run(*v.ops, r, 1);
      if (static_cast<int64_t>(first.size()) <= r) first.push_back(alone);
      c.expect(same_bits(alone, first[static_cast<size_t>(r)]), v.name + ": row " + std::to_string(r));
    }
    // Among others each row is the same; results lie by kind, then by row.
    const std::vector<float> together = at.run(*v.ops, 0, StreamCase::kRows);
    int64_t offset = 0, row_offset = 0;
    for (const int64_t width : {kWidth, kN * (1 + kN), kWidth, kN * kWidth, kWidth}) {
      for (int64_t r = 0; r < StreamCase::kRows; ++r) {
        const auto begin = together.begin() + offset + r * width;
        const auto alone = first[static_cast<size_t>(r)].begin() + row_offset;
        c.expect(same_bits({begin, begin + width}, {alone, alone + width}), v.name + ": among others");
      }
      offset += StreamCase::kRows * width;
      row_offset += width;
    }
  }
  for (int64_t r = 0; r < StreamCase::kRows; ++r) {
    const std::vector<float>& got = first[static_cast<size_t>(r)];
    c.expect(static_cast<int64_t>(got.size()) == per_row, "sizes");
    const RefStreamWeights want =
        ref_stream_weights(row_of(at.mix, r, kMix), at.scale, at.base, kN, StreamCase::kEps, 20);
    const std::vector<double> x = row_of(at.streams, r, kN * kWidth), y = row_of(at.y, r, kWidth);
    std::vector<double> input, expanded, mean(static_cast<size_t>(kWidth), 0.0);
    for (int64_t d = 0; d < kWidth; ++d) {
      double sum = 0;
      for (int64_t s = 0; s < kN; ++s) sum += want.pre[static_cast<size_t>(s)] * x[static_cast<size_t>(s * kWidth + d)];
      input.push_back(sum);
    }
    for (int64_t k = 0; k < kN; ++k) {
      for (int64_t d = 0; d < kWidth; ++d) {
        double sum = want.post[static_cast<size_t>(k)] * y[static_cast<size_t>(d)];
        for (int64_t j = 0; j < kN; ++j) sum += want.mix.at(j, k) * x[static_cast<size_t>(j * kWidth + d)];
        expanded.push_back(sum);
        mean[static_cast<size_t>(d)] += sum / kN;
      }
    }
    const std::vector<double> zeros(static_cast<size_t>(kWidth), 0.0);
    const float* at_row = got.data();
    c.expect(worst(input, at_row) < 2e-6, "input");
    at_row += kWidth;
    c.expect(worst(want.post, at_row) < 2e-6 && worst(want.mix.v, at_row + kN) < 2e-6, "weights");
    at_row += kN * (1 + kN);
    c.expect(worst(zeros, at_row) == 0.0, "zero");
    at_row += kWidth;
    c.expect(worst(expanded, at_row) < 4e-6, "streams");
    c.expect(worst(mean, at_row + kN * kWidth) < 4e-6, "mean");
  }
}

// --- Cached rows ----------------------------------------------------------------------------------------------------

// Two sequences of a layer whose rows are pooled by 4, plain (an indexer's keys) and overlapping with norm and rotation
// (compressed latents).
struct RowsCase {
  static constexpr int64_t kLength = 700, kWidth = 40, kIndex = 24, kTokens = 4, kHeads = 5, kMost = 135;
  static constexpr int64_t kIndexHeads = 18, kWindow = 100;
  std::vector<float> latents, index, halves, q, index_q, index_weights, bias, halves_bias, norm, sinks, inv_freq;

  explicit RowsCase(uint64_t seed) {
    Random parameters(5), random(seed);
    bias = parameters.vector(kTokens * kIndex);
    halves_bias = parameters.vector(kTokens * 2 * kWidth);
    norm = parameters.vector(kWidth);
    sinks = parameters.vector(kHeads);
    inv_freq = {1.0f, 0.3f, 0.001f};
    latents = random.vector(kLength * kWidth);
    index = random.vector(kLength * 2 * kIndex);
    halves = random.vector(kLength * 4 * kWidth);
    q = random.vector(kLength * kHeads * kWidth);
    index_q = random.vector(kLength * kIndexHeads * kIndex);
    index_weights = random.vector(kLength * kIndexHeads);
  }
};

constexpr int64_t kSelected = RowsCase::kMost, kMixed = RowsCase::kHeads * RowsCase::kWidth;

struct Span {
  const RowsCase* rows;
  std::span<const int32_t> pages;
  int64_t position, count;
};

std::unique_ptr<RowCache> make_cache(Ops& ops, int64_t pages) {
  const RowCacheLayer layers[] = {{RowsCase::kWidth, 1},
                                  {2 * RowsCase::kIndex, 1},
                                  {RowsCase::kIndex, RowsCase::kTokens},
                                  {4 * RowsCase::kWidth, 1},
                                  {RowsCase::kWidth, RowsCase::kTokens}};
  return ops.make_row_cache(layers, pages);
}

// One pass over some rows of each sequence: choice | attention to chosen tokens | attention to a window, sinks and
// chosen pooled rows, the pass' rows of each together; by row in the result.
std::vector<std::vector<float>> pass(Ops& ops, RowCache& cache, const std::vector<Span>& spans) {
  using R = RowsCase;
  ops.begin_pass();
  std::vector<RowGroup> groups;
  int64_t rows = 0;
  for (const Span& s : spans) {
    groups.push_back({rows, s.count, s.position, 0, s.count, s.pages});
    rows += s.count;
  }
  const auto gather = [&](const std::vector<float> RowsCase::*from, int64_t cols) {
    std::vector<float> all;
    for (const Span& s : spans) {
      const std::vector<float>& values = s.rows->*from;
      all.insert(all.end(), values.begin() + s.position * cols, values.begin() + (s.position + s.count) * cols);
    }
    return upload(ops, rows, cols, all);
  };
  const R& parameters = *spans[0].rows;
  const auto bias = ops.pack_vector(parameters.bias), halves_bias = ops.pack_vector(parameters.halves_bias),
             norm = ops.pack_vector(parameters.norm), sinks = ops.pack_vector(parameters.sinks),
             inv_freq = ops.pack_vector(parameters.inv_freq);
  const RowBatch batch = batch_of(groups);
  ops.row_write(cache, 0, gather(&R::latents, R::kWidth), batch);
  ops.row_write(cache, 1, gather(&R::index, 2 * R::kIndex), batch);
  ops.row_write(cache, 3, gather(&R::halves, 4 * R::kWidth), batch);
  PoolArgs pool;
  pool.from = 1;
  pool.into = 2;
  pool.tokens = R::kTokens;
  pool.bias = bias.get();
  pool.rows = batch;
  ops.pool_rows(cache, pool);
  pool.from = 3;
  pool.into = 4;
  pool.overlap = true;
  pool.bias = halves_bias.get();
  pool.norm = norm.get();
  pool.eps = 1e-6f;
  pool.inv_freq = inv_freq.get();
  ops.pool_rows(cache, pool);
  SelectArgs select;
  select.layer = 2;
  select.tokens = R::kTokens;
  select.heads = R::kIndexHeads;
  select.q = gather(&R::index_q, R::kIndexHeads * R::kIndex);
  select.weights = gather(&R::index_weights, R::kIndexHeads);
  select.scale = 0.25f;
  select.weight_scale = 0.5f;
  select.out = ops.scratch(rows, R::kMost);
  select.rows = batch;
  ops.select_rows(cache, select);
  LatentAttentionArgs attend;
  attend.q = gather(&R::q, kMixed);
  attend.out = ops.scratch(rows, kMixed);
  attend.heads = R::kHeads;
  attend.scale = 0.3f;
  attend.tokens = R::kTokens;
  attend.selected = select.out;
  attend.rows = batch;
  ops.latent_attention(cache, attend);
  LatentAttentionArgs window = attend;
  window.out = ops.scratch(rows, kMixed);
  window.window = R::kWindow;
  window.pooled = 4;
  window.sinks = sinks.get();
  ops.latent_attention(cache, window);
  LatentAttentionArgs all = window;
  all.out = ops.scratch(rows, kMixed);
  all.selected = {};
  ops.latent_attention(cache, all);
  std::vector<std::vector<float>> out(static_cast<size_t>(rows));
  for (const Tensor& t : {select.out, attend.out, window.out, all.out}) {
    const std::vector<float> values = download(ops, t);
    for (int64_t r = 0; r < rows; ++r) {
      out[static_cast<size_t>(r)].insert(out[static_cast<size_t>(r)].end(), values.begin() + r * t.cols,
                                         values.begin() + (r + 1) * t.cols);
    }
  }
  return out;
}

std::vector<int32_t> pages_of(int32_t first, int32_t step) {
  std::vector<int32_t> pages;
  for (int32_t i = 0; i <= RowsCase::kLength / kPageTokens; ++i) pages.push_back(first + step * i);
  return pages;
}

// A row's expected results from the sequence's inputs alone.
void expect_row(Checker& c, const RowsCase& at, int64_t position, const std::vector<float>& got) {
  using R = RowsCase;
  const int64_t windows = (position + 1) / R::kTokens;
  const auto part = [&](const std::vector<float>& from, int64_t row, int64_t cols, int64_t first, int64_t count) {
    const auto begin = from.begin() + row * cols + first;
    return std::vector<double>(begin, begin + count);
  };
  const auto fill = [&](RefMatrix& m, int64_t row, const std::vector<double>& values) {
    std::copy(values.begin(), values.end(), m.v.begin() + row * m.cols);
  };
  std::vector<std::pair<double, int64_t>> scores;
  std::vector<std::vector<double>> pooled;
  for (int64_t w = 0; w < windows; ++w) {
    RefMatrix keys(R::kTokens, R::kIndex), gates = keys, bias = keys;
    for (int64_t j = 0; j < R::kTokens; ++j) {
      fill(keys, j, part(at.index, w * R::kTokens + j, 2 * R::kIndex, 0, R::kIndex));
      fill(gates, j, part(at.index, w * R::kTokens + j, 2 * R::kIndex, R::kIndex, R::kIndex));
      fill(bias, j, part(at.bias, j, R::kIndex, 0, R::kIndex));
    }
    scores.emplace_back(
        -ref_index_score(row_of(at.index_q, position, R::kIndexHeads * R::kIndex), ref_pool(keys, gates, bias),
                         row_of(at.index_weights, position, R::kIndexHeads), 0.25, 0.5),
        w);
    const int64_t before = w > 0 ? R::kTokens : 0;
    RefMatrix k(before + R::kTokens, R::kWidth), g = k, b = k;
    for (int64_t j = 0; j < before + R::kTokens; ++j) {
      const int64_t half = j < before ? 0 : R::kWidth, token = w * R::kTokens + j - before;
      fill(k, j, part(at.halves, token, 4 * R::kWidth, half, R::kWidth));
      fill(g, j, part(at.halves, token, 4 * R::kWidth, 2 * R::kWidth + half, R::kWidth));
      fill(b, j, part(at.halves_bias, j % R::kTokens, 2 * R::kWidth, half, R::kWidth));
    }
    RefMatrix entry(1, R::kWidth);
    entry.v = ref_pool(k, g, b);
    entry = ref_rms_norm(entry, 1, at.norm, 1e-6);
    std::vector<double> angles;
    for (const float f : at.inv_freq) angles.push_back(static_cast<double>(w * R::kTokens) * f);
    ref_rope_pairs(entry.v, angles);
    pooled.push_back(entry.v);
  }
  std::sort(scores.begin(), scores.end());
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < std::min(windows, R::kMost); ++i) chosen.push_back(scores[static_cast<size_t>(i)].second);
  std::sort(chosen.begin(), chosen.end());
  for (int64_t i = 0; i < R::kMost; ++i) {
    const double want =
        i < static_cast<int64_t>(chosen.size()) ? static_cast<double>(chosen[static_cast<size_t>(i)]) : -1;
    c.expect(got[static_cast<size_t>(i)] == static_cast<float>(want), "choice at " + std::to_string(position));
  }
  std::vector<std::vector<double>> tokens, near, near_chosen, near_all;
  for (const int64_t w : chosen) {
    for (int64_t j = 0; j < R::kTokens; ++j) tokens.push_back(row_of(at.latents, w * R::kTokens + j, R::kWidth));
    near_chosen.push_back(pooled[static_cast<size_t>(w)]);
  }
  near_all = pooled;
  for (int64_t p = windows * R::kTokens; p <= position; ++p) tokens.push_back(row_of(at.latents, p, R::kWidth));
  for (int64_t p = std::max<int64_t>(0, position + 1 - R::kWindow); p <= position; ++p) {
    near_chosen.push_back(row_of(at.latents, p, R::kWidth));
    near_all.push_back(near_chosen.back());
  }
  for (int64_t h = 0; h < R::kHeads; ++h) {
    const std::vector<double> q = part(at.q, position, kMixed, h * R::kWidth, R::kWidth);
    const double sink = at.sinks[static_cast<size_t>(h)];
    const float* row = got.data() + kSelected + h * R::kWidth;
    c.expect(worst(ref_latent_attention(q, tokens, 0.3f, nullptr), row) < 5e-6, "tokens " + std::to_string(position));
    c.expect(worst(ref_latent_attention(q, near_chosen, 0.3f, &sink), row + kMixed) < 5e-6, "window and chosen");
    c.expect(worst(ref_latent_attention(q, near_all, 0.3f, &sink), row + 2 * kMixed) < 5e-6, "window and all");
  }
}

// Protects the pooling, the choice and attention to it against double precision; and their bits against chunks, other
// sequences beside, pages, threads and instruction sets.
void latents(Checker& c) {
  const RowsCase one(91), other(92);
  const std::vector<int32_t> ascending = pages_of(0, 1), odd = pages_of(41, -2), even = pages_of(40, -2);
  std::vector<std::vector<float>> first;
  for (Variant& v : all_variants({1, 3})) {
    const auto cache = make_cache(*v.ops, 64);
    const auto whole = pass(*v.ops, *cache, {{&one, ascending, 0, RowsCase::kLength}});
    if (first.empty()) first = whole;
    for (size_t r = 0; r < first.size(); ++r) {
      c.expect(same_bits(first[r], whole[r]), v.name + ": whole, row " + std::to_string(r));
    }
    // Beside another sequence, on pages in disorder, in pieces of odd sizes; rows that are written again are as if they
    // had been written once.
    const auto shared = make_cache(*v.ops, 64);
    int64_t at = 0, beside = 0;
    for (int64_t step = 1; at < RowsCase::kLength; step = step % 97 * 5 + 3) {
      const int64_t count = std::min(step, RowsCase::kLength - at);
      if (at + count + 7 < RowsCase::kLength) pass(*v.ops, *shared, {{&other, odd, at, count + 7}});  // rejected rows
      const auto rows = pass(*v.ops, *shared, {{&other, even, beside, 1}, {&one, odd, at, count}});
      for (int64_t r = 0; r < count; ++r) {
        c.expect(same_bits(first[static_cast<size_t>(at + r)], rows[static_cast<size_t>(1 + r)]),
                 v.name + ": in pieces, row " + std::to_string(at + r));
      }
      at += count;
      ++beside;
    }
  }
  for (const int64_t position : {0, 2, 3, 4, 63, 64, 100, 538, 539, 600, 699}) {
    expect_row(c, one, position, first[static_cast<size_t>(position)]);
  }
}

// Protects the small ones: layer norm, limited silu, rotation of pairs forth and back, sqrt(softplus) scores, a choice
// that is given.
void latent_rowwise(Checker& c) {
  Random random(95);
  const int64_t rows = 3, cols = 84;
  const std::vector<float> x = random.vector(rows * cols), weight = random.vector(cols), bias = random.vector(cols);
  std::vector<float> first;
  for (Variant& v : all_variants({1, 2})) {
    Ops& ops = *v.ops;
    ops.begin_pass();
    std::vector<float> all;
    const auto append = [&](Tensor t) {
      const std::vector<float> more = download(ops, t);
      all.insert(all.end(), more.begin(), more.end());
    };
    const auto weights = ops.pack_vector(weight), biases = ops.pack_vector(bias);
    const Tensor in = upload(ops, rows, cols, x), normed = ops.scratch(rows, cols),
                 limited = ops.scratch(rows, cols / 2);
    ops.layer_norm(in, *weights, *biases, 1e-6f, normed);
    append(normed);
    ops.silu_mul_limited(in, 0.5f, limited);
    append(limited);
    const std::vector<int64_t> positions = {0, 5, 100000};
    const RopeTable table = ops.rope_table(batch_at(positions), *ops.pack_vector(std::vector<float>{1.0f, 0.1f}), 1.0);
    ops.rope_pairs(in, 4, cols / 4, table, false);
    append(in);
    ops.rope_pairs(in, 4, cols / 4, table, true);
    append(in);
    RouteArgs route;
    route.logits = upload(ops, rows, cols, x);
    route.score = RouterScore::kSqrtSoftplus;
    route.given = route.shared_always = route.renormalise = true;
    route.scale = 1.5f;
    route.ids = upload(ops, rows, 3, {7, 3, 0, 1, 80, 0, 2, 83, 0});
    route.weights = ops.scratch(rows, 3);
    ops.route(route);
    append(route.ids);
    append(route.weights);
    if (first.empty()) first = all;
    c.expect(same_bits(first, all), v.name);
  }
  const float* at = first.data();
  for (int64_t r = 0; r < rows; ++r) {
    const std::vector<double> row = row_of(x, r, cols);
    double mean = 0, variance = 0;
    for (const double e : row) mean += e / cols;
    for (const double e : row) variance += (e - mean) * (e - mean) / cols;
    std::vector<double> want;
    for (int64_t i = 0; i < cols; ++i) {
      want.push_back((row[static_cast<size_t>(i)] - mean) / std::sqrt(variance + 1e-6) *
                         weight[static_cast<size_t>(i)] +
                     bias[static_cast<size_t>(i)]);
    }
    c.expect(worst(want, at + r * cols) < 2e-6, "layer norm");
    std::vector<double> gated;
    for (int64_t i = 0; i < cols / 2; ++i) {
      const double gate = std::min(row[static_cast<size_t>(i)], 0.5);
      gated.push_back(gate / (1 + std::exp(-gate)) * std::clamp(row[static_cast<size_t>(cols / 2 + i)], -0.5, 0.5));
    }
    c.expect(worst(gated, at + rows * cols + r * cols / 2) < 1e-6, "limited silu");
    std::vector<double> turned = row;
    const double position = r == 0 ? 0 : (r == 1 ? 5 : 100000);
    for (int64_t h = 0; h < 4; ++h) {
      ref_rope_pairs(std::span(turned).subspan(static_cast<size_t>(h * cols / 4), static_cast<size_t>(cols / 4)),
                     std::vector<double>{position, position * static_cast<double>(0.1f)});
    }
    c.expect(worst(turned, at + rows * cols * 3 / 2 + r * cols) < 1e-6, "rotation");
    c.expect(worst(row, at + rows * cols * 5 / 2 + r * cols) < 1e-6, "rotation back");
    const float* ids = at + rows * cols * 7 / 2 + r * 3;
    const auto score = [&](float id) { return std::sqrt(std::log1p(std::exp(row[static_cast<size_t>(id)]))); };
    const double sum = score(ids[0]) + score(ids[1]);
    c.expect(ids[2] == static_cast<float>(cols), "the shared expert's number");
    c.expect(worst({score(ids[0]) / sum * 1.5, score(ids[1]) / sum * 1.5, 1.0}, ids + rows * 3) < 1e-6, "given choice");
  }
}

}  // namespace

uint64_t hyper_streams_hash(Ops& ops) { return hash_bits(StreamCase(83).run(ops, 0, StreamCase::kRows)); }

uint64_t latents_hash(Ops& ops) {
  const RowsCase at(93);
  const std::vector<int32_t> pages = pages_of(0, 1);
  const auto cache = make_cache(ops, 32);
  uint64_t hash = hash_bits({});
  for (const auto& row : pass(ops, *cache, {{&at, pages, 0, 700}})) hash = hash_bits(row, hash);
  return hash;
}

std::vector<NamedCheck> latent_checks() {
  return {{"hyper_streams", hyper_streams}, {"latents", latents}, {"latent_rowwise", latent_rowwise}};
}

}  // namespace tensorfold
