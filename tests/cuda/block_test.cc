// Blocks of drafted rows: their attention against double precision and bit for bit the same in whatever company, their
// convolution, and rows taken from residuals.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/rowwise.h"
#include "kernels/ops/block_ops.h"
#include "tests/cuda/cache_cases.h"

namespace tensorfold {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kPages = 512;

struct Shape {
  std::vector<int32_t> kv_head_of = {0, 0, 0, 0, 1, 1, 1, 1};
  int64_t kv_heads = 2;
  int64_t head_dim = 64;
  CudaKvFormat format = CudaKvFormat::kBf16;

  int64_t heads() const { return static_cast<int64_t>(kv_head_of.size()); }
  int64_t width() const { return heads() * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
  std::string name() const {
    return fmt::format("head_dim {} heads {}/{} {}", head_dim, heads(), kv_heads,
                       format == CudaKvFormat::kBf16 ? "bf16" : "fp8");
  }
};

/// A block and what is before it, in the cache from the page that comes first on.
struct Block {
  int64_t cached = 0;
  int64_t rows = 0;
  std::vector<int32_t> pages;
  std::vector<float> q, k, v;                // [rows, width] and [rows, kv_width]
  std::vector<float> cached_k, cached_v;     // [cached, kv_width]
  std::vector<double> rounded_k, rounded_v;  // [cached + rows, kv_width], as the kernels have them
};

/// DeviceRows of some blocks with the memory behind them.
class Pass {
 public:
  /// `spare_keys`: the launch is made for so many more; `padding`: rows of no block at the end.
  Pass(const std::vector<const Block*>& blocks, int64_t padding, int64_t spare_keys) {
    std::vector<DeviceGroup> groups;
    std::vector<int32_t> pages, group_of;
    int64_t keys = 1;
    for (const Block* block : blocks) {
      DeviceGroup g;
      g.first_position = block->cached;
      g.first_row = static_cast<int32_t>(group_of.size());
      g.rows = static_cast<int32_t>(block->rows);
      g.first_page = static_cast<int32_t>(pages.size());
      g.page_count = static_cast<int32_t>(block->pages.size());
      pages.insert(pages.end(), block->pages.begin(), block->pages.end());
      group_of.insert(group_of.end(), static_cast<size_t>(block->rows), static_cast<int32_t>(groups.size()));
      groups.push_back(g);
      keys = std::max(keys, block->cached + block->rows);
    }
    group_of.insert(group_of.end(), static_cast<size_t>(padding), -1);
    memory_ = std::make_unique<PassMemory>(PassGroups{groups, pages, group_of, {}, padding});
    rows = memory_->rows(keys + spare_keys);
  }
  DeviceRows rows;

 private:
  std::unique_ptr<PassMemory> memory_;
};

class World {
 public:
  explicit World(Shape s) : shape(std::move(s)) {
    cache_ = CudaKvCache::create(2, kPages, shape.kv_heads, shape.head_dim, shape.format);
    EXPECT_NE(cache_, nullptr) << cuda_failure();
    for (int32_t page = 0; page < kPages; ++page) free_.push_back(page);
    std::shuffle(free_.begin(), free_.end(), std::mt19937(7));
  }

  Block make(int64_t cached, int64_t rows, uint32_t seed) {
    Block block;
    block.cached = cached;
    block.rows = rows;
    while (static_cast<int64_t>(block.pages.size()) * kPageTokens < cached) {
      block.pages.push_back(free_.back());
      free_.pop_back();
    }
    block.q = random_floats(static_cast<size_t>(rows * shape.width()), seed, 2.0f);
    block.k = random_floats(static_cast<size_t>(rows * shape.kv_width()), seed + 1);
    block.v = random_floats(static_cast<size_t>(rows * shape.kv_width()), seed + 2);
    block.cached_k = random_floats(static_cast<size_t>(cached * shape.kv_width()), seed + 3);
    block.cached_v = random_floats(static_cast<size_t>(cached * shape.kv_width()), seed + 4);
    write(block, 0, block.cached_k, block.cached_v);
    return block;
  }

