// Attention over the paged cache, and the step before it: against double precision, and bit for bit the same in every
// kind of pass. Kernels that share a promise are told apart by sizes only, so the passes here have sizes for each.
#include "kernels/cuda/attention.h"

#include <cuda_fp8.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/attention_layout.h"
#include "kernels/cuda/kv_cache.h"
#include "tests/cuda/gpu.h"

namespace tensorfold {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

/// Values of about unit variance that are quick to make: a sum of two uniform ones.
std::vector<float> values(size_t count, uint64_t seed, float scale = 1.0f) {
  std::vector<float> out(count);
  uint64_t x = seed * 0x9E3779B97F4A7C15ull + 1;
  for (float& value : out) {
    x = x * 6364136223846793005ull + 1442695040888963407ull;
    const double a = static_cast<double>(x >> 40) * 0x1p-24;
    const double b = static_cast<double>((x >> 16) & 0xffffff) * 0x1p-24;
    value = scale * static_cast<float>((a + b - 1.0) * 2.45);
  }
  return out;
}

float bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
float from_bits(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}

struct Shape {
  int64_t heads = 8;
  int64_t kv_heads = 2;
  int64_t head_dim = 64;
  CudaKvFormat format = CudaKvFormat::kBf16;
  std::vector<int32_t> kv_head_of = {};  // empty: equal groups
};

struct Sequence {
  int64_t length = 0;
  std::vector<int32_t> pages;
  int64_t first_query = 0;     // rows before it have no queries
  std::vector<float> q, k, v;  // [length - first_query, heads * head_dim] and [length, kv_heads * head_dim]
};

struct Group {
  const Sequence* sequence;
  int64_t first;
  int64_t rows;
};

/// A pass's DeviceRows with the memory behind it.
class Pass {
 public:
  Pass(const std::vector<Group>& groups, int64_t padding, int64_t spare_groups = 0, int64_t spare_keys = 0) {
    std::vector<DeviceGroup> device_groups;
    std::vector<int32_t> pages, group_of;
    std::vector<int64_t> positions;
    int64_t keys = 1;
    for (const Group& group : groups) {
      DeviceGroup g;
      g.first_position = group.first;
      g.first_row = static_cast<int32_t>(positions.size());
      g.rows = static_cast<int32_t>(group.rows);
      g.certain = g.rows;
      g.first_page = static_cast<int32_t>(pages.size());
      g.page_count = static_cast<int32_t>(group.sequence->pages.size());
      pages.insert(pages.end(), group.sequence->pages.begin(), group.sequence->pages.end());
      for (int64_t r = 0; r < group.rows; ++r) {
        positions.push_back(group.first + r);
        group_of.push_back(static_cast<int32_t>(device_groups.size()));
      }
      keys = std::max(keys, group.first + group.rows);
      device_groups.push_back(g);
    }
    for (int64_t r = 0; r < padding; ++r) {
      positions.push_back(0);
      group_of.push_back(-1);
    }
    const int32_t count = static_cast<int32_t>(device_groups.size());
    DeviceGroup garbage;  // beyond group_count: must not be used
    garbage.rows = 1000;
    garbage.first_page = 1 << 28;
    for (int64_t i = 0; i < spare_groups; ++i) device_groups.push_back(garbage);
    groups_ = std::make_unique<DeviceArray<DeviceGroup>>(device_groups);
    pages_ = std::make_unique<DeviceArray<int32_t>>(pages);
    group_of_ = std::make_unique<DeviceArray<int32_t>>(group_of);
    positions_ = std::make_unique<DeviceArray<int64_t>>(positions);
    count_ = std::make_unique<DeviceArray<int32_t>>(std::vector<int32_t>{count});
    rows.rows = static_cast<int32_t>(positions.size());
    rows.max_groups = static_cast<int32_t>(device_groups.size());
    rows.max_keys = keys + spare_keys;
    rows.group_count = count_->data();
    rows.positions = positions_->data();
    rows.group_of = group_of_->data();
    rows.groups = groups_->data();
    rows.pages = pages_->data();
  }
  DeviceRows rows;

