// Sequences in a paged cache, passes over some of their rows, and what attention must give for them.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/attention.h"
#include "tests/cuda/cache_cases.h"

namespace tensorfold {

/// Values of about unit variance that are quick to make: a sum of two uniform ones.
inline std::vector<float> values(size_t count, uint64_t seed, float scale = 1.0f) {
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

struct CacheShape {
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
class CachePass {
 public:
  CachePass(const std::vector<Group>& groups, int64_t padding, int64_t spare_groups = 0, int64_t spare_keys = 0) {
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
    const PassGroups all = {device_groups, pages, group_of, positions, spare_groups};
    memory_ = std::make_unique<PassMemory>(all);
    rows = memory_->rows(keys + spare_keys);
  }
  DeviceRows rows;

 private:
  std::unique_ptr<PassMemory> memory_;
};

/// A cache with one layer in use of two, and its sequences.
class CacheWorld {
 public:
  CacheWorld(CacheShape s, int64_t pages) : shape(std::move(s)) {
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
    const CachePass pass({{&s, first, rows}}, 0);
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
    q.insert(q.end(), static_cast<size_t>(padding * width), std::numeric_limits<float>::quiet_NaN());
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
    const CachePass pass(groups, padding);
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

  CacheShape shape;
  std::unique_ptr<CudaKvCache> cache;

 private:
  std::vector<int32_t> free_;
};

/// What the cache keeps of a vector of a head.
inline std::vector<double> kept(const float* x, int64_t dim, CudaKvFormat format) {
  std::vector<double> out(static_cast<size_t>(dim));
  keep(x, dim, format, out.data());
  return out;
}

/// Attention of one row and head in double precision from what the kernels are given: bf16 queries, kept keys, values.
inline std::vector<double> expected(const CacheWorld& world, const Sequence& s, int64_t position, int64_t head) {
  const CacheShape& shape = world.shape;
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
inline void expect_near(const CacheWorld& world, const std::vector<uint16_t>& got, int64_t row, const Sequence& s,
                        int64_t position, const std::string& what) {
  const CacheShape& shape = world.shape;
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
inline bool expect_same(const CacheWorld& world, const std::vector<uint16_t>& a, int64_t row,
                        const std::vector<uint16_t>& b, int64_t other, const std::string& what) {
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

inline std::string name_of(const CacheShape& s) {
  return fmt::format("head_dim {} heads {}/{} {}", s.head_dim, s.heads, s.kv_heads,
                     s.format == CudaKvFormat::kBf16 ? "bf16" : "fp8");
}

}  // namespace tensorfold
