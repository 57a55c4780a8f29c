// Residuals of several streams; pooled rows, their choice, and attention over lists of cached rows. What is computed
// together is decided here; the order of arithmetic is the kernels' (impl_latent.h, weighted_sum). Plain loops here use
// + - * / alone, no fma: the same bits on every machine.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/numerics/check.h"
#include "kernels/numerics/math64.h"
#include "kernels/ops/block_ops.h"
#include "kernels/ops/latent_ops.h"

namespace tensorfold {
namespace {

const float* values_of(const Vector* vector) {
  return vector == nullptr ? nullptr : static_cast<const CpuVector*>(vector)->data();
}

// The last 2 * pairs of `dim` values, pairs (2 i, 2 i + 1).
void rotate_pairs(float* x, int64_t dim, int64_t pairs, const float* cos, const float* sin, bool back) {
  float* at = x + dim - 2 * pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = at[2 * i], b = at[2 * i + 1], s = back ? -sin[i] : sin[i];
    at[2 * i] = a * cos[i] - b * s;
    at[2 * i + 1] = b * cos[i] + a * s;
  }
}

}  // namespace

void CpuOps::layer_norm(Tensor x, const Vector& weight, const Vector& bias, float eps, Tensor out) {
  kernel_check(weight.size() == x.cols && bias.size() == x.cols && out.cols == x.cols && out.rows == x.rows,
               "layer_norm: shapes differ");
  pool_->parallel_for(x.rows, std::max<int64_t>(1, kPieceElements / x.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      kernels_->layer_norm(x.data + r * x.stride, x.cols, values_of(&weight), values_of(&bias), eps,
                           out.data + r * out.stride);
    }
  });
}

void CpuOps::silu_mul_limited(Tensor gate_up, float limit, Tensor out) {
  kernel_check(gate_up.cols == 2 * out.cols && gate_up.rows == out.rows && limit > 0.0f,
               "silu_mul_limited: shapes differ");
  for_columns(out.rows, out.cols, 8, [&](int64_t r, int64_t first, int64_t n) {
    const float* gate = gate_up.data + r * gate_up.stride + first;
    kernels_->silu_mul_limited(gate, gate + out.cols, limit, out.data + r * out.stride + first, n);
  });
}

void CpuOps::rope_pairs(Tensor x, int64_t heads, int64_t head_dim, const RopeTable& table, bool back) {
  const int64_t pairs = table.cos.cols;
  kernel_check(x.cols == heads * head_dim && 2 * pairs <= head_dim && table.cos.rows == x.rows,
               "rope_pairs: shapes differ");
  pool_->parallel_for(x.rows, std::max<int64_t>(1, kPieceElements / x.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t h = 0; h < heads; ++h) {
        rotate_pairs(x.data + r * x.stride + h * head_dim, head_dim, pairs, table.cos.data + r * table.cos.stride,
                     table.sin.data + r * table.sin.stride, back);
      }
    }
  });
}

// --- Streams ------------------------------------------------------------------------------------------------------

namespace {

// C [n, n] from its logits: rows of softmax, then rows and columns in turn towards sums of 1.
void balance(const KernelTable& kernels, const float* logits, int64_t n, float eps, int64_t iterations, float* c) {
  for (int64_t j = 0; j < n; ++j) {
    kernels.softmax(logits + j * n, n, c + j * n);
    for (int64_t k = 0; k < n; ++k) c[j * n + k] += eps;
  }
  const auto scale = [&](int64_t along, int64_t across) {  // each line of n values `along` apart over its sum
    for (int64_t line = 0; line < n; ++line) {
      float* at = c + line * across;
      float sum = at[0];
      for (int64_t i = 1; i < n; ++i) sum += at[i * along];
      for (int64_t i = 0; i < n; ++i) at[i * along] /= sum + eps;
    }
  };
  scale(n, 1);
  for (int64_t i = 1; i < iterations; ++i) {
    scale(1, n);
    scale(n, 1);
  }
}

}  // namespace