 private:
  std::unique_ptr<DeviceArray<DeviceGroup>> groups_;
  std::unique_ptr<DeviceArray<int32_t>> pages_, group_of_, count_;
  std::unique_ptr<DeviceArray<int64_t>> positions_;
};

/// A cache with one layer in use of two, and its sequences.
class World {
 public:
  World(Shape s, int64_t pages) : shape(std::move(s)) {
    if (shape.kv_head_of.empty()) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        shape.kv_head_of.push_back(static_cast<int32_t>(h * shape.kv_heads / shape.heads));
      }
    }
    cache = CudaKvCache::create(2, pages, shape.kv_heads, shape.head_dim, shape.format);
    EXPECT_NE(cache, nullptr) << cuda_failure();
    // Pages are handed out in a scrambled order.
    for (int64_t i = 0; i < pages; ++i) free_.push_back(static_cast<int32_t>((i * 7919 + 13) % pages));
    std::sort(free_.begin(), free_.end());
    free_.erase(std::unique(free_.begin(), free_.end()), free_.end());
    std::shuffle(free_.begin(), free_.end(), std::mt19937(7));
  }

  Sequence make(int64_t length, uint64_t seed, int64_t first_query = 0) {
    Sequence s;
    s.length = length;
    s.first_query = first_query;
    for (int64_t i = 0; i < (length + kPageTokens - 1) / kPageTokens; ++i) {
      s.pages.push_back(free_.back());
      free_.pop_back();
    }
    s.q = values(static_cast<size_t>((length - first_query) * shape.heads * shape.head_dim), seed);
    s.k = values(static_cast<size_t>(length * shape.kv_heads * shape.head_dim), seed + 1);
    s.v = values(static_cast<size_t>(length * shape.kv_heads * shape.head_dim), seed + 2);
    write(s, 0, length, s.k, s.v);
    return s;
  }

  /// Keys and values [rows, kv_heads * head_dim] into the cache as they are.
  void write(const Sequence& s, int64_t first, int64_t rows, const std::vector<float>& k, const std::vector<float>& v) {
    const Pass pass({{&s, first, rows}}, 0);
    const int64_t width = shape.kv_heads * shape.head_dim;
    const DeviceArray<float> device_k(k), device_v(v), device_q(static_cast<size_t>(rows * shape.head_dim));
    CudaQkvArgs args;
    args.q = {device_q.data(), rows, 0, 0};
    args.k = {device_k.data(), rows, width, width};
    args.v = {device_v.data(), rows, width, width};
    args.heads = 0;
    cuda_qkv(nullptr, *cache, 1, pass.rows, args);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cuda_failure(), "");
  }

  std::vector<float> queries(const std::vector<Group>& groups, int64_t padding) const {
    const int64_t width = shape.heads * shape.head_dim;
    std::vector<float> q;
    for (const Group& group : groups) {
      const auto first = group.sequence->q.begin() + (group.first - group.sequence->first_query) * width;
      q.insert(q.end(), first, first + group.rows * width);
    }
    q.insert(q.end(), static_cast<size_t>(padding * width), kNan);
    return q;
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape.head_dim)); }

  CudaAttentionArgs arguments(DeviceMatrix q, DeviceMatrix gate, DeviceInput out, float* workspace) const {
    CudaAttentionArgs args;
    args.q = q;
    args.gate = gate;
    args.out = out;
    args.heads = shape.heads;
    args.head_dim = shape.head_dim;
    args.kv_head_of = shape.kv_head_of;
    args.scale = scale();
    args.workspace = workspace;
    return args;
  }

  /// Bits [rows + padding, heads * head_dim] of one pass; checks that nothing outside was written.
  std::vector<uint16_t> run(const std::vector<Group>& groups, const std::vector<float>& q, int64_t padding = 0,
                            const std::vector<float>* gate = nullptr) const {
    const Pass pass(groups, padding);
    const int64_t rows = pass.rows.rows;
    const int64_t width = shape.heads * shape.head_dim;
    const int64_t stride = width + 8;
    EXPECT_EQ(static_cast<int64_t>(q.size()), rows * width);
    const DeviceArray<float> device_q(q);
    const DeviceArray<float> device_gate(gate == nullptr ? std::vector<float>(4) : *gate);
    DeviceArray<uint16_t> out(static_cast<size_t>((rows + 1) * stride));
    out.poison(0x7b);
    const int64_t floats = cuda_attention_workspace(pass.rows, shape.heads, shape.head_dim);
    DeviceArray<float> workspace(static_cast<size_t>(floats) + 256);
    workspace.poison();
    DeviceMatrix gate_matrix;
    if (gate != nullptr) gate_matrix = {device_gate.data(), rows, width, width};
    cuda_attention(nullptr, *cache, 1, pass.rows,
                   arguments({device_q.data(), rows, width, width}, gate_matrix,
                             {reinterpret_cast<__nv_bfloat16*>(out.data()), rows, width, stride}, workspace.data()));
    const std::vector<uint16_t> all = out.get();
    EXPECT_EQ(cuda_failure(), "");
    const std::vector<float> after = workspace.get();
    for (size_t i = static_cast<size_t>(floats); i < after.size(); ++i) {
      uint32_t bits;
      std::memcpy(&bits, &after[i], 4);
      if (bits != 0xffffffffu) {
        ADD_FAILURE() << "workspace of " << floats << " floats: written at " << i;
        break;
      }
    }
    std::vector<uint16_t> result;
    int64_t outside = 0;
    for (int64_t r = 0; r <= rows; ++r) {
      const auto row = all.begin() + r * stride;
      if (r < rows) result.insert(result.end(), row, row + width);
      outside += std::count_if(r < rows ? row + width : row, row + stride, [](uint16_t x) { return x != 0x7b7b; });
    }
    EXPECT_EQ(outside, 0) << "values outside the output were written";
    return result;
  }
  std::vector<uint16_t> run(const std::vector<Group>& groups, int64_t padding = 0) const {
    return run(groups, queries(groups, padding), padding);
  }

  Shape shape;
  std::unique_ptr<CudaKvCache> cache;

 private:
  std::vector<int32_t> free_;
};