  /// Rows of keys and values at positions from `first` on.
  void write(const Block& block, int64_t first, const std::vector<float>& k, const std::vector<float>& v) {
    const int64_t rows = static_cast<int64_t>(k.size()) / shape.kv_width();
    if (rows == 0) return;
    Block written;
    written.cached = first;
    written.rows = rows;
    written.pages = block.pages;
    Pass pass({&written}, 0, 0);
    std::vector<int64_t> positions;
    for (int64_t i = 0; i < rows; ++i) positions.push_back(first + i);
    const DeviceArray<int64_t> device_positions(positions);
    pass.rows.positions = device_positions.data();
    const DeviceArray<float> device_k(k), device_v(v);
    CudaQkvArgs args;
    args.k = {device_k.data(), rows, shape.kv_width(), shape.kv_width()};
    args.v = {device_v.data(), rows, shape.kv_width(), shape.kv_width()};
    cuda_qkv(nullptr, *cache_, 1, pass.rows, args);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cuda_failure(), "");
  }

  /// Bits [rows, width] of each block, computed in one pass; checks that nothing outside was written and that padding
  /// rows are zeros.
  std::vector<std::vector<uint16_t>> run(const std::vector<const Block*>& blocks, int64_t window, int64_t padding = 0,
                                         int64_t spare_keys = 0) const {
    const Pass pass(blocks, padding, spare_keys);
    const int64_t rows = pass.rows.rows, width = shape.width(), stride = width + 8;
    std::vector<float> q, k, v;
    for (const Block* block : blocks) {
      q.insert(q.end(), block->q.begin(), block->q.end());
      k.insert(k.end(), block->k.begin(), block->k.end());
      v.insert(v.end(), block->v.begin(), block->v.end());
    }
    q.resize(static_cast<size_t>(rows * width), kNan);
    k.resize(static_cast<size_t>(rows * shape.kv_width()), kNan);
    v.resize(k.size(), kNan);
    const DeviceArray<float> device_q(q), device_k(k), device_v(v);
    DeviceArray<uint16_t> out(static_cast<size_t>((rows + 1) * stride));
    out.poison(0x7b);
    const int64_t floats = cuda_block_attention_workspace(pass.rows, shape.heads(), shape.head_dim, window);
    DeviceArray<float> workspace(static_cast<size_t>(floats) + 256);
    workspace.poison();
    CudaBlockAttentionArgs args;
    args.common.q = {device_q.data(), rows, width, width};
    args.common.out = {reinterpret_cast<__nv_bfloat16*>(out.data()), rows, width, stride};
    args.common.heads = shape.heads();
    args.common.head_dim = shape.head_dim;
    args.common.kv_head_of = shape.kv_head_of;
    args.common.scale = shape.scale();
    args.common.workspace = workspace.data();
    args.k = {device_k.data(), rows, shape.kv_width(), shape.kv_width()};
    args.v = {device_v.data(), rows, shape.kv_width(), shape.kv_width()};
    args.window = window;
    cuda_block_attention(nullptr, *cache_, 1, pass.rows, args);
    const std::vector<uint16_t> all = out.get();
    EXPECT_EQ(cuda_failure(), "");
    const std::vector<float> after = workspace.get();
    EXPECT_TRUE(std::all_of(after.begin() + floats, after.end(), [](float x) { return x != x; }))
        << "written behind a workspace of " << floats << " floats";
    std::vector<std::vector<uint16_t>> results;
    int64_t row = 0;
    for (const Block* block : blocks) {
      std::vector<uint16_t>& result = results.emplace_back();
      for (int64_t end = row + block->rows; row < end; ++row) {
        result.insert(result.end(), all.begin() + row * stride, all.begin() + row * stride + width);
      }
    }
    int64_t outside = 0;
    for (int64_t r = 0; r <= rows; ++r) {
      const auto begin = all.begin() + r * stride;
      outside += std::count_if(r < rows ? begin + width : begin, begin + stride, [](auto x) { return x != 0x7b7b; });
      if (r >= row && r < rows) {
        EXPECT_TRUE(std::all_of(begin, begin + width, [](auto x) { return x == 0; })) << "padding row " << r;
      }
    }
    EXPECT_EQ(outside, 0) << "values outside the output were written";
    return results;
  }

