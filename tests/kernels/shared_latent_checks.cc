// Operations on latents that layers share: rounding to small formats, windows pooled inside a pass, choices among
// candidates, numbers before a row, streams summed by the weights of the block before.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/ops/fake_quantise.h"
#include "kernels/ops/latent_ops.h"
#include "kernels/reference/latents.h"
#include "tests/kernels/checks.h"

namespace tensorfold {
namespace {

// --- Rounding -------------------------------------------------------------------------------------------------------

// The formats' magnitudes by code, which ascend.
std::vector<double> magnitudes(bool e4m3) {
  std::vector<double> out;
  for (int code = 0; code < (e4m3 ? 127 : 8); ++code) {
    out.push_back(static_cast<double>(e4m3 ? float_of_e4m3(static_cast<uint8_t>(code))
                                           : float_of_e2m1(static_cast<uint8_t>(code))));
  }
  return out;
}

// The nearest magnitude by looking at all of them, ties to the even code.
double nearest(double x, const std::vector<double>& grid) {
  if (std::abs(x) >= grid.back()) return std::copysign(grid.back(), x);
  size_t best = 0;
  for (size_t code = 1; code < grid.size(); ++code) {
    const double now = std::abs(std::abs(x) - grid[code]), before = std::abs(std::abs(x) - grid[best]);
    if (now < before || (now == before && code % 2 == 0)) best = code;
  }
  return std::copysign(grid[best], x);
}

// The definition in double precision. Divisions by scales are by powers of two, or rounded to fp32 as the model's are.
std::vector<float> rounded(FakeFormat format, const std::vector<float>& group) {
  static const std::vector<double> wide = magnitudes(true), narrow = magnitudes(false);
  double most = 0;
  for (const float x : group) most = std::max(most, std::abs(static_cast<double>(x)));
  double scale = 1;
  if (format == FakeFormat::kE2m1By16) {
    scale = nearest(static_cast<double>(static_cast<float>(std::max(most, 6 * 0x1p-9)) / 6.0f), wide);
  } else {
    const bool e4m3 = format == FakeFormat::kE4m3By32;
    const double wanted = std::max(most, e4m3 ? static_cast<double>(1e-4f) : 6 * 0x1p-126) / (e4m3 ? 448 : 6);
    scale = 0x1p-126;
    while (scale < static_cast<double>(static_cast<float>(wanted))) scale *= 2;
  }
  std::vector<float> out;
  for (const float x : group) {
    const auto scaled = static_cast<double>(x / static_cast<float>(scale));
    out.push_back(static_cast<float>(nearest(scaled, format == FakeFormat::kE4m3By32 ? wide : narrow) * scale));
  }
  return out;
}

// Protects what each group of values becomes, ties and ends of the range included, wherever the row stands.
void rounding(Checker& c) {
  constexpr int64_t kRows = 40, kCols = 96;
  for (const FakeFormat format : {FakeFormat::kE4m3By32, FakeFormat::kE2m1By16, FakeFormat::kE2m1By32}) {
    Random random(401);
    std::vector<float> x = random.vector(kRows * kCols, true);
    // Small whole numbers of halves and quarters meet every tie; a row of zeros, of tiny and of large numbers.
    for (int64_t i = 0; i < 8 * kCols; ++i) x[static_cast<size_t>(i)] = static_cast<float>(i % 113 - 56) * 0.125f;
    for (int64_t i = 0; i < kCols; ++i) {
      x[static_cast<size_t>(8 * kCols + i)] = i % 2 == 0 ? 0.0f : -0.0f;
      x[static_cast<size_t>(9 * kCols + i)] = static_cast<float>(i - 40) * 0x1p-130f;
      x[static_cast<size_t>(10 * kCols + i)] = static_cast<float>(i - 40) * 0x1p115f;
      x[static_cast<size_t>(11 * kCols + i)] = static_cast<float>(i) * 0x1p-12f;
    }
    std::vector<float> want;
    const int64_t group = fake_group(format);
    for (int64_t i = 0; i < kRows * kCols; i += group) {
      // A scale that e4m3 cannot hold is out of the format's range, which models' values are not.
      const std::vector<float> part(x.begin() + i, x.begin() + i + group);
      const std::vector<float> one = rounded(format, part);
      want.insert(want.end(), one.begin(), one.end());
    }
    for (Variant& v : all_variants({1, 2})) {
      v.ops->begin_pass();
      const Tensor t = upload(*v.ops, kRows, kCols, x);
      v.ops->fake_quantise(t, format);
      c.expect(same_bits(download(*v.ops, t), want), v.name + ": format " + std::to_string(static_cast<int>(format)));
      std::vector<float> bad(static_cast<size_t>(kCols), 1.0f);
      bad[3] = std::numeric_limits<float>::quiet_NaN();
      bad[70] = std::numeric_limits<float>::infinity();
      const Tensor row = upload(*v.ops, 1, kCols, bad);
      v.ops->fake_quantise(row, format);
      const std::vector<float> got = download(*v.ops, row);
      for (int64_t i = 0; i < kCols; ++i) {
        const bool hit = i / group == 3 / group || i / group == 70 / group;
        c.expect(std::isnan(got[static_cast<size_t>(i)]) == hit, "what is no number stays none, in its group alone");
      }
    }
  }
}

// --- Shared rows ----------------------------------------------------------------------------------------------------

struct SharedCase {
  static constexpr int64_t kLength = 150, kWidth = 40, kTokens = 2, kHeads = 3, kMost = 9;
  static constexpr int64_t kBlock = 4, kBlocks = 5, kStreams = 3;
  std::vector<float> raw, q, weights, streams, mix, scale, base, inv_freq = {1.0f, 0.1f};
  std::vector<float> numbers;