/// What the cache keeps of a vector of a head.
std::vector<double> kept(const float* x, int64_t dim, CudaKvFormat format) {
  std::vector<double> out(static_cast<size_t>(dim));
  float amax = 0.0f;
  for (int64_t i = 0; i < dim; ++i) amax = std::max(amax, std::fabs(x[i]));
  // Smallest power of two with amax / 2^e <= 448.
  int e = amax > 0.0f ? std::max(-110, std::ilogb(amax) - 10) : -110;
  while (e < 119 && std::ldexp(amax, -e) > 448.0f) ++e;
  for (int64_t i = 0; i < dim; ++i) {
    if (format == CudaKvFormat::kBf16) {
      out[static_cast<size_t>(i)] = bf16(x[i]);
    } else {
      const __nv_fp8_e4m3 value(std::ldexp(x[i], -e));
      out[static_cast<size_t>(i)] = std::ldexp(static_cast<double>(static_cast<float>(value)), e);
    }
  }
  return out;
}

/// Attention of one row and head in double precision from what the kernels are given: bf16 queries, kept keys, values.
std::vector<double> expected(const World& world, const Sequence& s, int64_t position, int64_t head) {
  const Shape& shape = world.shape;
  const int64_t d = shape.head_dim;
  const int64_t kv = shape.kv_head_of[static_cast<size_t>(head)];
  const float* q = s.q.data() + ((position - s.first_query) * shape.heads + head) * d;
  std::vector<double> score, out(static_cast<size_t>(d), 0.0);
  double largest = -1e300, sum = 0.0;
  for (int64_t p = 0; p <= position; ++p) {
    const std::vector<double> k = kept(s.k.data() + (p * shape.kv_heads + kv) * d, d, shape.format);
    double dot = 0.0;
    for (int64_t i = 0; i < d; ++i) dot += static_cast<double>(bf16(q[i])) * k[static_cast<size_t>(i)];
    score.push_back(dot * static_cast<double>(world.scale()));
    largest = std::max(largest, score.back());
  }
  for (int64_t p = 0; p <= position; ++p) {
    const std::vector<double> v = kept(s.v.data() + (p * shape.kv_heads + kv) * d, d, shape.format);
    const double w = std::exp(score[static_cast<size_t>(p)] - largest);
    sum += w;
    for (int64_t i = 0; i < d; ++i) out[static_cast<size_t>(i)] += w * v[static_cast<size_t>(i)];
  }
  for (double& x : out) x /= sum;
  return out;
}

/// Row `row` of a result against double precision; one failure a row at most.
void expect_near(const World& world, const std::vector<uint16_t>& got, int64_t row, const Sequence& s, int64_t position,
                 const std::string& what) {
  const Shape& shape = world.shape;
  for (int64_t h = 0; h < shape.heads; ++h) {
    const std::vector<double> want = expected(world, s, position, h);
    for (int64_t i = 0; i < shape.head_dim; ++i) {
      const float x = from_bits(got[static_cast<size_t>((row * shape.heads + h) * shape.head_dim + i)]);
      const double y = want[static_cast<size_t>(i)];
      if (!(std::fabs(x - y) <= 0.01 + 0.01 * std::fabs(y))) {
        ADD_FAILURE() << what << ": row " << row << " position " << position << " head " << h << " dim " << i << ": "
                      << x << " instead of " << y;
        return;
      }
    }
  }
}

/// Row `row` of one result and row `other` of another, bit for bit.
bool expect_same(const World& world, const std::vector<uint16_t>& a, int64_t row, const std::vector<uint16_t>& b,
                 int64_t other, const std::string& what) {
  const int64_t width = world.shape.heads * world.shape.head_dim;
  for (int64_t i = 0; i < width; ++i) {
    const uint16_t x = a[static_cast<size_t>(row * width + i)];
    const uint16_t y = b[static_cast<size_t>(other * width + i)];
    if (x == y) continue;
    ADD_FAILURE() << what << ": head " << i / world.shape.head_dim << " dim " << i % world.shape.head_dim << ": "
                  << fmt::format("{} ({:#06x}) and {} ({:#06x})", from_bits(x), x, from_bits(y), y);
    return false;
  }
  return true;
}

std::string name_of(const Shape& s) {
  return fmt::format("head_dim {} heads {}/{} {}", s.head_dim, s.heads, s.kv_heads,
                     s.format == CudaKvFormat::kBf16 ? "bf16" : "fp8");
}

