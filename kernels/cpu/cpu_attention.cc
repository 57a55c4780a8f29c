// Paged keys and values, and attention's work items. What is computed together and by whom is decided here; the order
// of arithmetic is the kernels' (impl_attention.h) and does not depend on it.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/numerics/check.h"
#include "kernels/ops/block_ops.h"

namespace tensorfold {

namespace {

// That the first `keys` tokens have pages.
void check_table(const RowGroup& g, int64_t keys, int64_t pages) {
  const int64_t needed = (keys + kPageTokens - 1) / kPageTokens;
  kernel_check(static_cast<int64_t>(g.pages.size()) >= needed, "row group: page table too short");
  for (int64_t i = 0; i < needed; ++i) {
    const int32_t page = g.pages[static_cast<size_t>(i)];
    kernel_check(page >= 0 && page < pages, "row group: no such page");
  }
}

}  // namespace

void check_group(const RowGroup& g, int64_t rows, int64_t pages) {
  kernel_check(g.first_row >= 0 && g.rows >= 0 && g.first_row + g.rows <= rows && g.first_position >= 0,
               "row group outside the pass");
  if (g.rows > 0) check_table(g, g.first_position + g.rows, pages);
}

void check_block(const RowGroup& g, int64_t rows, int64_t pages) {
  kernel_check(g.first_row >= 0 && g.rows >= 0 && g.rows <= kMostBlockRows && g.first_row + g.rows <= rows &&
                   g.first_position >= 0,
               "block outside the pass");
  check_table(g, g.first_position, pages);
}

CpuKvCache::CpuKvCache(int64_t layers, int64_t pages, int64_t kv_heads, int64_t head_dim)
    : layers_(layers),
      pages_(pages),
      kv_heads_(kv_heads),
      head_dim_(head_dim),
      memory_(layers * pages * page_floats() * static_cast<int64_t>(sizeof(float))) {
  kernel_check(head_dim % 8 == 0, "kv cache: head_dim must be a multiple of 8");
}

void CpuKvCache::copy_page(int32_t from, int32_t to) {
  const size_t bytes = static_cast<size_t>(page_floats()) * sizeof(float);
  for (int64_t i = 0; i < layers_; ++i) {
    std::memcpy(layer(i) + to * page_floats(), layer(i) + from * page_floats(), bytes);
  }
}

void CpuKvCache::save_page(int32_t page, std::span<std::byte> into) const {
  kernel_check(static_cast<int64_t>(into.size()) == page_bytes(), "kv cache: save into another size");
  const size_t bytes = static_cast<size_t>(page_floats()) * sizeof(float);
  for (int64_t i = 0; i < layers_; ++i) {
    std::memcpy(into.data() + static_cast<size_t>(i) * bytes, layer(i) + page * page_floats(), bytes);
  }
}

void CpuKvCache::load_page(int32_t page, std::span<const std::byte> from) {
  kernel_check(static_cast<int64_t>(from.size()) == page_bytes(), "kv cache: load of another size");
  const size_t bytes = static_cast<size_t>(page_floats()) * sizeof(float);
  for (int64_t i = 0; i < layers_; ++i) {
    std::memcpy(layer(i) + page * page_floats(), from.data() + static_cast<size_t>(i) * bytes, bytes);
  }
}

std::unique_ptr<KvCache> CpuOps::make_kv_cache(int64_t layers, int64_t pages, int64_t kv_heads, int64_t head_dim) {
  return std::make_unique<CpuKvCache>(layers, pages, kv_heads, head_dim);
}

void CpuOps::kv_write(KvCache& kv_cache, int64_t layer, Tensor k, Tensor v, const RowBatch& rows) {
  CpuKvCache& cache = static_cast<CpuKvCache&>(kv_cache);
  const int64_t heads = cache.kv_heads(), dim = cache.head_dim();
  kernel_check(k.cols == heads * dim && v.cols == heads * dim && k.rows == v.rows, "kv_write: shapes differ");
  kernel_check(layer >= 0 && layer < cache.layers(), "kv_write: no such layer");
  for (const RowGroup& g : rows.groups) {
    check_group(g, k.rows, cache.pages());
    pool_->parallel_for(g.rows, std::max<int64_t>(1, kPieceElements / k.cols), [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t position = g.first_position + i, in_page = position % kPageTokens, lane = position % kKeyBlock;
        float* page = cache.layer(layer) + g.pages[static_cast<size_t>(position / kPageTokens)] * cache.page_floats();
        for (int64_t h = 0; h < heads; ++h) {
          float* block = page + h * cache.head_floats() + in_page / kKeyBlock * cache.block_floats();
          const float* key = k.data + (g.first_row + i) * k.stride + h * dim;
          const float* value = v.data + (g.first_row + i) * v.stride + h * dim;
          for (int64_t d = 0; d < dim; ++d) block[d * kKeyBlock + lane] = key[d];
          std::memcpy(block + kKeyBlock * dim + lane * cache.value_stride(), value, static_cast<size_t>(dim) * 4);
        }
      }
    });
  }
}

struct CpuOps::AttentionPlan {
  struct Item {
    AttentionItem kernel;
    float* out[kMaxQueries];
    int64_t splits = 0;
    int64_t first_partial = 0;  // index of its first split among all
  };
  std::vector<Item> items;
  int64_t partials = 0;
  int64_t most_splits = 0;
  int64_t state_floats = 0;  // of one split of one item
};

namespace {

// A state of kMaxQueries queries inside a piece of scratch: maxima, sums, outputs.
AttentionState state_at(float* memory, int64_t value_stride) {
  AttentionState state;
  state.max = memory;
  state.sum = memory + kMaxQueries;
  for (int i = 0; i < kMaxQueries; ++i) state.out[i] = memory + 2 * kMaxQueries + i * value_stride;
  return state;
}

}  // namespace