void CpuOps::hyper_collapse(const HyperArgs& args) {
  const int64_t n = args.count, width = args.out.cols, rows = args.out.rows;
  const bool carries = args.carried.data != nullptr;
  const bool unmixed = args.mix.data == nullptr, whole = !unmixed && args.mix.cols == n * (2 + n);
  kernel_check(n >= 1 && n <= kMostStreams && args.streams.cols == n * width && args.streams.rows == rows,
               "hyper_collapse: shapes differ");
  kernel_check(unmixed || ((whole || args.mix.cols == n) && args.mix.rows == rows &&
                           args.base->size() == args.mix.cols && args.scale->size() == (whole ? 3 : 1)),
               "hyper_collapse: shapes differ");
  kernel_check(!whole || (args.weights.cols == n * (1 + n) && args.weights.rows == rows),
               "hyper_collapse: shapes differ");
  kernel_check((args.zero.data == nullptr || (args.zero.rows == rows && args.zero.cols == width)) &&
                   (!carries || (args.carried.rows == rows && args.carried.cols == n)),
               "hyper_collapse: shapes differ");
  const float *scale = values_of(args.scale), *base = values_of(args.base);
  pool_->parallel_for(rows, std::max<int64_t>(1, kPieceElements / (n * width)), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float pre[kMostStreams], logits[kMostStreams * (2 + kMostStreams)];
      if (unmixed) std::fill_n(pre, n, 1.0f / static_cast<float>(n));
      for (int64_t i = 0; !unmixed && i < args.mix.cols; ++i) {
        logits[i] = args.mix.data[r * args.mix.stride + i] * scale[std::min<int64_t>(i / n, 2)] + base[i];
      }
      if (!unmixed) {
        kernels_->sigmoid(logits, pre, n);
        for (int64_t s = 0; s < n; ++s) pre[s] += args.eps;
      }
      if (whole) {
        float* post = args.weights.data + r * args.weights.stride;
        kernels_->sigmoid(logits + n, post, n);
        for (int64_t s = 0; s < n; ++s) post[s] *= 2.0f;
        balance(*kernels_, logits + 2 * n, n, args.eps, args.iterations, post + n);
      }
      if (carries) {
        float* carried = args.carried.data + r * args.carried.stride;
        if (unmixed)
          std::copy_n(carried, n, pre);
        else
          std::swap_ranges(pre, pre + n, carried);
      }
      const float* streams[kMostStreams];
      for (int64_t s = 0; s < n; ++s) streams[s] = args.streams.data + r * args.streams.stride + s * width;
      kernels_->weighted_sum(streams, pre, n, width, args.out.data + r * args.out.stride);
      if (args.zero.data != nullptr) std::fill_n(args.zero.data + r * args.zero.stride, width, 0.0f);
    }
  });
}

void CpuOps::hyper_expand(const HyperArgs& args) {
  const int64_t n = args.count, width = args.y.cols, rows = args.y.rows;
  kernel_check(n >= 1 && n <= kMostStreams && args.streams.cols == n * width && args.streams.rows == rows &&
                   args.weights.cols == n * (1 + n) && args.weights.rows == rows,
               "hyper_expand: shapes differ");
  constexpr int64_t kColumns = 256;  // the new streams' columns wait here until the old ones have been read
  const int64_t across = (width + kColumns - 1) / kColumns;
  pool_->parallel_for(rows * across, std::max<int64_t>(1, kPieceElements / (n * n * kColumns)),
                      [&](int64_t begin, int64_t end, int) {
                        float mixed[kMostStreams * kColumns];
                        for (int64_t item = begin; item < end; ++item) {
                          const int64_t r = item / across, first = item % across * kColumns;
                          const int64_t columns = std::min(kColumns, width - first);
                          const float* post = args.weights.data + r * args.weights.stride;
                          float* streams = args.streams.data + r * args.streams.stride + first;
                          const float* from[1 + kMostStreams] = {args.y.data + r * args.y.stride + first};
                          for (int64_t j = 0; j < n; ++j) from[1 + j] = streams + j * width;
                          for (int64_t k = 0; k < n; ++k) {
                            float weights[1 + kMostStreams] = {post[k]};
                            for (int64_t j = 0; j < n; ++j) weights[1 + j] = post[n + j * n + k];
                            kernels_->weighted_sum(from, weights, 1 + n, columns, mixed + k * kColumns);
                          }
                          for (int64_t k = 0; k < n; ++k)
                            std::copy_n(mixed + k * kColumns, columns, streams + k * width);
                        }
                      });
}

// --- Pooled rows --------------------------------------------------------------------------------------------------

