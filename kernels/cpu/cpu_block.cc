// Blocks of drafted rows (block_ops.h). What is computed together is decided here; attention's arithmetic is the
// kernels' (impl_attention.h).
#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/numerics/check.h"
#include "kernels/ops/block_ops.h"

namespace tensorfold {
namespace {

int64_t tile_floats(int64_t keys, int64_t head_floats) { return (keys + kPageTokens - 1) / kPageTokens * head_floats; }

}  // namespace

void CpuOps::mean_streams(Tensor x, int64_t streams, Tensor out) {
  const int64_t width = out.cols;
  kernel_check(streams >= 1 && x.cols == streams * width && x.rows == out.rows, "mean_streams: shapes differ");
  const float share = 1.0f / static_cast<float>(streams);
  for_pieces(out.rows, width, [&](int64_t r, int64_t c, int64_t n) {
    const float* from = x.data + r * x.stride + c;
    float* to = out.data + r * out.stride + c;
    std::copy_n(from, n, to);
    for (int64_t s = 1; s < streams; ++s) {
      for (int64_t i = 0; i < n; ++i) to[i] += from[s * width + i];
    }
    for (int64_t i = 0; i < n && streams > 1; ++i) to[i] *= share;
  });
}

void CpuOps::block_conv(const BlockConvArgs& args) {
  const int64_t width = args.x.cols;
  kernel_check(args.taps >= 1 && args.taps <= kMostBlockTaps && args.group >= 1 && width % args.group == 0 &&
                   args.base->size() == args.taps * width && args.dynamic.cols == args.taps * (width / args.group) &&
                   args.dynamic.rows == args.x.rows && args.out.cols == width && args.out.rows == args.x.rows &&
                   args.out.data != args.x.data,
               "block_conv: shapes differ");
  const float* base = static_cast<const CpuVector*>(args.base)->data();
  const int64_t groups = width / args.group;
  for (const RowGroup& g : args.rows.groups) {
    kernel_check(g.first_row >= 0 && g.first_row + g.rows <= args.x.rows, "block_conv: block outside the pass");
    for (int64_t i = 0; i < g.rows; ++i) {
      const int64_t r = g.first_row + i;
      const float* dynamic = args.dynamic.data + r * args.dynamic.stride;
      float* out = args.out.data + r * args.out.stride;
      for (int64_t t = 0; t <= std::min(i, args.taps - 1); ++t) {
        const float* x = args.x.data + (r - t) * args.x.stride;
        for (int64_t c = 0; c < width; ++c) {
          const float product = x[c] * (base[t * width + c] + dynamic[t * groups + c / args.group]);
          out[c] = t == 0 ? product : out[c] + product;
        }
      }
    }
  }
}

// One block's query heads that share a key/value head.
struct CpuOps::BlockItem {
  const RowGroup* group = nullptr;
  int64_t first_head = 0;
  int64_t heads = 0;
  int64_t cached = 0;  // rows that the block's first row sees of the cache
};

void CpuOps::attend_block(const CpuKvCache& cache, int64_t layer, const BlockAttentionArgs& args, const BlockItem& item,
                          float* memory) {
  const RowGroup& g = *item.group;
  const int64_t dim = args.head_dim, stride = cache.value_stride(), head_floats = cache.head_floats();
  const int64_t kv_head = args.kv_head_of[static_cast<size_t>(item.first_head)];
  const int64_t head_offset = kv_head * head_floats;
  float* const own = memory;
  float* const gathered = own + tile_floats(kMostBlockRows, head_floats);
  float* const states = gathered + (args.window > 0 ? tile_floats(item.cached, head_floats) : 0);
  const auto place = [&](float* tile, int64_t i) { return tile + i / kKeyBlock * cache.block_floats(); };
  for (int64_t i = 0; i < g.rows; ++i) {
    float* to = place(own, i);
    const float* key = args.k.data + (g.first_row + i) * args.k.stride + kv_head * dim;
    const float* value = args.v.data + (g.first_row + i) * args.v.stride + kv_head * dim;
    for (int64_t d = 0; d < dim; ++d) to[d * kKeyBlock + i % kKeyBlock] = key[d];
    std::memcpy(to + kKeyBlock * dim + i % kKeyBlock * stride, value, static_cast<size_t>(dim) * sizeof(float));
  }
  for (int64_t i = 0; i < item.cached && args.window > 0; ++i) {
    const int64_t position = g.first_position - 1 - i, lane = position % kKeyBlock;
    const float* from = cache.layer(layer) +
                        g.pages[static_cast<size_t>(position / kPageTokens)] * cache.page_floats() + head_offset +
                        position % kPageTokens / kKeyBlock * cache.block_floats();
    float* to = place(gathered, i);
    for (int64_t d = 0; d < dim; ++d) to[d * kKeyBlock + i % kKeyBlock] = from[d * kKeyBlock + lane];
    std::memcpy(to + kKeyBlock * dim + i % kKeyBlock * stride, from + kKeyBlock * dim + lane * stride,
                static_cast<size_t>(dim) * sizeof(float));
  }
  std::vector<int32_t> in_order(static_cast<size_t>(item.cached / kPageTokens + 1));
  std::iota(in_order.begin(), in_order.end(), 0);

  AttentionItem block;
  block.block_floats = cache.block_floats();
  block.head_dim = dim;
  block.value_stride = stride;
  block.scale = args.scale;
  AttentionState state[2];
  for (int which = 0; which < 2; ++which) {
    float* at = states + which * (2 * kMaxQueries + kMaxQueries * stride);
    state[which].max = at;
    state[which].sum = at + kMaxQueries;
    for (int i = 0; i < kMaxQueries; ++i) state[which].out[i] = at + 2 * kMaxQueries + i * stride;
  }
  const int64_t together = kMaxQueries / item.heads;
  for (int64_t first = 0; first < g.rows; first += together) {
    AttentionItem t = block;
    t.kv = own;
    t.pages = in_order.data();
    t.page_stride = head_floats;
    float* out[kMaxQueries] = {};
    int64_t cached[kMaxQueries] = {};
    for (int64_t i = first; i < std::min(first + together, g.rows); ++i) {
      for (int64_t h = item.first_head; h < item.first_head + item.heads; ++h, ++t.queries) {
        t.q[t.queries] = args.q.data + (g.first_row + i) * args.q.stride + h * dim;
        t.keys[t.queries] = g.rows;
        out[t.queries] = args.out.data + (g.first_row + i) * args.out.stride + h * dim;
        cached[t.queries] = args.window > 0 ? std::min(g.first_position, args.window - 1 - i) : g.first_position;
      }
    }
    kernels_->attention_split(t, 0, state[0]);
    std::copy_n(cached, kMaxQueries, t.keys);
    if (args.window > 0) {
      t.kv = gathered;
    } else {
      t.kv = cache.layer(layer);
      t.pages = g.pages.data();
      t.page_stride = cache.page_floats();
      t.head_offset = head_offset;
    }
    for (int64_t split = 0; split * kKeySplit < item.cached; ++split) {
      kernels_->attention_split(t, split, state[1]);
      for (int i = 0; i < t.queries; ++i) {
        if (t.keys[i] > split * kKeySplit) kernels_->attention_merge(t, i, state[0], state[1]);
      }
    }
    for (int i = 0; i < t.queries; ++i) kernels_->attention_finish(t, i, state[0], out[i]);
  }
}

void CpuOps::block_attention(const KvCache& kv_cache, int64_t layer, const BlockAttentionArgs& args) {
  const CpuKvCache& cache = static_cast<const CpuKvCache&>(kv_cache);
  kernel_check(args.q.cols == args.heads * args.head_dim && args.out.cols == args.q.cols &&
                   args.head_dim == cache.head_dim() && args.kv_heads == cache.kv_heads() &&
                   args.k.cols == args.kv_heads * args.head_dim && args.v.cols == args.k.cols &&
                   static_cast<int64_t>(args.kv_head_of.size()) == args.heads && layer >= 0 && layer < cache.layers() &&
                   (args.window == 0 || args.window >= kMostBlockRows),
               "block_attention: shapes differ");
  std::vector<BlockItem> items;
  int64_t longest = 0;
  for (const RowGroup& g : args.rows.groups) {
    check_block(g, args.q.rows, cache.pages());
    const int64_t cached = args.window > 0 ? std::min(g.first_position, args.window - 1) : g.first_position;
    longest = std::max(longest, args.window > 0 ? cached : 0);
    for (int64_t h = 0; h < args.heads;) {
      const int32_t kv_head = args.kv_head_of[static_cast<size_t>(h)];
      kernel_check(kv_head >= 0 && kv_head < args.kv_heads, "block_attention: no such key/value head");
      int64_t shared = 1;
      while (h + shared < args.heads && shared < kMaxQueries &&
             args.kv_head_of[static_cast<size_t>(h + shared)] == kv_head) {
        ++shared;
      }
      items.push_back({&g, h, shared, cached});
      h += shared;
    }
  }
  const ScratchScope scope(*this);
  const int64_t each = tile_floats(kMostBlockRows, cache.head_floats()) + tile_floats(longest, cache.head_floats()) +
                       2 * (2 * kMaxQueries + kMaxQueries * cache.value_stride());
  float* memory = pass_.take(each * pool_->threads());
  pool_->parallel_for(static_cast<int64_t>(items.size()), 1, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t i = begin; i < end; ++i) {
      attend_block(cache, layer, args, items[static_cast<size_t>(i)], memory + worker * each);
    }
  });
}

}  // namespace tensorfold
