// Attention over latents for blocks of drafted rows: values against double precision; the same bits alone and among
// others, in eager and kept launches, for any bound on the context, and as where the block's rows are in the cache.
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tests/cuda/latent_cases.h"

namespace tensorfold {
namespace {

constexpr float kScale = 0.11f, kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kPages = 128;

// A block and what is cached before it, on pages that end where that ends.
struct Block {
  int64_t cached = 0;
  int64_t rows = 0;
  std::vector<int32_t> pages;
  Floats latents, q, own;  // [cached, width], [rows, heads * width], [rows, width]
};

struct Shape {
  int64_t width, heads;
};

struct Setting {
  int64_t window = 0;
  bool sinks = false;
  int64_t least_keys = 0;  // launches are made for at least so many
  bool keep = false;       // as a kept launch
};

// Blocks of layers that are `width` wide. What is behind a block's context in the cache is NaN.
class World {
 public:
  World(Ops& ops, const Shape& shape) : width(shape.width), heads(shape.heads), ops_(ops) {
    cache_ = ops.make_row_cache(std::vector<RowCacheLayer>{{8, 1}, {width, 1}}, kPages);
    sink_values_ = random_floats(static_cast<size_t>(heads), 7, 2.0f);
    sinks_ = ops.pack_vector(sink_values_);
    free_.resize(kPages);
    std::iota(free_.begin(), free_.end(), 0);
    std::shuffle(free_.begin(), free_.end(), std::mt19937(3));
  }

  Block make(int64_t cached, int64_t rows, uint32_t seed) {
    Block block;
    block.cached = cached;
    block.rows = rows;
    block.latents = bf16_floats(static_cast<size_t>(cached * width), seed);
    block.q = bf16_floats(static_cast<size_t>(rows * heads * width), seed + 1);
    block.own = bf16_floats(static_cast<size_t>(rows * width), seed + 2);
    for (int64_t page = 0; page * kPageTokens < cached; ++page) {
      block.pages.push_back(free_.back());
      free_.pop_back();
    }
    fill_pages(block);
    return block;
  }
  // What is cached before the block, to its pages.
  void fill_pages(const Block& block) {
    for (size_t i = 0; i < block.pages.size(); ++i) {
      Floats page(static_cast<size_t>(kPageTokens * (8 + width)), kNan);
      const auto first = static_cast<int64_t>(i) * kPageTokens, count = std::min(kPageTokens, block.cached - first);
      std::copy_n(block.latents.begin() + first * width, count * width, page.begin() + kPageTokens * 8);
      cache_->load_page(block.pages[i], std::as_bytes(std::span<const float>(page)));
    }
  }

  // Results of blocks that are computed together.
  std::vector<Floats> run(const std::vector<const Block*>& blocks, const Setting& setting) {
    ops_.begin_pass();
    std::vector<Span> spans;
    Floats values;  // rows of the block | queries
    for (const Block* block : blocks) {
      spans.push_back({block->pages, block->cached, block->rows});
      for (int64_t i = 0; i < block->rows; ++i) {
        const auto own = block->own.begin() + i * width, q = block->q.begin() + i * heads * width;
        values.insert(values.end(), own, own + width);
        values.insert(values.end(), q, q + heads * width);
      }
    }
    const Pass pass(std::move(spans));
    const auto rows = static_cast<int64_t>(pass.positions.size());
    const Floats all = launch(RunKind::kBlock, pass, uploaded(ops_, rows, (1 + heads) * width, values), setting);
    std::vector<Floats> out;
    int64_t row = 0;
    for (const Block* block : blocks) {
      const auto at = all.begin() + row * heads * width;
      out.emplace_back(at, at + block->rows * heads * width);
      row += block->rows;
    }
    return out;
  }

  // The last row alone, all of the block in the cache: its list is the same one.
  Floats run_cached(const Block& block, Setting setting) {
    Block whole = block;
    whole.cached += block.rows;
    whole.latents.insert(whole.latents.end(), block.own.begin(), block.own.end());
    if (static_cast<int64_t>(whole.pages.size()) * kPageTokens < whole.cached) whole.pages.push_back(free_.back());
    fill_pages(whole);
    if (setting.window > 0) setting.window += block.rows;
    ops_.begin_pass();
    const Pass pass({{whole.pages, whole.cached - 1, 1}});
    const Floats q(block.q.end() - heads * width, block.q.end());
    const Floats out = launch(RunKind::kForward, pass, uploaded(ops_, 1, heads * width, q), setting);
    fill_pages(block);
    return out;
  }