  /// `got` of a block against double precision; one failure at most.
  void expect_near(Block& block, const std::vector<uint16_t>& got, int64_t window, const std::string& what) const {
    const int64_t d = shape.head_dim, kv_width = shape.kv_width();
    round_keys(block);
    for (int64_t i = 0; i < block.rows; ++i) {
      const int64_t first = window > 0 ? std::max<int64_t>(block.cached + i - window + 1, 0) : 0;
      for (int64_t h = 0; h < shape.heads(); ++h) {
        const int64_t offset = shape.kv_head_of[static_cast<size_t>(h)] * d;
        const float* q = block.q.data() + i * shape.width() + h * d;
        std::vector<double> scores, out(static_cast<size_t>(d), 0.0);
        std::vector<const double*> values;
        double largest = -1e300, sum = 0.0;
        for (int64_t key = std::min(first, block.cached); key < block.cached + block.rows; ++key) {
          const double* k = block.rounded_k.data() + key * kv_width + offset;
          double dot = 0.0;
          for (int64_t c = 0; c < d; ++c) dot += static_cast<double>(bf16(q[c])) * k[c];
          scores.push_back(dot * static_cast<double>(shape.scale()));
          values.push_back(block.rounded_v.data() + key * kv_width + offset);
          largest = std::max(largest, scores.back());
        }
        for (size_t key = 0; key < scores.size(); ++key) {
          const double w = std::exp(scores[key] - largest);
          sum += w;
          for (int64_t c = 0; c < d; ++c) out[static_cast<size_t>(c)] += w * values[key][c];
        }
        for (int64_t c = 0; c < d; ++c) {
          const double x = from_bits(got[static_cast<size_t>(i * shape.width() + h * d + c)]);
          const double y = out[static_cast<size_t>(c)] / sum;
          if (std::fabs(x - y) <= 0.01 + 0.01 * std::fabs(y)) continue;
          ADD_FAILURE() << what << ": row " << i << " head " << h << " dim " << c << ": " << x << " instead of " << y;
          return;
        }
      }
    }
  }

  Shape shape;

 private:
  void round_keys(Block& block) const {
    if (!block.rounded_k.empty()) return;
    const auto round = [&](const std::vector<float>& cached, const std::vector<float>& own) {
      std::vector<double> all(cached.size() + own.size());
      for (size_t at = 0; at < cached.size(); at += static_cast<size_t>(shape.head_dim)) {
        keep(cached.data() + at, shape.head_dim, shape.format, all.data() + at);
      }
      for (size_t i = 0; i < own.size(); ++i) all[cached.size() + i] = static_cast<double>(bf16(own[i]));
      return all;
    };
    block.rounded_k = round(block.cached_k, block.k);
    block.rounded_v = round(block.cached_v, block.v);
  }

