// Attention over the paged cache, and the step before it: against double precision, and bit for bit the same in every
// kind of pass. Kernels that share a promise are told apart by sizes only, so the passes here have sizes for each.
#include "kernels/cuda/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/attention_layout.h"
#include "tests/cuda/attention_cases.h"

namespace tensorfold {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

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
      CacheWorld world({4, 2, dim, format, {}}, 32);
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
void same_in_every_pass(const CacheShape& shape, int64_t length, const std::vector<int64_t>& at) {
  CacheWorld world(shape, 64 + (length + kPageTokens - 1) / kPageTokens);
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
  CacheWorld world({16, 1, 256, CudaKvFormat::kBf16, {}}, 400);
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
    CacheWorld world({8, 2, dim, CudaKvFormat::kBf16, {}}, 100);
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
    CacheWorld world({16, 1, dim, CudaKvFormat::kBf16, {}}, 32);
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
    CacheWorld world({8, 2, 64, format, {}}, 64);
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
  CacheWorld world({6, 3, 128, CudaKvFormat::kBf16, {0, 0, 0, 1, 2, 2}}, 32);
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
  CacheWorld world({8, 2, 128, CudaKvFormat::kBf16, {}}, 64);
  const Sequence s = world.make(1500, 51);
  const int64_t width = 8 * 128;
  CachePass pass({{&s, 700, 3}, {&s, 100, 2}}, 3, 3, 6000);
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
  CacheWorld world({heads, kv_heads, dim, CudaKvFormat::kBf16, {0, 0, 1}}, 8);
  Sequence s;
  s.pages = {5, 2, 7};
  const auto run = [&](int64_t first, int64_t count, int64_t pad) {
    const CachePass pass({{&s, 60 + first, count}}, pad);
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