  explicit SharedCase(uint64_t seed) {
    Random random(seed);
    raw = random.vector(kLength * 2 * kWidth);
    q = random.vector(kLength * kHeads * kWidth);
    weights = random.vector(kLength * kHeads);
    streams = random.vector(kLength * kStreams * kWidth);
    mix = random.vector(kLength * kStreams * (2 + kStreams));
    scale = random.vector(3);
    base = random.vector(kStreams * (2 + kStreams));
    for (int64_t i = 0; i < kLength; ++i) numbers.push_back(static_cast<float>(i * 7 % 100));
  }
};

// One pass over rows [first, first + count): what each row gets from every operation, one after another.
std::vector<std::vector<float>> pass(Ops& ops, RowCache& cache, const SharedCase& at, std::span<const int32_t> pages,
                                     int64_t first, int64_t count) {
  using S = SharedCase;
  ops.begin_pass();
  const RowGroup group{0, count, first, 0, count, pages};
  std::vector<int64_t> positions;
  std::vector<int32_t> tokens(static_cast<size_t>(count), 1);
  for (int64_t i = 0; i < count; ++i) positions.push_back(first + i);
  RowBatch batch = batch_of({&group, 1});
  batch.positions = positions;
  batch.tokens = tokens;
  const auto part = [&](const std::vector<float>& from, int64_t cols) {
    return upload(ops, count, cols, {from.begin() + first * cols, from.begin() + (first + count) * cols});
  };
  ops.row_write(cache, 0, part(at.raw, 2 * S::kWidth), batch);
  ops.row_write(cache, 2, part(at.numbers, 1), batch);
  PoolLatentsArgs pool;
  pool.from = 0;
  pool.tokens = S::kTokens;
  pool.out = ops.scratch(count, S::kWidth);
  pool.rows = batch;
  ops.pool_latents(cache, pool);
  const Tensor plain = ops.scratch(count, S::kWidth);
  ops.add(pool.out, pool.out, plain);
  const auto inv_freq = ops.pack_vector(at.inv_freq);
  ops.rope_pairs(pool.out, 1, S::kWidth, ops.window_rope_table(batch, *inv_freq, S::kTokens), false);
  ops.write_windows(cache, 1, pool.out, batch);
  SelectArgs select;
  select.layer = 1;
  select.tokens = S::kTokens;
  select.heads = S::kHeads;
  select.q = part(at.q, S::kHeads * S::kWidth);
  select.weights = part(at.weights, S::kHeads);
  select.out = ops.scratch(count, S::kMost);
  select.block = S::kBlock;
  select.blocks_out = ops.scratch(count, S::kBlocks);
  select.rows = batch;
  ops.select_rows(cache, select);
  SelectArgs within = select;
  within.candidates = select.blocks_out;
  within.blocks_out = {};
  within.out = ops.scratch(count, S::kMost);
  std::vector<float> other = at.weights;  // another layer's weights, the same keys
  std::reverse(other.begin(), other.end());
  within.weights = part(other, S::kHeads);
  ops.select_rows(cache, within);
  const auto scale = ops.pack_vector(at.scale), base = ops.pack_vector(at.base);
  HyperArgs hyper;
  hyper.streams = part(at.streams, S::kStreams * S::kWidth);
  hyper.count = S::kStreams;
  hyper.mix = part(at.mix, S::kStreams * (2 + S::kStreams));
  hyper.scale = scale.get();
  hyper.base = base.get();
  hyper.eps = 1e-6f;
  hyper.iterations = 3;
  hyper.weights = ops.scratch(count, S::kStreams * (1 + S::kStreams));
  hyper.out = ops.scratch(count, S::kWidth);
  hyper.carried = part(at.q, S::kStreams);
  ops.hyper_collapse(hyper);
  HyperArgs last = hyper;
  last.mix = {};
  last.out = ops.scratch(count, S::kWidth);
  ops.hyper_collapse(last);
  const std::vector<int32_t> before = ops.numbers_before(cache, 2, batch, 3);
  std::vector<std::vector<float>> out(static_cast<size_t>(count));
  for (const Tensor& t :
       {plain, pool.out, select.out, select.blocks_out, within.out, hyper.out, hyper.carried, last.out}) {
    const std::vector<float> values = download(ops, t);
    for (int64_t r = 0; r < count; ++r) {
      out[static_cast<size_t>(r)].insert(out[static_cast<size_t>(r)].end(), values.begin() + r * t.cols,
                                         values.begin() + (r + 1) * t.cols);
    }
  }
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t i = 0; i < 3; ++i) {
      out[static_cast<size_t>(r)].push_back(static_cast<float>(before[static_cast<size_t>(r * 3 + i)]));
    }
  }
  return out;
}