void CpuOps::pool_rows(RowCache& row_cache, const PoolArgs& args) {
  CpuRowCache& cache = static_cast<CpuRowCache&>(row_cache);
  kernel_check(args.from >= 0 && args.from < cache.layers() && args.into >= 0 && args.into < cache.layers(),
               "pool_rows: no such layer");
  const RowCacheLayer &from = cache.shape(args.from), &into = cache.shape(args.into);
  const int64_t tokens = args.tokens, width = into.width, half = from.width / 2;
  const int64_t pairs = args.inv_freq == nullptr ? 0 : args.inv_freq->size();
  kernel_check(from.tokens == 1 && half == width * (args.overlap ? 2 : 1) && tokens >= into.tokens &&
                   tokens % into.tokens == 0 && args.bias->size() == tokens * half && 2 * pairs <= width &&
                   (args.norm == nullptr || args.norm->size() == width),
               "pool_rows: shapes differ");
  struct Window {
    const RowGroup* group;
    int64_t index;
  };
  std::vector<Window> windows;
  for (const RowGroup& g : args.rows.groups) {
    check_group(g, g.first_row + g.rows, cache.pages());
    for (int64_t w = g.first_position / tokens; (w + 1) * tokens <= g.first_position + g.rows; ++w) {
      windows.push_back({&g, w});
    }
  }
  const float *bias = values_of(args.bias), *norm = values_of(args.norm), *inv_freq = values_of(args.inv_freq);
  const int64_t most = tokens * (args.overlap ? 2 : 1), threads = pool_->threads();
  const ScratchScope scope(*this);
  float* logits = pass_.take(threads * most * width);
  pool_->parallel_for(static_cast<int64_t>(windows.size()), 1, [&](int64_t begin, int64_t end, int worker) {
    std::vector<const float*> keys, gates, biases;
    std::vector<float> cos(static_cast<size_t>(pairs)), sin(static_cast<size_t>(pairs));
    for (int64_t i = begin; i < end; ++i) {
      const Window& window = windows[static_cast<size_t>(i)];
      keys.clear(), gates.clear(), biases.clear();
      const auto add = [&](int64_t w, int64_t offset) {
        for (int64_t j = 0; j < tokens; ++j) {
          const float* row = cache.row(args.from, window.group->pages, w * tokens + j);
          keys.push_back(row + offset);
          gates.push_back(row + half + offset);
          biases.push_back(bias + j * half + offset);
        }
      };
      if (args.overlap && window.index > 0) add(window.index - 1, 0);
      add(window.index, args.overlap ? width : 0);
      float* out = cache.row(args.into, window.group->pages, (window.index + 1) * tokens - 1);
      kernels_->pool(keys.data(), gates.data(), biases.data(), static_cast<int64_t>(keys.size()), width,
                     logits + worker * most * width, out);
      if (norm != nullptr) kernels_->rms_norm(out, 1, width, norm, args.eps, out);
      for (int64_t p = 0; p < pairs; ++p) {
        double sine, cosine;
        sincos64(static_cast<double>(window.index * tokens) * static_cast<double>(inv_freq[p]), &sine, &cosine);
        cos[static_cast<size_t>(p)] = static_cast<float>(cosine);
        sin[static_cast<size_t>(p)] = static_cast<float>(sine);
      }
      rotate_pairs(out, width, pairs, cos.data(), sin.data(), false);
    }
  });
}

namespace {

// The `most` first of `order` (at least as many), by number.
void keep_best(std::vector<Candidate>& order, int64_t most) {
  std::nth_element(order.begin(), order.begin() + most - 1, order.end(), candidate_before);
  order.resize(static_cast<size_t>(most));
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
}

// Up to `most` of `order`, which ascends by number, then -1.
void list_best(std::vector<Candidate>& order, float* out, int64_t most) {
  if (static_cast<int64_t>(order.size()) > most) keep_best(order, most);
  for (int64_t j = 0; j < most; ++j) {
    const bool listed = j < static_cast<int64_t>(order.size());
    out[j] = listed ? static_cast<float>(order[static_cast<size_t>(j)].id) : -1.0f;
  }
}

// Blocks of `block` windows, the newest before all others.
void best_blocks(const std::vector<Candidate>& windows, int64_t block, float* out, int64_t most) {
  std::vector<Candidate> blocks;
  for (const Candidate& window : windows) {
    const auto id = static_cast<int32_t>(window.id / block);
    if (blocks.empty() || blocks.back().id != id) {
      blocks.push_back({window.logit, id});
    } else if (candidate_before({window.logit, id}, blocks.back())) {
      blocks.back().logit = window.logit;
    }
  }
  if (!blocks.empty()) blocks.back().logit = std::numeric_limits<float>::infinity();
  list_best(blocks, out, most);
}

}  // namespace