  std::unique_ptr<CudaKvCache> cache_;
  std::vector<int32_t> free_;
};

std::vector<Block> blocks_of(World& world, const std::vector<int64_t>& lengths, int64_t rows) {
  std::vector<Block> blocks;
  for (size_t i = 0; i < lengths.size(); ++i) {
    blocks.push_back(world.make(lengths[i], rows, 100 + 10 * static_cast<uint32_t>(i)));
  }
  return blocks;
}

std::vector<const Block*> all_of(const std::vector<Block>& blocks) {
  std::vector<const Block*> all;
  for (const Block& block : blocks) all.push_back(&block);
  return all;
}

const std::vector<Shape> kShapes = {
    {.kv_head_of = {0, 0, 1, 1}, .head_dim = 8},
    {.kv_head_of = {0, 0, 0, 1, 1}, .head_dim = 24},
    {.head_dim = 64},
    {.kv_head_of = {0, 0, 0, 0, 0, 0, 0, 0, 0, 1}, .head_dim = 128},
    {.head_dim = 256},
    {.kv_head_of = {0, 1}, .head_dim = 128, .format = CudaKvFormat::kFp8},
    {.head_dim = 256, .format = CudaKvFormat::kFp8},
    {.kv_head_of = {0, 0, 0, 1, 1}, .head_dim = 64, .format = CudaKvFormat::kFp8},
};
const std::vector<int64_t> kWindows = {0, 16, 50, 600};

// Protects: each row sees the cached rows of its window and the whole block, for every head dimension and format,
// contexts of none, of part of a page, of several splits.
TEST(BlockAttention, AgreesWithDoublePrecision) {
  TF_NEED_GPU();
  for (const Shape& shape : kShapes) {
    for (const int64_t rows : {int64_t{16}, int64_t{6}, int64_t{1}}) {
      World world(shape);
      std::vector<Block> blocks = blocks_of(world, {0, 1, 15, 64, 65, 700, 1300}, rows);
      for (const int64_t window : kWindows) {
        const auto got = world.run(all_of(blocks), window);
        for (size_t i = 0; i < blocks.size(); ++i) {
          world.expect_near(
              blocks[i], got[i], window,
              fmt::format("{}, {} rows behind {}, window {}", shape.name(), rows, blocks[i].cached, window));
        }
      }
    }
  }
}

// Protects: a block's bits are its own: alone or among others, at another place, in a launch that is made for more keys
// and more rows, whatever the others hold and whatever the cache holds behind the context.
TEST(BlockAttention, CompanyChangesNoBit) {
  TF_NEED_GPU();
  for (const Shape& shape : kShapes) {
    World world(shape);
    std::vector<Block> blocks = blocks_of(world, {0, 40, 511, 512, 513, 1300, 3000}, 16);
    for (const int64_t window : kWindows) {
      SCOPED_TRACE(fmt::format("{}, window {}", shape.name(), window));
      const auto together = world.run(all_of(blocks), window);
      std::vector<const Block*> reversed = all_of(blocks);
      std::reverse(reversed.begin(), reversed.end());
      const auto padded = world.run(reversed, window, 16, 70'000);
      for (size_t i = 0; i < blocks.size(); ++i) {
        const std::string what = fmt::format("block behind {}", blocks[i].cached);
        EXPECT_EQ(world.run({&blocks[i]}, window)[0], together[i]) << what;
        EXPECT_EQ(world.run({&blocks[i]}, window, 48, 5'000)[0], together[i]) << what << " as one of few";
        EXPECT_EQ(padded[blocks.size() - 1 - i], together[i]) << what << " in reverse order";
      }
    }
    // What nobody may read: NaN in other blocks, noise where the block stands.
    Block nan = world.make(200, 16, 900);
    for (std::vector<float>* values : {&nan.q, &nan.k, &nan.v}) std::fill(values->begin(), values->end(), kNan);
    Block& block = blocks[1];
    const auto before = world.run({&block}, 0);
    world.write(block, block.cached, random_floats(static_cast<size_t>(20 * shape.kv_width()), 5, 1e30f),
                random_floats(static_cast<size_t>(20 * shape.kv_width()), 6, 1e30f));
    EXPECT_EQ(world.run({&nan, &block, &nan}, 0)[1], before[0]) << shape.name();
  }
}

// Protects: how many splits a launch takes, which the number of rows decides, changes no bit; nor do blocks of few rows
// in tiles that are made for full ones.
TEST(BlockAttention, LaunchesAreCutAnyhow) {
  TF_NEED_GPU();
  Shape shape = {.kv_head_of = {}, .kv_heads = 4, .head_dim = 256};
  for (int32_t head = 0; head < 32; ++head) shape.kv_head_of.push_back(head / 8);
  World world(shape);
  std::vector<Block> blocks = blocks_of(world, {13'000, 8'000, 90, 2'000}, 16);
  for (int i = 0; i < 12; ++i) blocks.push_back(world.make(70 + i, 1 + i % 3, 500 + 10 * static_cast<uint32_t>(i)));
  for (const int64_t window : {int64_t{0}, int64_t{4000}}) {
    // 84 rows of 32 heads: some 18 splits a launch. 16 rows alone: all 26 in one.
    const auto together = world.run(all_of(blocks), window);
    for (size_t i = 0; i < blocks.size(); ++i) {
      EXPECT_EQ(world.run({&blocks[i]}, window)[0], together[i]) << "block " << i << ", window " << window;
    }
    world.expect_near(blocks[0], together[0], window, fmt::format("13000 keys, window {}", window));
  }
}

// Protects: a rank that has a part of the heads computes for them what one that has all does.
TEST(BlockAttention, HeadsAreAlone) {
  TF_NEED_GPU();
  const Shape whole = {.kv_head_of = {0, 0, 0, 1, 1, 1}, .kv_heads = 2, .head_dim = 64};
  const Shape part = {.kv_head_of = {0, 0}, .kv_heads = 1, .head_dim = 64};  // the last two heads
  World one(whole), other(part);
  const Block all = one.make(1100, 16, 1);
  Block some = other.make(1100, 16, 1);
  const auto columns = [](const std::vector<float>& from, int64_t width, int64_t first, int64_t count) {
    std::vector<float> out;
    for (auto row = from.begin(); row != from.end(); row += width) {
      out.insert(out.end(), row + first, row + first + count);
    }
    return out;
  };
  some.q = columns(all.q, whole.width(), 4 * 64, 2 * 64);
  some.k = columns(all.k, whole.kv_width(), 64, 64);
  some.v = columns(all.v, whole.kv_width(), 64, 64);
  other.write(some, 0, columns(all.cached_k, whole.kv_width(), 64, 64),
              columns(all.cached_v, whole.kv_width(), 64, 64));
  for (const int64_t window : {int64_t{0}, int64_t{50}}) {
    const std::vector<uint16_t> a = one.run({&all}, window)[0], b = other.run({&some}, window)[0];
    for (int64_t row = 0; row < 16; ++row) {
      for (int64_t c = 0; c < 2 * 64; ++c) {
        ASSERT_EQ(a[static_cast<size_t>(row * whole.width() + 4 * 64 + c)],
                  b[static_cast<size_t>(row * part.width() + c)])
            << "row " << row << " column " << c << " window " << window;
      }
    }
  }
}

// Protects: what cannot be computed is an error that says so, not a wrong result.
TEST(BlockAttention, RefusesOtherShapes) {
  TF_NEED_GPU();
  World world({});
  const Block block = world.make(40, 4, 1);
  const Pass pass({&block}, 0, 0);
  const auto cache = CudaKvCache::create(1, 1, 2, 64, CudaKvFormat::kBf16);
  DeviceArray<float> memory(1 << 16);
  CudaBlockAttentionArgs args;
  args.common.q = {memory.data(), 4, 512, 512};
  args.common.out = {reinterpret_cast<__nv_bfloat16*>(memory.data()), 4, 512, 512};
  args.common.heads = 8;
  args.common.head_dim = 64;
  args.common.kv_head_of = world.shape.kv_head_of;
  args.common.workspace = memory.data();
  args.k = args.v = {memory.data(), 4, 64, 64};
  cuda_block_attention(nullptr, *cache, 0, pass.rows, args);
  EXPECT_NE(cuda_failure().find("keys or values of other shapes"), std::string::npos);
  args.k = args.v = {memory.data(), 4, 128, 128};
  args.window = 8;
  cuda_block_attention(nullptr, *cache, 0, pass.rows, args);
  EXPECT_NE(cuda_failure().find("a window out of range"), std::string::npos);
}

struct ConvCase {
  int64_t taps, width, group;
};

// Protects: the convolution is its definition's operations one by one, to fp32 and rounded to bf16, and no block sees
// another's rows; rows of no block are zeros.
TEST(BlockConv, IsItsDefinition) {
  TF_NEED_GPU();
  for (const ConvCase& c : {ConvCase{2, 64, 16}, ConvCase{4, 60, 5}, ConvCase{3, 12, 2}, ConvCase{1, 7, 1}}) {
    SCOPED_TRACE(fmt::format("{} taps, {} wide, groups of {}", c.taps, c.width, c.group));
    World world({.head_dim = 8});
    std::vector<Block> blocks;
    for (const int64_t rows : {int64_t{8}, int64_t{1}, int64_t{16}}) blocks.push_back(world.make(0, rows, 3));
    const Pass pass(all_of(blocks), 5, 0);
    const int64_t rows = pass.rows.rows, stride = (c.width + 15) / 16 * 16, groups = c.width / c.group;
    const int64_t dynamic_cols = c.taps * groups, dynamic_stride = 2 * dynamic_cols + 3;
    std::vector<float> x = random_floats(static_cast<size_t>(rows * stride), 11);
    std::fill(x.begin() + 25 * stride, x.end(), kNan);  // of no block
    const std::vector<float> dynamic = random_floats(static_cast<size_t>(rows * dynamic_stride), 12);
    const std::vector<float> base = random_floats(static_cast<size_t>(c.taps * c.width), 13);
    const DeviceArray<float> device_x(x), device_dynamic(dynamic), device_base(base);
    DeviceArray<float> out(x.size());
    DeviceArray<uint16_t> rounded(x.size());
    CudaBlockConv conv;
    conv.x = {device_x.data(), rows, c.width, stride};
    conv.dynamic = {device_dynamic.data() + dynamic_cols, rows, dynamic_cols, dynamic_stride};  // the second of two
    conv.base = device_base.data();
    conv.taps = c.taps;
    conv.group = c.group;
    conv.out_f = {out.data(), rows, c.width, stride};
    cuda_block_conv(nullptr, pass.rows, conv);
    conv.out_f = {};
    conv.out_b = {reinterpret_cast<__nv_bfloat16*>(rounded.data()), rows, c.width, stride};
    cuda_block_conv(nullptr, pass.rows, conv);
    const std::vector<float> got = out.get();
    const std::vector<uint16_t> got_rounded = rounded.get();
    EXPECT_EQ(cuda_failure(), "");
    int64_t first = 0;
    for (size_t b = 0; b <= blocks.size(); ++b) {
      const int64_t end = b < blocks.size() ? first + blocks[b].rows : rows;
      for (int64_t r = first; r < end; ++r) {
        for (int64_t col = 0; col < c.width; ++col) {
          float want = 0.0f;
          for (int64_t t = 0; b < blocks.size() && t < c.taps && t <= r - first; ++t) {
            const float own =
                dynamic[static_cast<size_t>(r * dynamic_stride + dynamic_cols + t * groups + col / c.group)];
            const float tap = base[static_cast<size_t>(t * c.width + col)] + own;
            const float product = x[static_cast<size_t>((r - t) * stride + col)] * tap;
            want = t == 0 ? product : want + product;
          }
          const size_t at = static_cast<size_t>(r * stride + col);
          ASSERT_EQ(got[at], want) << "row " << r << " column " << col;
          ASSERT_EQ(from_bits(got_rounded[at]), bf16(want)) << "row " << r << " column " << col;
        }
      }
      first = end;
    }
  }
}

// Protects what is taken from a residual: one stream bit for bit, the mean of several, beside what is not touched.
TEST(MeanStreams, IsItsDefinition) {
  TF_NEED_GPU();
  constexpr int64_t kRows = 5;
  for (const int64_t width : {int64_t{64}, int64_t{70}}) {
    for (const int64_t streams : {int64_t{1}, int64_t{2}, int64_t{4}}) {
      const std::vector<float> x = random_floats(static_cast<size_t>(kRows * streams * width), 21);
      const DeviceArray<float> device_x(x);
      DeviceArray<float> out(static_cast<size_t>(kRows * 3 * width));
      out.poison(0);
      cuda_mean_streams(nullptr, {device_x.data(), kRows, streams * width, streams * width}, streams,
                        {out.data() + width, kRows, width, 3 * width});
      const std::vector<float> got = out.get();
      EXPECT_EQ(cuda_failure(), "");
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t col = 0; col < 3 * width; ++col) {
          float want = 0.0f;
          if (col >= width && col < 2 * width) {
            const auto at = static_cast<size_t>(r * streams * width + col - width);
            want = x[at];
            for (int64_t s = 1; s < streams; ++s) want += x[at + static_cast<size_t>(s * width)];
            if (streams > 1) want *= 1.0f / static_cast<float>(streams);
          }
          ASSERT_EQ(got[static_cast<size_t>(r * 3 * width + col)], want) << "row " << r << " column " << col;
        }
      }
    }
  }
}

TEST(Clear, ClearsRowsAndNothingElse) {
  TF_NEED_GPU();
  for (const int64_t width : {int64_t{64}, int64_t{7}}) {
    DeviceArray<float> x(static_cast<size_t>(3 * 80));
    x.poison();
    cuda_clear(nullptr, {x.data(), 3, width, 80});
    const std::vector<float> got = x.get();
    EXPECT_EQ(cuda_failure(), "");
    for (int64_t i = 0; i < 3 * 80; ++i) {
      const float value = got[static_cast<size_t>(i)];
      EXPECT_TRUE(i % 80 < width ? value == 0.0f && !std::signbit(value) : value != value) << i;
    }
  }
}

}  // namespace
}  // namespace tensorfold