// The layout is a bijection that ldmatrix reads without bank conflicts, and moves as the kernels' addresses assume.
TEST(AttentionLayout, SwizzledUnits) {
  for (const int dim : {32, 64, 128, 256}) {
    const int units = dim / 8;
    for (int token = 0; token < 64; ++token) {
      std::vector<bool> taken(static_cast<size_t>(units));
      for (int unit = 0; unit < units; ++unit) {
        const int place = swizzled_unit(dim, token, unit);
        ASSERT_TRUE(place >= 0 && place < units && !taken[static_cast<size_t>(place)]) << dim << " " << token;
        taken[static_cast<size_t>(place)] = true;
        EXPECT_EQ(swizzled_unit(dim, token + 16, unit), place);
        EXPECT_TRUE(dim < 64 || swizzled_unit(dim, token, unit + 8) == place + 8);
      }
    }
    for (int token = 0; token < 64; token += 8) {
      for (int unit = 0; unit < units; ++unit) {
        unsigned banks = 0;
        for (int r = 0; r < 8; ++r) banks |= 1u << ((token + r) * units + swizzled_unit(dim, token + r, unit)) % 8;
        EXPECT_EQ(banks, 255u) << dim << " " << token << " " << unit;
      }
    }
  }
}

// A grid of tile_slots() tiles holds every way of cutting rows into groups, and is not wasteful for one group.
TEST(AttentionLayout, TileSlotsBoundEveryCut) {
  std::mt19937 engine(1);
  for (int trial = 0; trial < 20000; ++trial) {
    const int64_t groups = 1 + engine() % 20, heads = 1 + engine() % 12, tile = 16 * (1 + engine() % 8);
    int64_t rows = 0, tiles = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t n = engine() % 40;
      rows += n;
      tiles += (n * heads + tile - 1) / tile;
    }
    ASSERT_GE(tile_slots(rows, groups, heads, tile), tiles) << rows << " rows, " << groups << " groups";
  }
  EXPECT_EQ(tile_slots(1, 1, 6, 16), 1);
  EXPECT_EQ(tile_slots(16, 1, 6, 96), 1);
  EXPECT_EQ(tile_slots(0, 4, 6, 16), 0);
}

// The scale of fp8 vectors brings them into range, as large as possible, and never makes an infinite or rounded bf16.
TEST(AttentionLayout, Fp8Exponent) {
  const auto exponent = [](float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return fp8_exponent(bits);
  };
  EXPECT_EQ(exponent(448.0f), 0);
  EXPECT_EQ(exponent(std::nextafter(448.0f, 500.0f)), 1);
  EXPECT_EQ(exponent(224.0f), -1);
  EXPECT_EQ(exponent(1.0f), -8);
  EXPECT_EQ(exponent(0.0f), -110);
  EXPECT_EQ(exponent(3.38953139e38f), 119);
  for (const float x : values(1000, 3)) {
    if (x == 0.0f) continue;
    const int e = exponent(std::fabs(x));
    EXPECT_TRUE(std::ldexp(std::fabs(x), -e) <= 448.0f && std::ldexp(std::fabs(x), -e) > 223.9f) << x << " " << e;
  }
}

TEST(AttentionLayout, HeadDimensions) {
  EXPECT_EQ(padded_head_dim(8), 32);
  EXPECT_EQ(padded_head_dim(16), 32);
  EXPECT_EQ(padded_head_dim(64), 64);
  EXPECT_EQ(padded_head_dim(80), 128);
  EXPECT_EQ(padded_head_dim(256), 256);
  EXPECT_EQ(padded_head_dim(72), 128);
  EXPECT_EQ(padded_head_dim(68), 0);
  EXPECT_EQ(padded_head_dim(264), 0);
  EXPECT_EQ(padded_head_dim(0), 0);
}

// What cannot be kept is refused with its reason.
TEST(CudaAttention, RefusesHeadDimensions) {
  EXPECT_EQ(CudaKvCache::create(1, 1, 1, 68, CudaKvFormat::kBf16), nullptr);
  EXPECT_NE(cuda_failure().find("not 68"), std::string::npos);
}

// Single rows and windows agree with double precision at the edges of blocks and splits, for every head dimension.
TEST(CudaAttention, AgreesWithDouble) {
  TF_NEED_GPU();
  for (const CudaKvFormat format : {CudaKvFormat::kBf16, CudaKvFormat::kFp8}) {
    for (const int64_t dim : {8, 16, 24, 32, 48, 64, 80, 128, 256}) {
      if (format == CudaKvFormat::kFp8 && dim % 64 != 0) continue;
      World world({4, 2, dim, format, {}}, 32);
      const Sequence s = world.make(1500, static_cast<uint64_t>(dim));
      for (const int64_t length : {1, 63, 64, 65, 511, 512, 513, 1500}) {
        expect_near(world, world.run({{&s, length - 1, 1}}), 0, s, length - 1, name_of(world.shape) + " alone");
      }
      const std::vector<uint16_t> window = world.run({{&s, 509, 6}});
      for (const int64_t r : {0, 2, 3, 5}) expect_near(world, window, r, s, 509 + r, name_of(world.shape) + " window");
    }
  }
}

