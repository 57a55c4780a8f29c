// Blocks of drafted rows: their attention and convolution, and rows taken from residuals of several streams.
#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/ops/block_ops.h"
#include "kernels/reference/reference_block.h"
#include "tests/kernels/checks.h"

namespace tensorfold {
namespace {

constexpr int64_t kDim = 24, kHeads = 5, kKvHeads = 2;
const std::vector<int32_t> kKvHeadOf = {0, 0, 0, 1, 1};

// A sequence's cached rows behind which a block stands. Longer than two splits of keys.
struct Context {
  int64_t length;
  std::vector<float> k, v;
  std::vector<int32_t> pages;

  Context(int64_t n, uint64_t seed, int32_t first_page) : length(n) {
    Random random(seed);
    k = random.vector(n * kKvHeads * kDim);
    v = random.vector(n * kKvHeads * kDim);
    for (int64_t page = 0; page * kPageTokens < n; ++page) {
      pages.insert(pages.begin(), first_page + static_cast<int32_t>(page));
    }
  }
};

struct Block {
  int64_t rows;
  std::vector<float> q, k, v;

  Block(int64_t n, uint64_t seed) : rows(n) {
    Random random(seed);
    q = random.vector(n * kHeads * kDim);
    for (float& x : q) x *= 4;
    k = random.vector(n * kKvHeads * kDim);
    v = random.vector(n * kKvHeads * kDim);
  }
};

// Results of several blocks, each behind its own context, computed together. `behind`: rows of noise in the cache at
// the block's own positions, as far as the pages reach.
std::vector<std::vector<float>> run_blocks(Ops& ops, const std::vector<Context>& contexts,
                                           const std::vector<Block>& blocks, int64_t window, bool behind = false) {
  ops.begin_pass();
  const auto cache = ops.make_kv_cache(2, 64, kKvHeads, kDim);
  for (const Context& context : contexts) {
    if (context.length == 0) continue;
    const RowGroup group{0, context.length, 0, 0, context.length, context.pages};
    ops.kv_write(*cache, 1, upload(ops, context.length, kKvHeads * kDim, context.k),
                 upload(ops, context.length, kKvHeads * kDim, context.v), batch_of({&group, 1}));
    const int64_t room = static_cast<int64_t>(context.pages.size()) * kPageTokens - context.length;
    if (!behind || room == 0) continue;
    const std::vector<float> noise = Random(99).vector(room * kKvHeads * kDim, true);
    const RowGroup rest{0, room, context.length, 0, room, context.pages};
    const Tensor rows = upload(ops, room, kKvHeads * kDim, noise);
    ops.kv_write(*cache, 1, rows, rows, batch_of({&rest, 1}));
  }
  std::vector<float> q, k, v;
  std::vector<RowGroup> groups;
  int64_t total = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    groups.push_back({total, blocks[i].rows, contexts[i].length, 0, blocks[i].rows, contexts[i].pages});
    total += blocks[i].rows;
    q.insert(q.end(), blocks[i].q.begin(), blocks[i].q.end());
    k.insert(k.end(), blocks[i].k.begin(), blocks[i].k.end());
    v.insert(v.end(), blocks[i].v.begin(), blocks[i].v.end());
  }
  BlockAttentionArgs args;
  args.q = upload(ops, total, kHeads * kDim, q);
  args.k = upload(ops, total, kKvHeads * kDim, k);
  args.v = upload(ops, total, kKvHeads * kDim, v);
  args.out = ops.scratch(total, kHeads * kDim);
  args.heads = kHeads;
  args.kv_heads = kKvHeads;
  args.head_dim = kDim;
  args.kv_head_of = kKvHeadOf;
  args.scale = 0.2f;
  args.window = window;
  args.rows = batch_of(groups);
  ops.block_attention(*cache, 1, args);
  const std::vector<float> all = download(ops, args.out);
  std::vector<std::vector<float>> out;
  for (const RowGroup& g : groups) {
    const auto at = all.begin() + g.first_row * kHeads * kDim;
    out.emplace_back(at, at + g.rows * kHeads * kDim);
  }
  return out;
}

const std::vector<int64_t> kLengths = {0, 1, 15, 40, 64, 700, 1200};

std::vector<Context> contexts() {
  std::vector<Context> out;
  int32_t page = 0;
  for (const int64_t length : kLengths) {
    out.emplace_back(length, 300 + static_cast<uint64_t>(length), page);
    page += static_cast<int32_t>(out.back().pages.size());
  }
  return out;
}

// Protects the attention of blocks against double precision, with and without a window; the same bits on every variant,
// alone or beside other blocks, whatever the cache holds behind the context.
void block_attention(Checker& c) {
  const std::vector<Context> all = contexts();
  for (const int64_t window : {int64_t{0}, int64_t{16}, int64_t{50}, int64_t{600}}) {
    for (const int64_t rows : {int64_t{8}, int64_t{16}, int64_t{1}}) {
      std::vector<Block> blocks;
      for (size_t i = 0; i < all.size(); ++i) blocks.emplace_back(rows, 400 + i);
      std::vector<std::vector<float>> first;
      for (Variant& v : all_variants({1, 2, 3})) {
        const std::string what = v.name + ", " + std::to_string(rows) + " rows, window " + std::to_string(window);
        const std::vector<std::vector<float>> got = run_blocks(*v.ops, all, blocks, window, !first.empty());
        if (first.empty()) {
          first = got;
          for (size_t i = 0; i < all.size(); ++i) {
            const auto matrix = [](int64_t n, const std::vector<float>& values) {
              return to_ref(n, kKvHeads * kDim, values);
            };
            const RefMatrix want = ref_block_attention(to_ref(rows, kHeads * kDim, blocks[i].q),
                                                       matrix(rows, blocks[i].k), matrix(rows, blocks[i].v),
                                                       matrix(all[i].length, all[i].k), matrix(all[i].length, all[i].v),
                                                       kKvHeadOf, kDim, static_cast<double>(0.2f), window);
            c.expect(relative_error(got[i], want, 0.1) < 2e-5,
                     "block attention against the reference: " + what + ", context " + std::to_string(all[i].length));
          }
        }
        for (size_t i = 0; i < all.size(); ++i) {
          c.expect(same_bits(got[i], first[i]), "block attention differs: " + what);
        }
        const std::vector<std::vector<float>> alone = run_blocks(*v.ops, {all[5]}, {blocks[5]}, window, true);
        c.expect(same_bits(alone[0], first[5]), "block attention alone differs: " + what);
      }
    }
  }
}

// Protects the convolution along a block against double precision, and that no block sees another's rows.
void block_conv(Checker& c) {
  for (const auto& [taps, width, group] : {std::array<int64_t, 3>{2, 64, 16}, {4, 60, 5}, {1, 7, 1}}) {
    constexpr int64_t kRows = 8, kBlocks = 3;
    Random random(500 + static_cast<uint64_t>(taps));
    const std::vector<float> base = random.vector(taps * width);
    const int64_t dynamic_cols = taps * (width / group);
    const std::vector<float> x = random.vector(kBlocks * kRows * width);
    const std::vector<float> dynamic = random.vector(kBlocks * kRows * dynamic_cols);
    std::vector<float> first;
    for (Variant& v : all_variants({1, 3})) {
      v.ops->begin_pass();
      const auto packed = v.ops->pack_vector(base);
      std::vector<RowGroup> groups;
      for (int64_t i = 0; i < kBlocks; ++i) groups.push_back({i * kRows, kRows, 100, 0, kRows, {}});
      BlockConvArgs args;
      args.x = upload(*v.ops, kBlocks * kRows, width, x);
      args.dynamic = upload(*v.ops, kBlocks * kRows, dynamic_cols, dynamic);
      args.base = packed.get();
      args.taps = taps;
      args.group = group;
      args.rows = batch_of(groups);
      args.out = v.ops->scratch(kBlocks * kRows, width);
      v.ops->block_conv(args);
      const std::vector<float> got = download(*v.ops, args.out);
      if (first.empty()) first = got;
      c.expect(same_bits(got, first), "block conv differs: " + v.name);
    }
    for (int64_t i = 0; i < kBlocks; ++i) {
      const auto part = [&](const std::vector<float>& all, int64_t cols) {
        const auto at = all.begin() + i * kRows * cols;
        return std::vector<float>(at, at + kRows * cols);
      };
      const RefMatrix want =
          ref_block_conv(to_ref(kRows, width, part(x, width)), to_ref(kRows, dynamic_cols, part(dynamic, dynamic_cols)),
                         base, taps, group);
      c.expect(relative_error(part(first, width), want, 0.1) < 1e-5, "block conv against the reference");
    }
  }
}

// Protects what is taken from a residual: a copy of one stream bit for bit, the mean of several.
void mean_streams(Checker& c) {
  constexpr int64_t kRows = 5, kWidth = 70;
  for (const int64_t streams : {int64_t{1}, int64_t{2}, int64_t{4}}) {
    const std::vector<float> x = Random(600).vector(kRows * streams * kWidth, true);
    std::vector<float> first;
    for (Variant& v : all_variants({1, 2})) {
      v.ops->begin_pass();
      const Tensor wide = v.ops->scratch(kRows, 3 * kWidth);  // the result is a part of something wider
      const Tensor out = wide.columns(kWidth, kWidth);
      v.ops->mean_streams(upload(*v.ops, kRows, streams * kWidth, x), streams, out);
      const Tensor copy = v.ops->scratch(kRows, kWidth);
      const std::vector<int32_t> rows = {0, 1, 2, 3, 4};
      v.ops->gather_rows(out, rows, copy);
      const std::vector<float> got = download(*v.ops, copy);
      if (first.empty()) first = got;
      c.expect(same_bits(got, first), "mean of streams differs: " + v.name);
    }
    RefMatrix want(kRows, kWidth);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t i = 0; i < kWidth; ++i) {
        for (int64_t s = 0; s < streams; ++s) {
          want.at(r, i) += static_cast<double>(x[static_cast<size_t>((r * streams + s) * kWidth + i)]) /
                           static_cast<double>(streams);
        }
      }
    }
    c.expect(relative_error(first, want, 1.0) < 1e-5, "mean of streams against the reference");
    if (streams == 1) c.expect(same_bits(first, x), "one stream is copied");
  }
}

}  // namespace

uint64_t block_hash(Ops& ops) {
  std::vector<Context> all = contexts();
  std::vector<Block> blocks;
  for (size_t i = 0; i < all.size(); ++i) blocks.emplace_back(8, 700 + i);
  uint64_t hash = 0xcbf29ce484222325u;
  for (const int64_t window : {int64_t{0}, int64_t{50}}) {
    for (const std::vector<float>& part : run_blocks(ops, all, blocks, window)) hash = hash_bits(part, hash);
  }
  return hash;
}

std::vector<NamedCheck> block_checks() {
  return {{"block_attention", block_attention}, {"block_conv", block_conv}, {"mean_streams", mean_streams}};
}

}  // namespace tensorfold