  // Of row `row` and head `head` of a block.
  std::vector<double> expected(const Block& block, int64_t row, int64_t head, const Setting& setting) const {
    std::vector<std::vector<double>> list;
    const int64_t first = setting.window > 0 ? std::max<int64_t>(0, block.cached - setting.window) : 0;
    for (int64_t p = first; p < block.cached; ++p) list.push_back(part(block.latents, p * width, width));
    for (int64_t i = 0; i < block.rows; ++i) list.push_back(part(block.own, i * width, width));
    const double sink = sink_values_[static_cast<size_t>(head)];
    return ref_latent_attention(part(block.q, (row * heads + head) * width, width), list, double{kScale},
                                setting.sinks ? &sink : nullptr);
  }

  const int64_t width, heads;

 private:
  // The input's columns are [rows of blocks | queries] or only queries.
  Floats launch(RunKind kind, const Pass& pass, Tensor input, const Setting& setting) {
    RowBatch rows;
    rows.tokens = pass.tokens;
    rows.positions = pass.positions;
    rows.groups = pass.groups;
    rows.least_keys = setting.least_keys;
    const Tensor out = ops_.run(kind, rows, input, setting.keep, [&](const RowBatch& batch, Tensor in) {
      LatentAttentionArgs args;
      args.q = in.columns(in.cols - heads * width, heads * width);
      if (kind == RunKind::kBlock) args.block = in.columns(0, width);
      args.out = ops_.scratch(in.rows, heads * width);
      args.heads = heads;
      args.scale = kScale;
      args.sinks = setting.sinks ? sinks_.get() : nullptr;
      args.layer = 1;
      args.window = setting.window;
      args.rows = batch;
      ops_.latent_attention(*cache_, args);
      return args.out;
    });
    Floats values(static_cast<size_t>(out.rows * out.cols));
    ops_.download(out, values);
    EXPECT_EQ(ops_.finish_pass(), "");
    return values;
  }