/// Rows of a sequence in every kind of pass; alone is what the others are compared with.
void same_in_every_pass(const Shape& shape, int64_t length, const std::vector<int64_t>& at) {
  World world(shape, 64 + (length + kPageTokens - 1) / kPageTokens);
  const Sequence s = world.make(length, 11);
  const Sequence other = world.make(700, 12);
  const std::string name = name_of(world.shape);

  const std::vector<uint16_t> prompt = world.run({{&s, 0, length}});
  std::vector<uint16_t> chunks;
  for (int64_t first = 0; first < length; first += 500) {
    const std::vector<uint16_t> part = world.run({{&s, first, std::min<int64_t>(500, length - first)}});
    chunks.insert(chunks.end(), part.begin(), part.end());
  }
  for (const int64_t p : at) {
    const std::vector<uint16_t> alone = world.run({{&s, p, 1}});
    expect_near(world, alone, 0, s, p, name + " alone");
    if (!expect_same(world, alone, 0, prompt, p, fmt::format("{} position {} alone and in a prompt", name, p))) return;
    if (!expect_same(world, alone, 0, chunks, p, fmt::format("{} position {} alone and in a chunk", name, p))) return;
    for (const int64_t width : {2, 3, 5, 8, 16}) {
      const int64_t first = std::max<int64_t>(0, std::min(p - width / 2, length - width));
      const std::vector<uint16_t> window = world.run({{&s, first, width}}, width % 3);
      const std::string what = fmt::format("{} position {} alone and in a window of {}", name, p, width);
      if (!expect_same(world, alone, 0, window, p - first, what)) return;
    }
    const std::vector<uint16_t> beside = world.run({{&other, 650, 3}, {&s, p, 1}, {&other, 0, 5}}, 2);
    if (!expect_same(world, alone, 0, beside, 3, fmt::format("{} position {} beside others", name, p))) return;
  }
  // Many windows: tiles of several warps that take one split each.
  std::vector<Group> windows;
  for (int64_t i = 0; i < 40; ++i) windows.push_back({&s, (i * 97) % (length - 16), 1 + (i * 5) % 16});
  const std::vector<uint16_t> many = world.run(windows, 3);
  int64_t row = 0;
  for (const Group& window : windows) {
    for (int64_t r = 0; r < window.rows; ++r, ++row) {
      const std::string what = fmt::format("{} position {} in a prompt and in 40 windows", name, window.first + r);
      if (!expect_same(world, prompt, window.first + r, many, row, what)) return;
    }
  }
}

// One arithmetic: a row alone, in windows, in chunks, in a whole prompt, and beside others has the same bits.
TEST(CudaAttention, SameBitsInEveryPassDim64) {
  TF_NEED_GPU();
  same_in_every_pass({8, 2, 64, CudaKvFormat::kBf16, {}}, 1500,
                     {0, 1, 62, 63, 64, 65, 127, 510, 511, 512, 513, 700, 1023, 1024, 1498, 1499});
}
TEST(CudaAttention, SameBitsInEveryPassDim32) {
  TF_NEED_GPU();
  same_in_every_pass({16, 4, 32, CudaKvFormat::kBf16, {}}, 1100, {0, 63, 64, 511, 512, 1023, 1024, 1099});
}
TEST(CudaAttention, SameBitsInEveryPassDim128) {
  TF_NEED_GPU();
  same_in_every_pass({8, 2, 128, CudaKvFormat::kBf16, {}}, 1500, {0, 63, 64, 511, 512, 700, 1024, 1499});
}
TEST(CudaAttention, SameBitsInEveryPassDim256) {
  TF_NEED_GPU();
  same_in_every_pass({12, 2, 256, CudaKvFormat::kBf16, {}}, 1500, {0, 63, 64, 511, 512, 1024, 1499});
}
TEST(CudaAttention, SameBitsInEveryPassFp8Dim128) {
  TF_NEED_GPU();
  same_in_every_pass({8, 2, 128, CudaKvFormat::kFp8, {}}, 1500, {0, 64, 511, 512, 1499});
}
TEST(CudaAttention, SameBitsInEveryPassFp8Dim256) {
  TF_NEED_GPU();
  same_in_every_pass({12, 2, 256, CudaKvFormat::kFp8, {}}, 1100, {0, 64, 511, 512, 1099});
}
// Short prompts (one split) of many rows, and uneven heads.
TEST(CudaAttention, SameBitsInEveryPassUnevenHeads) {
  TF_NEED_GPU();
  same_in_every_pass(
      {24, 3, 64, CudaKvFormat::kBf16, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2}}, 500,
      {0, 63, 64, 300, 499});
}
TEST(CudaAttention, SameBitsAtFiveThousand) {
  TF_NEED_GPU();
  same_in_every_pass({8, 1, 64, CudaKvFormat::kBf16, {}}, 5000, {4095, 4096, 4999});
}