CpuOps::AttentionPlan CpuOps::plan_attention(const CpuKvCache& cache, int64_t layer, const AttentionArgs& args) {
  AttentionPlan plan;
  plan.state_floats = 2 * kMaxQueries + kMaxQueries * cache.value_stride();
  const auto kv_head = [&](int64_t h) { return args.kv_head_of[static_cast<size_t>(h)]; };
  for (const RowGroup& g : args.rows.groups) {
    check_group(g, args.q.rows, cache.pages());
    for (int64_t h = 0; h < args.heads;) {
      kernel_check(kv_head(h) >= 0 && kv_head(h) < cache.kv_heads(), "attention: no such key/value head");
      int64_t shared = 1;
      while (h + shared < args.heads && shared < kMaxQueries && kv_head(h + shared) == kv_head(h)) ++shared;
      const int64_t rows_together = kMaxQueries / shared;
      for (int64_t r = 0; r < g.rows; r += rows_together) {
        AttentionPlan::Item item;
        AttentionItem& t = item.kernel;
        t.kv = cache.layer(layer);
        t.pages = g.pages.data();
        t.page_stride = cache.page_floats();
        t.head_offset = kv_head(h) * cache.head_floats();
        t.block_floats = cache.block_floats();
        t.head_dim = args.head_dim;
        t.value_stride = cache.value_stride();
        t.scale = args.scale;
        for (int64_t i = r; i < std::min(r + rows_together, g.rows); ++i) {
          for (int64_t j = h; j < h + shared; ++j, ++t.queries) {
            t.q[t.queries] = args.q.data + (g.first_row + i) * args.q.stride + j * args.head_dim;
            t.keys[t.queries] = g.first_position + i + 1;
            item.out[t.queries] = args.out.data + (g.first_row + i) * args.out.stride + j * args.head_dim;
          }
        }
        item.splits = (t.keys[t.queries - 1] + kKeySplit - 1) / kKeySplit;
        item.first_partial = plan.partials;
        plan.partials += item.splits;
        plan.most_splits = std::max(plan.most_splits, item.splits);
        plan.items.push_back(item);
      }
      h += shared;
    }
  }
  return plan;
}

void CpuOps::attention(const KvCache& kv_cache, int64_t layer, const AttentionArgs& args) {
  mix_values(kv_cache, layer, args);
  if (args.gate.data != nullptr) sigmoid_mul(args.out, args.gate);
}

void CpuOps::mix_values(const KvCache& kv_cache, int64_t layer, const AttentionArgs& args) {
  const CpuKvCache& cache = static_cast<const CpuKvCache&>(kv_cache);
  kernel_check(args.q.cols == args.heads * args.head_dim && args.out.cols == args.q.cols &&
                   args.head_dim == cache.head_dim() && static_cast<int64_t>(args.kv_head_of.size()) == args.heads &&
                   layer >= 0 && layer < cache.layers(),
               "attention: shapes differ");
  const AttentionPlan plan = plan_attention(cache, layer, args);
  const int64_t items = static_cast<int64_t>(plan.items.size()), stride = cache.value_stride();
  // A query sees split s only if it has keys there; its state is merged only then, whatever its neighbours see.
  const auto merge = [&](const AttentionPlan::Item& item, int64_t split, const AttentionState& state,
                         const AttentionState& next) {
    for (int i = 0; i < item.kernel.queries; ++i) {
      if (item.kernel.keys[i] > split * kKeySplit) kernels_->attention_merge(item.kernel, i, state, next);
    }
  };
  const auto finish = [&](const AttentionPlan::Item& item, const AttentionState& state) {
    for (int i = 0; i < item.kernel.queries; ++i) kernels_->attention_finish(item.kernel, i, state, item.out[i]);
  };

  if (plan.most_splits <= 1 || items >= 4 * pool_->threads()) {
    float* memory = pass_.take(2 * plan.state_floats * pool_->threads());
    pool_->parallel_for(items, 1, [&](int64_t begin, int64_t end, int worker) {
      const AttentionState state = state_at(memory + 2 * worker * plan.state_floats, stride);
      const AttentionState next = state_at(memory + (2 * worker + 1) * plan.state_floats, stride);
      for (int64_t i = begin; i < end; ++i) {
        const AttentionPlan::Item& item = plan.items[static_cast<size_t>(i)];
        kernels_->attention_split(item.kernel, 0, state);
        for (int64_t s = 1; s < item.splits; ++s) {
          kernels_->attention_split(item.kernel, s, next);
          merge(item, s, state, next);
        }
        finish(item, state);
      }
    });
    return;
  }

  // Few queries with many keys: splits side by side, then merged in ascending order.
  float* memory = pass_.take(plan.state_floats * plan.partials);
  std::vector<int64_t> item_of(static_cast<size_t>(plan.partials));
  for (int64_t i = 0; i < items; ++i) {
    const AttentionPlan::Item& item = plan.items[static_cast<size_t>(i)];
    std::fill_n(item_of.begin() + item.first_partial, item.splits, i);
  }
  const auto partial = [&](int64_t i) { return state_at(memory + i * plan.state_floats, stride); };
  pool_->parallel_for(plan.partials, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const AttentionPlan::Item& item = plan.items[static_cast<size_t>(item_of[static_cast<size_t>(i)])];
      kernels_->attention_split(item.kernel, i - item.first_partial, partial(i));
    }
  });
  for (const AttentionPlan::Item& item : plan.items) {
    const AttentionState state = partial(item.first_partial);
    for (int64_t s = 1; s < item.splits; ++s) merge(item, s, state, partial(item.first_partial + s));
    finish(item, state);
  }
}

}  // namespace tensorfold
