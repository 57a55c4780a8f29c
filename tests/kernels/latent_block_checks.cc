// Attention over latents for blocks of drafted rows: each row over what is cached before its block, or a window of it,
// and over the whole block.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/ops/latent_ops.h"
#include "kernels/reference/latents.h"
#include "tests/kernels/checks.h"

namespace tensorfold {
namespace {

constexpr int64_t kWidth = 40, kHeads = 5, kMixed = kHeads * kWidth;
constexpr float kScale = 0.3f, kNan = std::numeric_limits<float>::quiet_NaN();

// A block and what is cached before it, on pages that end where that ends, in descending order.
struct Block {
  int64_t cached, rows;
  std::vector<float> latents, q, own;  // [cached, kWidth], [rows, kMixed], [rows, kWidth]
  std::vector<int32_t> pages;

  Block(int64_t before, int64_t count, uint64_t seed, int32_t first_page) : cached(before), rows(count) {
    Random random(seed);
    latents = random.vector(cached * kWidth);
    q = random.vector(rows * kMixed);
    for (float& x : q) x *= 4;
    own = random.vector(rows * kWidth);
    for (int64_t page = 0; page * kPageTokens < cached; ++page) {
      pages.insert(pages.begin(), first_page + static_cast<int32_t>(page));
    }
  }
};

std::vector<float> sinks() { return Random(800).vector(kHeads); }

struct Setting {
  int64_t window = 0;
  bool sinks = false;
  bool behind = false;  // NaN in the cache where blocks stand, as far as the pages reach
};

// Rows as the only ones of their sequence from `position` on.
void write(Ops& ops, RowCache& cache, const std::vector<int32_t>& pages, int64_t position,
           const std::vector<float>& rows) {
  const int64_t count = static_cast<int64_t>(rows.size()) / kWidth;
  if (count == 0) return;
  const RowGroup group{0, count, position, 0, count, pages};
  ops.row_write(cache, 1, upload(ops, count, kWidth, rows), batch_of({&group, 1}));
}

std::unique_ptr<RowCache> make_cache(Ops& ops) {
  const RowCacheLayer layers[] = {{8, 1}, {kWidth, 1}};
  return ops.make_row_cache(layers, 64);
}

LatentAttentionArgs attention_args(const Setting& setting, const Vector* sinks) {
  LatentAttentionArgs args;
  args.heads = kHeads;
  args.scale = kScale;
  args.sinks = setting.sinks ? sinks : nullptr;
  args.layer = 1;
  args.window = setting.window;
  return args;
}

// Results of several blocks, computed together; their own rows are a part of something wider.
std::vector<std::vector<float>> run_blocks(Ops& ops, const std::vector<const Block*>& blocks, const Setting& setting) {
  ops.begin_pass();
  const auto cache = make_cache(ops);
  std::vector<RowGroup> groups;
  std::vector<float> q, own;
  int64_t total = 0;
  for (const Block* block : blocks) {
    write(ops, *cache, block->pages, 0, block->latents);
    const int64_t room = static_cast<int64_t>(block->pages.size()) * kPageTokens - block->cached;
    if (setting.behind)
      write(ops, *cache, block->pages, block->cached, std::vector<float>(static_cast<size_t>(room * kWidth), kNan));
    groups.push_back({total, block->rows, block->cached, 0, block->rows, block->pages});
    total += block->rows;
    q.insert(q.end(), block->q.begin(), block->q.end());
    own.insert(own.end(), block->own.begin(), block->own.end());
  }
  const auto vector = ops.pack_vector(sinks());
  LatentAttentionArgs args = attention_args(setting, vector.get());
  args.q = upload(ops, total, kMixed, q);
  args.out = ops.scratch(total, kMixed);
  args.block = ops.scratch(total, 3 * kWidth).columns(kWidth, kWidth);
  ops.upload(own, args.block);
  args.rows = batch_of(groups);
  ops.latent_attention(*cache, args);
  const std::vector<float> all = download(ops, args.out);
  std::vector<std::vector<float>> out;
  for (const RowGroup& g : groups) {
    const auto at = all.begin() + g.first_row * kMixed;
    out.emplace_back(at, at + g.rows * kMixed);
  }
  return out;
}

// The same sequence's last row where the block's rows are in the cache: its list is the same one.
std::vector<float> run_cached(Ops& ops, const Block& block, const Setting& setting) {
  ops.begin_pass();
  const auto cache = make_cache(ops);
  std::vector<int32_t> pages = block.pages;
  pages.push_back(62);
  write(ops, *cache, pages, 0, block.latents);
  write(ops, *cache, pages, block.cached, block.own);
  const RowGroup last{0, 1, block.cached + block.rows - 1, 0, 1, pages};
  const auto vector = ops.pack_vector(sinks());
  LatentAttentionArgs args = attention_args(setting, vector.get());
  if (setting.window > 0) args.window += block.rows;
  args.q = upload(ops, 1, kMixed, {block.q.end() - kMixed, block.q.end()});
  args.out = ops.scratch(1, kMixed);
  args.rows = batch_of({&last, 1});
  ops.latent_attention(*cache, args);
  return download(ops, args.out);
}

// Largest error of a block's result.
double worst_error(const Block& block, const std::vector<float>& got, const Setting& setting) {
  const auto part = [](const std::vector<float>& from, int64_t first, int64_t count) {
    return std::vector<double>(from.begin() + first, from.begin() + first + count);
  };
  std::vector<std::vector<double>> list;
  const int64_t first = setting.window > 0 ? std::max<int64_t>(0, block.cached - setting.window) : 0;
  for (int64_t p = first; p < block.cached; ++p) list.push_back(part(block.latents, p * kWidth, kWidth));
  for (int64_t i = 0; i < block.rows; ++i) list.push_back(part(block.own, i * kWidth, kWidth));
  const std::vector<float> all_sinks = sinks();
  double worst = 0;
  for (int64_t at = 0; at < block.rows * kHeads; ++at) {
    const double sink = all_sinks[static_cast<size_t>(at % kHeads)];
    const std::vector<double> want =
        ref_latent_attention(part(block.q, at * kWidth, kWidth), list, double{kScale}, setting.sinks ? &sink : nullptr);
    for (int64_t d = 0; d < kWidth; ++d) {
      const double error = std::abs(want[static_cast<size_t>(d)] - got[static_cast<size_t>(at * kWidth + d)]);
      worst = error <= worst ? worst : error;  // a NaN is the worst
    }
  }
  return worst;
}

// Nothing cached; part of a page; page boundaries (64, 640), one less and one more; longer than two splits of the list.
// A table's last page ends at 64 and 640 where the block begins, at 0 there is none.
const std::vector<int64_t> kCached = {0, 1, 15, 63, 64, 65, 640, 1100};

std::vector<Block> blocks_of(int64_t rows) {
  std::vector<Block> blocks;
  int32_t page = 0;
  for (const int64_t cached : kCached) {
    blocks.emplace_back(cached, rows, 810 + static_cast<uint64_t>(cached), page);
    page += static_cast<int32_t>(blocks.back().pages.size());
  }
  return blocks;
}

std::vector<const Block*> all_of(const std::vector<Block>& blocks) {
  std::vector<const Block*> all;
  for (const Block& block : blocks) all.push_back(&block);
  return all;
}

// Protects the attention of blocks over latents against double precision, with and without a window and sinks, and that
// a block's rows count as they would in the cache; the same bits on every variant, whatever the cache holds where
// blocks stand.
void latent_blocks(Checker& c) {
  for (const int64_t window : {int64_t{0}, int64_t{1}, int64_t{50}, int64_t{64}, int64_t{600}, int64_t{5000}}) {
    for (const int64_t rows : {int64_t{16}, int64_t{6}, int64_t{1}}) {
      const std::vector<Block> blocks = blocks_of(rows);
      Setting setting{window, rows == 6, false};
      std::vector<std::vector<float>> first;
      for (Variant& v : all_variants({1, 2, 3})) {
        const std::string what = v.name + ", " + std::to_string(rows) + " rows, window " + std::to_string(window);
        setting.behind = !first.empty();
        const std::vector<std::vector<float>> got = run_blocks(*v.ops, all_of(blocks), setting);
        if (first.empty()) first = got;
        for (size_t i = 0; i < blocks.size(); ++i) {
          c.expect(same_bits(got[i], first[i]), "blocks over latents differ: " + what);
          const std::vector<float> last(got[i].end() - kMixed, got[i].end());
          c.expect(same_bits(last, run_cached(*v.ops, blocks[i], setting)), "last row and cached row differ: " + what);
        }
      }
      for (size_t i = 0; i < blocks.size(); ++i) {
        c.expect(worst_error(blocks[i], first[i], setting) < 5e-6,
                 "blocks over latents against the reference: " + std::to_string(rows) + " rows behind " +
                     std::to_string(blocks[i].cached) + ", window " + std::to_string(window));
      }
    }
  }
}

// Protects a block's bits from others in its pass: alone, in another place, beside blocks of other sizes, of NaN.
void latent_block_company(Checker& c) {
  const std::vector<Block> blocks = blocks_of(8);
  Block nan(100, 16, 830, 50), small(70, 3, 831, 54);
  for (std::vector<float>* values : {&nan.latents, &nan.q, &nan.own}) std::fill(values->begin(), values->end(), kNan);
  for (const int64_t window : {int64_t{0}, int64_t{50}}) {
    const Setting setting{window, true, false};
    for (Variant& v : all_variants({1, 3})) {
      const std::vector<std::vector<float>> together = run_blocks(*v.ops, all_of(blocks), setting);
      std::vector<const Block*> mixed = {&nan, &small};
      for (size_t i = blocks.size(); i-- > 0;) mixed.push_back(&blocks[i]);
      const std::vector<std::vector<float>> turned = run_blocks(*v.ops, mixed, setting);
      for (size_t i = 0; i < blocks.size(); ++i) {
        const std::string what = v.name + ", behind " + std::to_string(blocks[i].cached);
        c.expect(same_bits(run_blocks(*v.ops, {&blocks[i]}, setting)[0], together[i]), "alone differs: " + what);
        c.expect(same_bits(turned[1 + blocks.size() - i], together[i]), "beside others differs: " + what);
      }
    }
  }
}

}  // namespace

uint64_t latent_blocks_hash(Ops& ops, int64_t window) {
  const std::vector<Block> blocks = blocks_of(8);
  uint64_t hash = hash_bits({});
  for (const auto& part : run_blocks(ops, all_of(blocks), {window, window > 0, false})) hash = hash_bits(part, hash);
  return hash;
}

std::vector<NamedCheck> latent_block_checks() {
  return {{"latent_blocks", latent_blocks}, {"latent_block_company", latent_block_company}};
}

}  // namespace tensorfold