// The splits of long contexts take several launches whose fold goes on; a row alone takes one.
TEST(CudaAttention, FoldsOverSeveralLaunches) {
  TF_NEED_GPU();
  World world({16, 1, 256, CudaKvFormat::kBf16, {}}, 400);
  const Sequence s = world.make(25100, 5, 25036);
  const std::vector<uint16_t> window = world.run({{&s, 25036, 64}});
  for (const int64_t r : {0, 1, 17, 63}) {
    expect_same(world, world.run({{&s, 25036 + r, 1}}), 0, window, r, fmt::format("row {} of 64", r));
  }
}

// Single rows of many sequences at long contexts: enough blocks of one tile for the window kernel alone, which a row by
// itself does not take at these sizes.
TEST(CudaAttention, SameBitsAmongManySingleRows) {
  TF_NEED_GPU();
  for (const int64_t dim : {128, 256}) {
    World world({8, 2, dim, CudaKvFormat::kBf16, {}}, 100);
    const Sequence s = world.make(5000, 15, 0);
    std::vector<Group> groups;
    for (int64_t i = 0; i < 64; ++i) groups.push_back({&s, (i * 1237 + 4999) % 5000, 1});
    const std::vector<uint16_t> many = world.run(groups, 1);
    for (const int64_t i : {0, 1, 2, 17, 40, 63}) {
      const std::string what =
          fmt::format("{} position {} alone and among 64", name_of(world.shape), groups[static_cast<size_t>(i)].first);
      expect_same(world, world.run({groups[static_cast<size_t>(i)]}), 0, many, i, what);
    }
  }
}

// A query's bits are the same in each of a tile's 16 places, whatever the other queries are.
TEST(CudaAttention, PlaceAndNeighboursInATile) {
  TF_NEED_GPU();
  for (const int64_t dim : {64, 256}) {
    World world({16, 1, dim, CudaKvFormat::kBf16, {}}, 32);
    const Sequence s = world.make(1100, 21);
    // One row at the end takes the kernel for few queries, 1100 rows the one for tiles.
    for (const int64_t rows : {int64_t{1}, int64_t{1100}}) {
      const std::vector<Group> groups = {{&s, 1100 - rows, rows}};
      const std::vector<float> own = world.queries(groups, 0);
      std::vector<uint16_t> first;
      for (int64_t place = 0; place < 16; ++place) {
        // Head 0's query of every row at this place; the others random, NaN or infinite.
        std::vector<float> q = values(own.size(), static_cast<uint64_t>(place) + 50, 3.0f);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t h = 0; h < 16; ++h) {
            float* to = q.data() + (r * 16 + h) * dim;
            const float* from = own.data() + r * 16 * dim;
            if (h == place) {
              std::copy(from, from + dim, to);
            } else if ((h + place) % 3 == 0) {
              std::fill(to, to + dim, (h + place) % 2 == 0 ? kNan : kInf);
            }
          }
        }
        const std::vector<uint16_t> all = world.run(groups, q);
        std::vector<uint16_t> got;
        for (int64_t r = 0; r < rows; ++r) {
          const auto at = all.begin() + (r * 16 + place) * dim;
          got.insert(got.end(), at, at + dim);
        }
        if (place == 0) first = got;
        int64_t different = 0;
        for (size_t i = 0; i < got.size(); ++i) different += got[i] != first[i];
        EXPECT_EQ(different, 0) << "head_dim " << dim << ", " << rows << " rows: of " << got.size()
                                << " values at place " << place << " against place 0";
      }
    }
  }
}

// Masked positions may hold anything that was ever given to the cache: NaN, infinities, another sequence's values.
TEST(CudaAttention, StaleAndForeignKeysLeaveNoTrace) {
  TF_NEED_GPU();
  for (const CudaKvFormat format : {CudaKvFormat::kBf16, CudaKvFormat::kFp8}) {
    World world({8, 2, 64, format, {}}, 64);
    const Sequence s = world.make(600, 31);
    const std::vector<Group> groups = {{&s, 520, 8}};
    const std::vector<uint16_t> clean = world.run(groups);
    const int64_t width = 2 * 64;
    for (const float garbage : {kNan, kInf, -kInf, 3e38f}) {
      const std::vector<float> bad(static_cast<size_t>(72 * width), garbage);
      world.write(s, 528, 72, bad, bad);
      Sequence foreign = world.make(64, 33);
      const std::vector<float> page(static_cast<size_t>(64 * width), garbage);
      world.write(foreign, 0, 64, page, page);
      const std::vector<uint16_t> dirty = world.run({{&foreign, 10, 4}, {&s, 520, 8}}, 1);
      for (int64_t r = 0; r < 8; ++r) {
        expect_same(world, clean, r, dirty, 4 + r,
                    fmt::format("row {} beside {} ({})", r, garbage, name_of(world.shape)));
      }
    }
  }
}