void CpuOps::select_rows(const RowCache& row_cache, const SelectArgs& args) {
  const CpuRowCache& cache = static_cast<const CpuRowCache&>(row_cache);
  kernel_check(args.layer >= 0 && args.layer < cache.layers() && args.heads >= 1 && args.tokens >= 1,
               "select_rows: no such layer");
  const int64_t width = cache.shape(args.layer).width, most = args.out.cols, tokens = args.tokens;
  kernel_check(args.q.cols == args.heads * width && args.weights.cols == args.heads &&
                   args.q.rows == args.weights.rows && args.out.rows == args.q.rows && most >= 1,
               "select_rows: shapes differ");
  const bool within = args.candidates.data != nullptr, blocks = args.blocks_out.data != nullptr;
  kernel_check((!within || args.candidates.rows == args.q.rows) && (!blocks || args.blocks_out.rows == args.q.rows) &&
                   (!(within || blocks) || args.block >= 1),
               "select_rows: shapes differ");
  for (const RowGroup& g : args.rows.groups) {
    check_group(g, args.q.rows, cache.pages());
    pool_->parallel_for(g.rows, 1, [&](int64_t begin, int64_t end, int) {
      std::vector<Candidate> order;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t r = g.first_row + i, windows = (g.first_position + i + 1) / tokens;
        float* out = args.out.data + r * args.out.stride;
        float* block_list = args.blocks_out.data + r * args.blocks_out.stride;
        // All of them, whatever their scores. (Fewer windows than that may still be more blocks than are listed.)
        const bool all =
            windows <= most && (!blocks || (windows + args.block - 1) / args.block <= args.blocks_out.cols);
        order.clear();
        const auto visit = [&](int64_t first, int64_t last) {
          for (int64_t w = first; w < std::min(last, windows); ++w) {
            const float score =
                all ? 0.0f
                    : kernels_->index_score(args.q.data + r * args.q.stride, args.heads, width,
                                            cache.row(args.layer, g.pages, (w + 1) * tokens - 1),
                                            args.weights.data + r * args.weights.stride, args.scale, args.weight_scale);
            order.push_back({score, static_cast<int32_t>(w)});
          }
        };
        if (within) {
          const float* list = args.candidates.data + r * args.candidates.stride;
          for (int64_t j = 0; j < args.candidates.cols && list[j] >= 0.0f; ++j) {
            const auto first = static_cast<int64_t>(list[j]) * args.block;
            visit(first, first + args.block);
          }
        } else {
          visit(0, windows);
        }
        if (blocks) best_blocks(order, args.block, block_list, args.blocks_out.cols);
        list_best(order, out, most);
      }
    });
  }
}

// --- Attention over a list ----------------------------------------------------------------------------------------

namespace {

// The rows that the pass' row `r` at `position` attends to.
void list_rows(const CpuRowCache& cache, const LatentAttentionArgs& args, const RowGroup& g, int64_t r,
               int64_t position, std::vector<const float*>* list) {
  list->clear();
  const int64_t windows = (position + 1) / args.tokens;
  const auto token = [&](int64_t p) { list->push_back(cache.row(args.layer, g.pages, p)); };
  if (args.block.data != nullptr) {
    const int64_t first = args.window > 0 ? std::max<int64_t>(0, g.first_position - args.window) : 0;
    for (int64_t p = first; p < g.first_position; ++p) token(p);
    for (int64_t i = 0; i < g.rows; ++i) list->push_back(args.block.data + (g.first_row + i) * args.block.stride);
    return;
  }
  const auto each_selected = [&](const auto& body) {
    const float* selected = args.selected.data + r * args.selected.stride;
    for (int64_t i = 0; i < args.selected.cols && selected[i] >= 0.0f; ++i) body(static_cast<int64_t>(selected[i]));
  };
  if (args.window == 0) {
    int64_t tail = 0;
    if (args.selected.data != nullptr) {
      each_selected([&](int64_t w) {
        for (int64_t p = w * args.tokens; p < (w + 1) * args.tokens; ++p) token(p);
      });
      tail = windows * args.tokens;
    }
    for (int64_t p = tail; p <= position; ++p) token(p);
    return;
  }
  const auto pooled = [&](int64_t w) { list->push_back(cache.row(args.pooled, g.pages, (w + 1) * args.tokens - 1)); };
  if (args.pooled >= 0 && args.selected.data != nullptr) each_selected(pooled);
  for (int64_t w = 0; args.pooled >= 0 && args.selected.data == nullptr && w < windows; ++w) pooled(w);
  for (int64_t p = std::max<int64_t>(0, position + 1 - args.window); p <= position; ++p) token(p);
}

}  // namespace