  Ops& ops_;
  std::unique_ptr<RowCache> cache_;
  Floats sink_values_;
  std::unique_ptr<Vector> sinks_;
  std::vector<int32_t> free_;
};

std::vector<const Block*> all_of(const std::vector<Block>& blocks) {
  std::vector<const Block*> all;
  for (const Block& block : blocks) all.push_back(&block);
  return all;
}

std::vector<Block> blocks_of(World& world, const std::vector<int64_t>& cached, int64_t rows) {
  std::vector<Block> blocks;
  for (size_t i = 0; i < cached.size(); ++i) {
    blocks.push_back(world.make(cached[i], rows, 100 + 10 * static_cast<uint32_t>(i)));
  }
  return blocks;
}

// Widths of a padded tile and of full ones; heads for tiles of 16 and of 32, in part and whole.
const std::vector<Shape> kShapes = {{32, 1}, {32, 64}, {104, 5}, {512, 1}, {512, 5}, {512, 16}, {512, 64}};
// Nothing cached, part of a page, page boundaries and beside them, several splits of the list.
const std::vector<int64_t> kCached = {0, 1, 63, 64, 65, 640, 1100};
const std::vector<int64_t> kWindows = {0, 1, 50, 64, 600, 5000};

std::string name_of(const World& world, const Block& block, const Setting& setting) {
  return "width " + std::to_string(world.width) + ", " + std::to_string(world.heads) + " heads, " +
         std::to_string(block.rows) + " rows behind " + std::to_string(block.cached) + ", window " +
         std::to_string(setting.window) + (setting.sinks ? ", sinks" : "");
}

// Protects: a row sees the cached rows of its window, whatever the cache holds behind them, and its whole block, in
// both directions; page tables may end before the block; a block's rows count bit for bit as they would in the cache.
TEST(CudaLatentBlocks, AgreeWithDoublePrecision) {
  TF_NEED_GPU();
  const auto ops = gpu_ops();
  for (const Shape& shape : kShapes) {
    for (const int64_t rows : {int64_t{16}, int64_t{6}, int64_t{1}}) {
      World world(*ops, shape);
      const std::vector<Block> blocks = blocks_of(world, kCached, rows);
      const int64_t wide = shape.heads * shape.width;
      for (const int64_t window : kWindows) {
        const Setting setting{window, rows != 6};
        const std::vector<Floats> got = world.run(all_of(blocks), setting);
        for (size_t i = 0; i < blocks.size(); ++i) {
          const std::string what = name_of(world, blocks[i], setting);
          expect_same(row_of(got[i], rows - 1, wide), world.run_cached(blocks[i], setting), what + ", cached");
          for (const int64_t row : {int64_t{0}, rows - 1}) {
            for (const int64_t head : {int64_t{0}, shape.heads - 1}) {
              // Weights are rounded to bf16.
              expect_close(row_of(got[i], row, wide)
                               .subspan(static_cast<size_t>(head * shape.width), static_cast<size_t>(shape.width)),
                           world.expected(blocks[i], row, head, setting), 0.02, what);
            }
          }
        }
      }
    }
  }
}

// Protects: a block's bits are its own: alone or among others, in another place, beside blocks of other sizes and of
// NaN, in launches that are made for more keys (more splits, and waves of them).
TEST(CudaLatentBlocks, CompanyChangesNoBit) {
  TF_NEED_GPU();
  const auto ops = gpu_ops();
  for (const Shape& shape : kShapes) {
    World world(*ops, shape);
    const std::vector<Block> blocks = blocks_of(world, kCached, 16);
    const Block small = world.make(70, 3, 900);
    Block nan = world.make(100, 16, 901);
    for (Floats* values : {&nan.latents, &nan.q, &nan.own}) std::fill(values->begin(), values->end(), kNan);
    world.fill_pages(nan);
    std::vector<const Block*> mixed = {&nan, &small};
    for (size_t i = blocks.size(); i-- > 0;) mixed.push_back(&blocks[i]);
    for (const int64_t window : {int64_t{0}, int64_t{50}, int64_t{600}}) {
      const Setting setting{window, true};
      Setting longer = setting;
      longer.least_keys = 300'000;
      const std::vector<Floats> together = world.run(all_of(blocks), setting);
      const std::vector<Floats> turned = world.run(mixed, setting);
      for (size_t i = 0; i < blocks.size(); ++i) {
        const std::string what = name_of(world, blocks[i], setting);
        expect_same(world.run({&blocks[i]}, setting)[0], together[i], what + ", alone");
        expect_same(world.run({&blocks[i]}, longer)[0], together[i], what + ", another bound");
        expect_same(turned[1 + blocks.size() - i], together[i], what + ", beside others");
      }
    }
  }
}

// Protects kept launches: a graph that some blocks made computes others, of other sizes and in other places, as eager
// launches do; rows beyond the last block change nothing.
TEST(CudaLatentBlocks, KeptLaunches) {
  TF_NEED_GPU();
  const auto ops = gpu_ops(true);
  for (const Shape& shape : kShapes) {
    World world(*ops, shape);
    const Block none = world.make(0, 16, 1), page = world.make(64, 5, 11), inside = world.make(700, 16, 21),
                most = world.make(1000, 7, 31), nan = [&] {
                  Block block = world.make(130, 4, 41);
                  std::fill(block.own.begin(), block.own.end(), kNan);
                  return block;
                }();
    // All of 17 to 32 rows: one graph. The first ones make it.
    const std::vector<std::vector<const Block*>> passes = {
        {&none, &page}, {&nan, &inside, &most}, {&most, &none, &page}, {&page, &inside}, {&none, &page}};
    for (const int64_t window : {int64_t{0}, int64_t{64}, int64_t{600}}) {
      for (const bool sinks : {false, true}) {
        Setting setting{window, sinks};
        ops->forget_runs();  // they know a pass by its rows alone
        for (size_t i = 0; i < passes.size(); ++i) {
          setting.keep = false;
          const std::vector<Floats> eager = world.run(passes[i], setting);
          setting.keep = true;
          const std::vector<Floats> kept = world.run(passes[i], setting);
          for (size_t j = 0; j < eager.size(); ++j) {
            const Block& block = *passes[i][j];
            expect_same(kept[j], eager[j], name_of(world, block, setting) + ", pass " + std::to_string(i));
          }
        }
      }
    }
    ops->forget_runs();
  }
}

// Protects: a rank that has a part of the heads computes for them what one that has all does.
TEST(CudaLatentBlocks, HeadsAreAlone) {
  TF_NEED_GPU();
  const auto ops = gpu_ops();
  constexpr int64_t kWidth = 512, kHeads = 40, kRows = 16;
  World world(*ops, {kWidth, kHeads});
  for (const int64_t cached : {int64_t{0}, int64_t{1100}}) {
    const Block block = world.make(cached, kRows, 51);
    for (const int64_t window : {int64_t{0}, int64_t{128}}) {
      const Floats whole = world.run({&block}, {window})[0];
      for (const int64_t heads : {int64_t{1}, int64_t{5}, int64_t{16}}) {
        World few(*ops, {kWidth, heads});
        Block some = few.make(cached, kRows, 51);  // the same latents and rows: their seeds are
        some.q.clear();
        Floats want;
        for (int64_t row = 0; row < kRows; ++row) {
          const int64_t last = ((row + 1) * kHeads - heads) * kWidth, count = heads * kWidth;
          some.q.insert(some.q.end(), block.q.begin() + last, block.q.begin() + last + count);
          want.insert(want.end(), whole.begin() + last, whole.begin() + last + count);
        }
        expect_same(few.run({&some}, {window})[0], want, std::to_string(heads) + " heads");
      }
    }
  }
}

}  // namespace
}  // namespace tensorfold
