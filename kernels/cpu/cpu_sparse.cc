// Attention over chosen keys: pooled index keys, the choice of windows, and attention over the keys gathered. The order
// of additions is that of attention (impl_attention.h) over the list of chosen positions.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/numerics/check.h"
#include "kernels/numerics/math64.h"
#include "kernels/ops/stream_ops.h"

namespace tensorfold {

void CpuOps::pool_means(RowCache& row_cache, const PoolMeansArgs& args) {
  CpuRowCache& cache = static_cast<CpuRowCache&>(row_cache);
  kernel_check(args.from >= 0 && args.from < cache.layers() && args.into >= 0 && args.into < cache.layers() &&
                   args.tokens >= 1 && args.tokens <= kPageTokens && cache.shape(args.from).tokens == 1 &&
                   cache.shape(args.into).tokens == args.tokens &&
                   cache.shape(args.from).width == cache.shape(args.into).width &&
                   args.norm->size() == cache.shape(args.into).width && 2 * args.inv_freq->size() <= args.norm->size(),
               "pool_means: shapes differ");
  const int64_t width = args.norm->size(), pairs = args.inv_freq->size();
  const float* norm = static_cast<const CpuVector*>(args.norm)->data();
  const float* inv_freq = static_cast<const CpuVector*>(args.inv_freq)->data();
  const std::vector<float> share(static_cast<size_t>(args.tokens), 1.0f / static_cast<float>(args.tokens));
  for (const RowGroup& g : args.rows.groups) {
    check_group(g, args.rows.rows(), cache.pages());
    const int64_t first = g.first_position / args.tokens, last = (g.first_position + g.rows) / args.tokens;
    pool_->parallel_for(last - first, 64, [&](int64_t begin, int64_t end, int) {
      std::vector<float> cosines(static_cast<size_t>(pairs)), sines(static_cast<size_t>(pairs));
      for (int64_t window = first + begin; window < first + end; ++window) {
        const float* rows[kPageTokens];
        for (int64_t t = 0; t < args.tokens; ++t) rows[t] = cache.row(args.from, g.pages, window * args.tokens + t);
        float* out = cache.row(args.into, g.pages, window * args.tokens);
        kernels_->weighted_sum(rows, share.data(), args.tokens, width, out);
        kernels_->rms_norm(out, 1, width, norm, args.eps, out);
        for (int64_t i = 0; i < pairs; ++i) {
          double sine, cosine;
          sincos64(static_cast<double>(window * args.tokens) * static_cast<double>(inv_freq[i]), &sine, &cosine);
          cosines[static_cast<size_t>(i)] = static_cast<float>(cosine);
          sines[static_cast<size_t>(i)] = static_cast<float>(sine);
        }
        kernels_->rope(out, 1, width, pairs, cosines.data(), sines.data());
      }
    });
  }
}

void CpuOps::select_windows(const RowCache& row_cache, const SelectWindowsArgs& args) {
  const CpuRowCache& cache = static_cast<const CpuRowCache&>(row_cache);
  kernel_check(args.layer >= 0 && args.layer < cache.layers() && cache.shape(args.layer).tokens == args.tokens &&
                   args.heads >= 1 && args.q.cols == args.heads * cache.shape(args.layer).width &&
                   args.out.rows == args.q.rows && args.out.cols >= 1,
               "select_windows: shapes differ");
  const int64_t width = cache.shape(args.layer).width, most = args.out.cols;
  for (const RowGroup& g : args.rows.groups) {
    check_group(g, args.q.rows, cache.pages());
    pool_->parallel_for(g.rows, 1, [&](int64_t begin, int64_t end, int) {
      std::vector<Candidate> scores;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t windows = (g.first_position + i + 1) / args.tokens, chosen = std::min(windows, most);
        const float* q = args.q.data + (g.first_row + i) * args.q.stride;
        float* out = args.out.data + (g.first_row + i) * args.out.stride;
        std::fill_n(out, most, -1.0f);
        if (windows <= most) {
          for (int64_t w = 0; w < windows; ++w) out[w] = static_cast<float>(w);
          continue;
        }
        scores.clear();
        for (int64_t w = 0; w < windows; ++w) {
          const float* key = cache.row(args.layer, g.pages, w * args.tokens);
          float sum = 0.0f;
          for (int64_t h = 0; h < args.heads; ++h) {
            const float product = kernels_->dot(q + h * width, key, width);
            sum += product < 0.0f ? 0.0f : product;
          }
          scores.push_back({sum * args.scale, static_cast<int32_t>(w)});
        }
        std::nth_element(scores.begin(), scores.begin() + chosen, scores.end(), candidate_before);
        std::sort(scores.begin(), scores.begin() + chosen,
                  [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
        for (int64_t w = 0; w < chosen; ++w) out[w] = static_cast<float>(scores[static_cast<size_t>(w)].id);
      }
    });
  }
}

// One row's query heads that share a key/value head.
struct CpuOps::SparseItem {
  const RowGroup* group = nullptr;
  int64_t row = 0;  // of the pass
  int64_t position = 0;
  int64_t first_head = 0;
  int64_t heads = 0;
  std::span<const int32_t> chosen;  // positions, ascending; empty: all up to the row's own
};

void CpuOps::attend_chosen(const CpuKvCache& cache, int64_t layer, const AttentionArgs& args, const SparseItem& item,
                           float* gathered, float* states) {
  const int64_t dim = args.head_dim, stride = cache.value_stride(), block_floats = cache.block_floats();
  const int64_t head_offset = args.kv_head_of[static_cast<size_t>(item.first_head)] * cache.head_floats();
  AttentionItem t;
  t.block_floats = block_floats;
  t.head_dim = dim;
  t.value_stride = stride;
  t.scale = args.scale;
  std::vector<int32_t> pages;
  int64_t keys = item.position + 1;
  if (item.chosen.empty()) {
    t.kv = cache.layer(layer);
    t.pages = item.group->pages.data();
    t.page_stride = cache.page_floats();
    t.head_offset = head_offset;
  } else {
    keys = static_cast<int64_t>(item.chosen.size());
    for (int64_t i = 0; i < keys; ++i) {
      const int64_t position = item.chosen[static_cast<size_t>(i)];
      const float* from = cache.layer(layer) +
                          item.group->pages[static_cast<size_t>(position / kPageTokens)] * cache.page_floats() +
                          head_offset + position % kPageTokens / kKeyBlock * block_floats;
      float* to = gathered + i / kKeyBlock * block_floats;
      const int64_t from_lane = position % kKeyBlock, lane = i % kKeyBlock;
      for (int64_t d = 0; d < dim; ++d) to[d * kKeyBlock + lane] = from[d * kKeyBlock + from_lane];
      std::memcpy(to + kKeyBlock * dim + lane * stride, from + kKeyBlock * dim + from_lane * stride,
                  static_cast<size_t>(stride) * sizeof(float));
    }
    pages.resize(static_cast<size_t>((keys + kPageTokens - 1) / kPageTokens));
    std::iota(pages.begin(), pages.end(), 0);
    t.kv = gathered;
    t.pages = pages.data();
    t.page_stride = cache.head_floats();
  }
  for (int64_t j = 0; j < item.heads; ++j, ++t.queries) {
    t.q[t.queries] = args.q.data + item.row * args.q.stride + (item.first_head + j) * dim;
    t.keys[t.queries] = keys;
  }
  AttentionState state[2];
  for (int which = 0; which < 2; ++which) {
    float* memory = states + which * (2 * kMaxQueries + kMaxQueries * stride);
    state[which].max = memory;
    state[which].sum = memory + kMaxQueries;
    for (int i = 0; i < kMaxQueries; ++i) state[which].out[i] = memory + 2 * kMaxQueries + i * stride;
  }
  kernels_->attention_split(t, 0, state[0]);
  for (int64_t split = 1; split * kKeySplit < keys; ++split) {
    kernels_->attention_split(t, split, state[1]);
    for (int i = 0; i < t.queries; ++i) kernels_->attention_merge(t, i, state[0], state[1]);
  }
  for (int i = 0; i < t.queries; ++i) {
    kernels_->attention_finish(t, i, state[0],
                               args.out.data + item.row * args.out.stride + (item.first_head + i) * dim);
  }
}

void CpuOps::sparse_attention(const KvCache& kv_cache, int64_t layer, const AttentionArgs& args, Tensor selected,
                              int64_t tokens) {
  const CpuKvCache& cache = static_cast<const CpuKvCache&>(kv_cache);
  kernel_check(args.q.cols == args.heads * args.head_dim && args.out.cols == args.q.cols &&
                   args.head_dim == cache.head_dim() && static_cast<int64_t>(args.kv_head_of.size()) == args.heads &&
                   layer >= 0 && layer < cache.layers() && selected.rows == args.q.rows && tokens >= 1,
               "sparse_attention: shapes differ");
  std::vector<SparseItem> items;
  std::vector<std::vector<int32_t>> lists(static_cast<size_t>(args.q.rows));
  int64_t longest = 0;
  for (const RowGroup& g : args.rows.groups) {
    check_group(g, args.q.rows, cache.pages());
    for (int64_t i = 0; i < g.rows; ++i) {
      const int64_t row = g.first_row + i, position = g.first_position + i, windows = (position + 1) / tokens;
      const float* choice = selected.data + row * selected.stride;
      std::vector<int32_t>& list = lists[static_cast<size_t>(row)];
      int64_t count = 0;
      while (count < selected.cols && choice[count] >= 0.0f) ++count;
      kernel_check(count <= windows, "sparse_attention: a window that is not whole yet");
      for (int64_t w = 0; w < count && count < windows; ++w) {
        const int64_t first = static_cast<int64_t>(choice[w]) * tokens;
        kernel_check(first + tokens <= position + 1, "sparse_attention: a window that is not whole yet");
        for (int64_t t = 0; t < tokens; ++t) list.push_back(static_cast<int32_t>(first + t));
      }
      for (int64_t p = windows * tokens; p <= position && count < windows; ++p) list.push_back(static_cast<int32_t>(p));
      longest = std::max(longest, static_cast<int64_t>(list.size()));
      for (int64_t h = 0; h < args.heads;) {
        const int32_t kv_head = args.kv_head_of[static_cast<size_t>(h)];
        kernel_check(kv_head >= 0 && kv_head < cache.kv_heads(), "sparse_attention: no such key/value head");
        int64_t shared = 1;
        while (h + shared < args.heads && shared < kMaxQueries &&
               args.kv_head_of[static_cast<size_t>(h + shared)] == kv_head) {
          ++shared;
        }
        items.push_back({&g, row, position, h, shared, list});
        h += shared;
      }
    }
  }
  for (SparseItem& item : items) item.chosen = lists[static_cast<size_t>(item.row)];
  const ScratchScope scope(*this);
  const int64_t gathered_floats = (longest + kPageTokens - 1) / kPageTokens * cache.head_floats();
  const int64_t state_floats = 2 * (2 * kMaxQueries + kMaxQueries * cache.value_stride());
  float* gathered = pass_.take(std::max<int64_t>(gathered_floats, 16) * pool_->threads());
  float* states = pass_.take(state_floats * pool_->threads());
  pool_->parallel_for(static_cast<int64_t>(items.size()), 1, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t i = begin; i < end; ++i) {
      attend_chosen(cache, layer, args, items[static_cast<size_t>(i)], gathered + worker * gathered_floats,
                    states + worker * state_floats);
    }
  });
  if (args.gate.data != nullptr) sigmoid_mul(args.out, args.gate);
}

}  // namespace tensorfold