// Up to kLatentHeads heads of one row: splits of the list, merged in ascending order, then the sinks.
void CpuOps::latent_item(const LatentAttentionArgs& args, int64_t r, int64_t first_head, int heads,
                         const std::vector<const float*>& list, float* memory) {
  const int64_t width = args.q.cols / args.heads, keys = static_cast<int64_t>(list.size());
  float max[kLatentHeads], sum[kLatentHeads], next_max[kLatentHeads], next_sum[kLatentHeads];
  const float* q[kLatentHeads];
  float *out[kLatentHeads], *next[kLatentHeads];
  for (int h = 0; h < heads; ++h) {
    q[h] = args.q.data + r * args.q.stride + (first_head + h) * width;
    out[h] = args.out.data + r * args.out.stride + (first_head + h) * width;
    next[h] = memory + kLatentHeads * kKeySplit + h * width;
  }
  const auto split = [&](int64_t first, float* m, float* s, float* const* o) {
    kernels_->latent_split(q, heads, list.data() + first, std::min(kKeySplit, keys - first), width, args.scale, memory,
                           m, s, o);
  };
  // x scaled by e^(its maximum - the greater one).
  const auto factors = [&](float a, float b, float* most, float* both) {
    *most = b > a ? b : a;
    const float shift[2] = {a - *most, b - *most};
    kernels_->exp(shift, both, 2);
  };
  split(0, max, sum, out);
  for (int64_t first = kKeySplit; first < keys; first += kKeySplit) {
    split(first, next_max, next_sum, next);
    for (int h = 0; h < heads; ++h) {
      float both[2];
      factors(max[h], next_max[h], &max[h], both);
      sum[h] = sum[h] * both[0] + next_sum[h] * both[1];
      for (int64_t d = 0; d < width; ++d) out[h][d] = out[h][d] * both[0] + next[h][d] * both[1];
    }
  }
  for (int h = 0; h < heads; ++h) {
    float total = sum[h], factor = 1.0f;
    if (args.sinks != nullptr) {
      float both[2];
      factors(max[h], values_of(args.sinks)[first_head + h], &max[h], both);
      factor = both[0];
      total = sum[h] * both[0] + both[1];
    }
    for (int64_t d = 0; d < width; ++d) out[h][d] = out[h][d] * factor / total;
  }
}

void CpuOps::latent_attention(const RowCache& row_cache, const LatentAttentionArgs& args) {
  const CpuRowCache& cache = static_cast<const CpuRowCache&>(row_cache);
  kernel_check(args.layer >= 0 && args.layer < cache.layers() && args.pooled < cache.layers() && args.heads >= 1,
               "latent_attention: no such layer");
  const int64_t width = cache.shape(args.layer).width;
  kernel_check(args.q.cols == args.heads * width && args.out.cols == args.q.cols && args.out.rows == args.q.rows &&
                   args.tokens >= 1 && args.window >= 0 && cache.shape(args.layer).tokens == 1 &&
                   (args.pooled < 0 || (args.window > 0 && cache.shape(args.pooled).width == width)) &&
                   (args.sinks == nullptr || args.sinks->size() == args.heads) &&
                   (args.selected.data == nullptr || args.selected.rows == args.q.rows),
               "latent_attention: shapes differ");
  const bool drafted = args.block.data != nullptr;
  kernel_check(!drafted || (args.block.rows == args.q.rows && args.block.cols == width &&
                            args.block.data != args.out.data && args.pooled < 0 && args.selected.data == nullptr),
               "latent_attention: a block has its own rows and those before it, nothing pooled or selected");
  struct Row {
    const RowGroup* group;
    int64_t row, position;
  };
  std::vector<Row> rows;
  for (const RowGroup& g : args.rows.groups) {
    if (drafted) {
      check_block(g, args.q.rows, cache.pages());
    } else {
      check_group(g, args.q.rows, cache.pages());
    }
    for (int64_t i = 0; i < g.rows; ++i) rows.push_back({&g, g.first_row + i, g.first_position + i});
  }
  const int64_t blocks = (args.heads + kLatentHeads - 1) / kLatentHeads;
  const int64_t memory_floats = kLatentHeads * (kKeySplit + round_up(width, 16));
  const ScratchScope scope(*this);
  float* memory = pass_.take(pool_->threads() * memory_floats);
  pool_->parallel_for(static_cast<int64_t>(rows.size()) * blocks, 1, [&](int64_t begin, int64_t end, int worker) {
    std::vector<const float*> list;
    int64_t listed = -1;
    for (int64_t item = begin; item < end; ++item) {
      const Row& row = rows[static_cast<size_t>(item / blocks)];
      if (listed != item / blocks) list_rows(cache, args, *row.group, row.row, row.position, &list);
      listed = item / blocks;
      const int64_t first = item % blocks * kLatentHeads;
      latent_item(args, row.row, first, static_cast<int>(std::min<int64_t>(kLatentHeads, args.heads - first)), list,
                  memory + worker * memory_floats);
    }
  });
}

}  // namespace tensorfold