// The gate multiplies by its sigmoid, replicated heads are read where they are, padding rows get zeros.
TEST(CudaAttention, GateReplicatedHeadsAndPadding) {
  TF_NEED_GPU();
  World world({6, 3, 128, CudaKvFormat::kBf16, {0, 0, 0, 1, 2, 2}}, 32);
  const Sequence s = world.make(1000, 41);
  const int64_t width = 6 * 128;
  for (const int64_t rows : {int64_t{1}, int64_t{4}, int64_t{40}}) {
    const std::vector<Group> groups = {{&s, 1000 - rows, rows}};
    const std::vector<float> q = world.queries(groups, 3);
    std::vector<float> gate = values(q.size(), 43, 2.0f);
    gate[0] = 200.0f;
    gate[1] = -200.0f;
    const std::vector<uint16_t> plain = world.run(groups, q, 3);
    const std::vector<uint16_t> gated = world.run(groups, q, 3, &gate);
    expect_near(world, plain, rows - 1, s, 999, "replicated heads");
    for (int64_t i = 0; i < (rows + 3) * width; ++i) {
      const float g = 1.0f / (1.0f + std::exp(-gate[static_cast<size_t>(i)]));
      const float want = i < rows * width ? from_bits(plain[static_cast<size_t>(i)]) * g : 0.0f;
      const float got = from_bits(gated[static_cast<size_t>(i)]);
      if (!(std::fabs(got - want) <= 0.01f * std::fabs(want) + 1e-6f)) {
        ADD_FAILURE() << rows << " rows: row " << i / width << " column " << i % width << ": " << got << " instead of "
                      << want;
        break;
      }
    }
    const bool zeros = std::all_of(plain.begin() + rows * width, plain.end(), [](uint16_t x) { return x == 0; });
    EXPECT_TRUE(zeros) << "padding rows of " << rows;
  }
}