std::unique_ptr<RowCache> make_cache(Ops& ops) {
  using S = SharedCase;
  const RowCacheLayer layers[] = {{2 * S::kWidth, 1}, {S::kWidth, S::kTokens}, {1, 1}};
  return ops.make_row_cache(layers, 8);
}

// `most` best of `scores` (number, score), ascending, then -1.
std::vector<float> best(std::vector<std::pair<int64_t, double>> scores, int64_t most) {
  std::stable_sort(scores.begin(), scores.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  if (static_cast<int64_t>(scores.size()) > most) scores.resize(static_cast<size_t>(most));
  std::sort(scores.begin(), scores.end());
  std::vector<float> out;
  for (const auto& [number, score] : scores) out.push_back(static_cast<float>(number));
  out.resize(static_cast<size_t>(most), -1.0f);
  return out;
}

double worst(const std::vector<double>& want, const float* got) {
  double error = 0;
  for (size_t i = 0; i < want.size(); ++i) error = std::max(error, std::abs(want[i] - static_cast<double>(got[i])));
  return error;
}

// A row's expected results from the sequence's inputs alone.
void expect_row(Checker& c, const SharedCase& at, int64_t position, const std::vector<float>& got) {
  using S = SharedCase;
  const auto row = [&](const std::vector<float>& from, int64_t r, int64_t cols, int64_t first, int64_t count) {
    const auto begin = from.begin() + r * cols + first;
    return std::vector<double>(begin, begin + count);
  };
  const auto pooled = [&](int64_t w) {
    RefMatrix keys(S::kTokens, S::kWidth), gates = keys, none = keys;
    for (int64_t j = 0; j < S::kTokens; ++j) {
      const int64_t r = w * S::kTokens + j;
      std::ranges::copy(row(at.raw, r, 2 * S::kWidth, 0, S::kWidth), keys.v.begin() + j * S::kWidth);
      std::ranges::copy(row(at.raw, r, 2 * S::kWidth, S::kWidth, S::kWidth), gates.v.begin() + j * S::kWidth);
    }
    return ref_pool(keys, gates, none);
  };
  const auto turned = [&](int64_t w) {
    std::vector<double> key = pooled(w), angles;
    for (const float f : at.inv_freq) angles.push_back(static_cast<double>(w * S::kTokens) * static_cast<double>(f));
    ref_rope_pairs(key, angles);
    return key;
  };
  const std::string where = " at " + std::to_string(position);
  const float* next = got.data();
  const int64_t windows = (position + 1) / S::kTokens;
  std::vector<double> entry(static_cast<size_t>(S::kWidth), 0.0), key = entry;
  if ((position + 1) % S::kTokens == 0) {
    entry = pooled(windows - 1);
    for (double& value : entry) value *= 2;
    key = turned(windows - 1);
  }
  c.expect(worst(entry, next) < 2e-6 && worst(key, next + S::kWidth) < 2e-6, "pooled row" + where);
  next += 2 * S::kWidth;
  const std::vector<double> q = row(at.q, position, S::kHeads * S::kWidth, 0, S::kHeads * S::kWidth);
  std::vector<float> reversed = at.weights;
  std::reverse(reversed.begin(), reversed.end());
  std::vector<std::pair<int64_t, double>> scores, blocks, inside;
  for (int64_t w = 0; w < windows; ++w) {
    scores.emplace_back(w, ref_index_score(q, turned(w), row(at.weights, position, S::kHeads, 0, S::kHeads), 1, 1));
    if (w % S::kBlock == 0) blocks.emplace_back(w / S::kBlock, scores.back().second);
    blocks.back().second = std::max(blocks.back().second, scores.back().second);
  }
  if (!blocks.empty()) blocks.back().second = INFINITY;  // the newest, whatever it scores
  const std::vector<float> listed = best(blocks, S::kBlocks);
  for (int64_t w = 0; w < windows; ++w) {
    if (std::ranges::find(listed, static_cast<float>(w / S::kBlock)) == listed.end()) continue;
    inside.emplace_back(w, ref_index_score(q, turned(w), row(reversed, position, S::kHeads, 0, S::kHeads), 1, 1));
  }
  for (const std::vector<float>& want : {best(scores, S::kMost), listed, best(inside, S::kMost)}) {
    c.expect(std::equal(want.begin(), want.end(), next), "choice" + where);
    next += want.size();
  }
  const std::vector<double> x = row(at.streams, position, S::kStreams * S::kWidth, 0, S::kStreams * S::kWidth);
  const std::vector<double> carried = row(at.q, position, S::kStreams, 0, S::kStreams);
  const std::vector<double> pre =
      ref_stream_weights(row(at.mix, position, S::kStreams * (2 + S::kStreams), 0, S::kStreams * (2 + S::kStreams)),
                         at.scale, at.base, S::kStreams, 1e-6, 3)
          .pre;
  const auto sum = [&](const std::vector<double>& weights) {
    std::vector<double> out(static_cast<size_t>(S::kWidth), 0.0);
    for (int64_t s = 0; s < S::kStreams; ++s) {
      for (int64_t d = 0; d < S::kWidth; ++d) {
        out[static_cast<size_t>(d)] += weights[static_cast<size_t>(s)] * x[static_cast<size_t>(s * S::kWidth + d)];
      }
    }
    return out;
  };
  c.expect(worst(sum(carried), next) < 2e-6, "streams by what was carried" + where);
  next += S::kWidth;
  c.expect(worst(pre, next) < 2e-6, "what is carried on" + where);
  next += S::kStreams;
  c.expect(worst(sum(pre), next) < 2e-6, "the end of the streams" + where);
  next += S::kWidth;
  for (int64_t back = 1; back <= 3; ++back) {
    const float want = position >= back ? at.numbers[static_cast<size_t>(position - back)] : -1.0f;
    c.expect(next[back - 1] == want, "numbers before" + where);
  }
}

// Protects these operations against double precision, and their bits against chunks, rejected rows, pages, threads and
// instruction sets.
void shared_latents(Checker& c) {
  const SharedCase one(411), other(412);
  const std::vector<int32_t> ascending = {0, 1, 2}, disorder = {6, 3, 5};
  std::vector<std::vector<float>> first;
  for (Variant& v : all_variants({1, 3})) {
    const auto cache = make_cache(*v.ops);
    const auto whole = pass(*v.ops, *cache, one, ascending, 0, SharedCase::kLength);
    if (first.empty()) first = whole;
    for (size_t r = 0; r < first.size(); ++r) {
      c.expect(same_bits(first[r], whole[r]), v.name + ": whole, row " + std::to_string(r));
    }
    const auto pieces = make_cache(*v.ops);
    int64_t at = 0;
    for (int64_t step = 1; at < SharedCase::kLength; step = step % 17 * 3 + 1) {
      const int64_t count = std::min(step, SharedCase::kLength - at);
      if (at + count + 5 < SharedCase::kLength) pass(*v.ops, *pieces, other, disorder, at, count + 5);  // rejected rows
      const auto rows = pass(*v.ops, *pieces, one, disorder, at, count);
      for (int64_t r = 0; r < count; ++r) {
        c.expect(same_bits(first[static_cast<size_t>(at + r)], rows[static_cast<size_t>(r)]),
                 v.name + ": in pieces, row " + std::to_string(at + r));
      }
      at += count;
    }
  }
  for (int64_t position = 0; position < SharedCase::kLength; position += position < 12 ? 1 : 23) {
    expect_row(c, one, position, first[static_cast<size_t>(position)]);
  }
}

}  // namespace

uint64_t shared_latents_hash(Ops& ops) {
  const SharedCase at(421);
  const std::vector<int32_t> pages = {0, 1, 2};
  const auto cache = make_cache(ops);
  uint64_t hash = hash_bits({});
  for (const auto& row : pass(ops, *cache, at, pages, 0, SharedCase::kLength)) hash = hash_bits(row, hash);
  for (const FakeFormat format : {FakeFormat::kE4m3By32, FakeFormat::kE2m1By16, FakeFormat::kE2m1By32}) {
    Random random(431);
    ops.begin_pass();
    const Tensor x = upload(ops, 50, 96, random.vector(50 * 96, true));
    ops.fake_quantise(x, format);
    hash = hash_bits(download(ops, x), hash);
  }
  return hash;
}

std::vector<NamedCheck> shared_latent_checks() { return {{"rounding", rounding}, {"shared_latents", shared_latents}}; }

}  // namespace tensorfold