// Bounds larger than the pass, as graphs have them, and a replay after the arrays changed.
TEST(CudaAttention, GraphWithLooseBounds) {
  TF_NEED_GPU();
  World world({8, 2, 128, CudaKvFormat::kBf16, {}}, 64);
  const Sequence s = world.make(1500, 51);
  const int64_t width = 8 * 128;
  Pass pass({{&s, 700, 3}, {&s, 100, 2}}, 3, 3, 6000);
  const std::vector<Group> groups = {{&s, 700, 3}, {&s, 100, 2}};
  const DeviceArray<float> q(world.queries(groups, 3));
  DeviceArray<uint16_t> out(static_cast<size_t>(8 * width));
  const DeviceArray<float> workspace(static_cast<size_t>(cuda_attention_workspace(pass.rows, 8, 128)));
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  cuda_attention(stream, *world.cache, 1, pass.rows,
                 world.arguments({q.data(), 8, width, width}, {},
                                 {reinterpret_cast<__nv_bfloat16*>(out.data()), 8, width, width}, workspace.data()));
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess) << cuda_failure();
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  EXPECT_EQ(cuda_failure(), "");
  const std::vector<uint16_t> eager = world.run(groups, 3);
  for (int run = 0; run < 2; ++run) {
    out.poison(0x7b);
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const std::vector<uint16_t> got = out.get();
    for (int64_t r = 0; r < 8; ++r) expect_same(world, eager, r, got, r, fmt::format("eager and graph, row {}", r));
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

/// Norm and rotation of one head's vector in double precision.
std::vector<double> normed_rotated(const float* x, const std::vector<float>& weight, const float* cos, const float* sin,
                                   int64_t dim, int64_t pairs) {
  double sum = 0.0;
  for (int64_t i = 0; i < dim; ++i) sum += static_cast<double>(x[i]) * x[i];
  const double factor = 1.0 / std::sqrt(sum / static_cast<double>(dim) + 1e-6);
  std::vector<double> y(static_cast<size_t>(dim)), out;
  for (int64_t i = 0; i < dim; ++i) y[static_cast<size_t>(i)] = x[i] * factor * weight[static_cast<size_t>(i)];
  out = y;
  for (int64_t i = 0; i < pairs; ++i) {
    const size_t a = static_cast<size_t>(i), b = static_cast<size_t>(i + pairs);
    out[a] = y[a] * cos[i] - y[b] * sin[i];
    out[b] = y[b] * cos[i] + y[a] * sin[i];
  }
  return out;
}

// Norm, rotation of part of the dimensions, and the place of keys and values in the cache; a row's bits do not depend
// on the other rows, and padding rows write nothing.
TEST(CudaAttention, QkvNormsRotatesAndWrites) {
  TF_NEED_GPU();
  const int64_t heads = 3, kv_heads = 2, dim = 80, pairs = 12, rows = 70, padding = 2;
  const int64_t q_width = heads * dim, k_width = kv_heads * dim, stride = q_width + 5;
  const std::vector<float> q_norm = values(dim, 61), k_norm = values(dim, 62);
  const std::vector<float> k = values((rows + padding) * k_width, 64), v = values((rows + padding) * k_width, 65);
  std::vector<float> q = values((rows + padding) * stride, 63);
  const std::vector<float> cos = values((rows + padding) * 16, 66), sin = values((rows + padding) * 16, 67);
  const DeviceArray<float> device_q_norm(q_norm), device_k_norm(k_norm), device_k(k), device_v(v), device_cos(cos),
      device_sin(sin);
  World world({heads, kv_heads, dim, CudaKvFormat::kBf16, {0, 0, 1}}, 8);
  Sequence s;
  s.pages = {5, 2, 7};
  const auto run = [&](int64_t first, int64_t count, int64_t pad) {
    const Pass pass({{&s, 60 + first, count}}, pad);
    std::vector<float> part(q.begin() + first * stride, q.begin() + (first + count + pad) * stride);
    const DeviceArray<float> device_q(part);
    CudaQkvArgs args;
    args.q = {device_q.data(), count + pad, q_width, stride};
    args.k = {device_k.data() + first * k_width, count + pad, k_width, k_width};
    args.v = {device_v.data() + first * k_width, count + pad, k_width, k_width};
    args.heads = heads;
    args.q_norm = device_q_norm.data();
    args.k_norm = device_k_norm.data();
    args.cos = device_cos.data() + first * 16;
    args.sin = device_sin.data() + first * 16;
    args.pairs = pairs;
    args.table_stride = 16;
    cuda_qkv(nullptr, *world.cache, 1, pass.rows, args);
    return device_q.get();
  };
  const PagedKvCache& cache = static_cast<const PagedKvCache&>(*world.cache);
  const size_t count = static_cast<size_t>(cache.bytes() / 2 / 2);
  const auto layer = [&](int64_t index) {
    std::vector<uint16_t> host(count);
    EXPECT_EQ(cudaMemcpy(host.data(), cache.layer_data(index), count * 2, cudaMemcpyDeviceToHost), cudaSuccess);
    return host;
  };
  const std::vector<float> got = run(0, rows, padding);
  EXPECT_EQ(cuda_failure(), "");
  const std::vector<uint16_t> stored = layer(1);
  const std::vector<uint16_t> untouched = layer(0);
  EXPECT_TRUE(std::all_of(untouched.begin(), untouched.end(), [](uint16_t x) { return x == 0; })) << "other layer";
  std::vector<bool> written(count);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t position = 60 + r;
    for (int64_t h = 0; h < heads; ++h) {
      const std::vector<double> want =
          normed_rotated(q.data() + r * stride + h * dim, q_norm, cos.data() + r * 16, sin.data() + r * 16, dim, pairs);
      for (int64_t i = 0; i < dim; ++i) {
        ASSERT_NEAR(got[static_cast<size_t>(r * stride + h * dim + i)], want[static_cast<size_t>(i)], 2e-5)
            << "q row " << r << " head " << h << " dim " << i;
      }
    }
    for (int64_t h = 0; h < kv_heads; ++h) {
      const std::vector<double> want = normed_rotated(k.data() + r * k_width + h * dim, k_norm, cos.data() + r * 16,
                                                      sin.data() + r * 16, dim, pairs);
      for (int64_t i = 0; i < dim; ++i) {
        for (const int part : {0, 1}) {
          const int token = static_cast<int>(position % 64);
          const int64_t block = cache_block(s.pages[static_cast<size_t>(position / 64)], kv_heads, h) + part;
          const int64_t at =
              (block * 64 + token) * 128 + swizzled_unit(128, token, static_cast<int>(i / 8)) * 8 + i % 8;
          written[static_cast<size_t>(at)] = true;
          const float have = from_bits(stored[static_cast<size_t>(at)]);
          if (part == 0) {
            ASSERT_NEAR(have, want[static_cast<size_t>(i)], 2e-5 + 0.004 * std::fabs(want[static_cast<size_t>(i)]))
                << "k row " << r << " head " << h << " dim " << i;
          } else {
            ASSERT_EQ(have, bf16(v[static_cast<size_t>(r * k_width + h * dim + i)]))
                << "v row " << r << " head " << h << " dim " << i;
          }
        }
      }
    }
  }
  for (size_t i = 0; i < count; ++i) ASSERT_TRUE(written[i] || stored[i] == 0) << "cache written at " << i;
  for (const int64_t r : {0, 3, 68}) {
    const std::vector<float> alone = run(r, 1, 0);
    EXPECT_TRUE(same_bits<float>(std::span(alone).first(static_cast<size_t>(q_width)),
                                 std::span(got).subspan(static_cast<size_t>(r * stride), static_cast<size_t>(q_width))))
        << "row " << r << " alone";
  }
  EXPECT_TRUE(layer(1) == stored) << "keys and values of rows alone differ";
}

}  // namespace
}  // namespace tensorfold
