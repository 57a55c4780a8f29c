// Latents that layers share: pooled inside a pass, rounded to small formats, written where a window ends; and the
// numbers of tokens before a row. Plain loops use + - * / alone, no fma: the same bits on every machine.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/numerics/check.h"
#include "kernels/ops/fake_quantise.h"
#include "kernels/ops/latent_ops.h"

namespace tensorfold {

void CpuOps::fake_quantise(Tensor x, FakeFormat format) {
  const int64_t group = fake_group(format);
  kernel_check(x.cols >= group && x.cols % group == 0, "fake_quantise: no whole number of groups");
  pool_->parallel_for(x.rows, std::max<int64_t>(1, kPieceElements / 8 / x.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < x.cols; c += group) fake_quantise_group(format, x.data + r * x.stride + c);
    }
  });
}

void CpuOps::pool_latents(const RowCache& row_cache, const PoolLatentsArgs& args) {
  const CpuRowCache& cache = static_cast<const CpuRowCache&>(row_cache);
  kernel_check(args.from >= 0 && args.from < cache.layers() && args.tokens >= 1, "pool_latents: no such layer");
  const RowCacheLayer& from = cache.shape(args.from);
  const int64_t width = args.out.cols, tokens = args.tokens;
  kernel_check(from.tokens == 1 && from.width == 2 * width, "pool_latents: shapes differ");
  const std::vector<float> no_bias(static_cast<size_t>(width), 0.0f);
  const ScratchScope scope(*this);
  float* logits = pass_.take(pool_->threads() * tokens * width);
  for (const RowGroup& g : args.rows.groups) {
    check_group(g, args.out.rows, cache.pages());
    pool_->parallel_for(g.rows, std::max<int64_t>(1, kPieceElements / 8 / width),
                        [&](int64_t begin, int64_t end, int worker) {
                          std::vector<const float*> keys, gates, biases(static_cast<size_t>(tokens), no_bias.data());
                          for (int64_t i = begin; i < end; ++i) {
                            const int64_t position = g.first_position + i;
                            float* out = args.out.data + (g.first_row + i) * args.out.stride;
                            if ((position + 1) % tokens != 0) {
                              std::fill_n(out, width, 0.0f);
                              continue;
                            }
                            keys.clear(), gates.clear();
                            for (int64_t p = position + 1 - tokens; p <= position; ++p) {
                              keys.push_back(cache.row(args.from, g.pages, p));
                              gates.push_back(keys.back() + width);
                            }
                            kernels_->pool(keys.data(), gates.data(), biases.data(), tokens, width,
                                           logits + worker * tokens * width, out);
                          }
                        });
  }
}

RopeTable CpuOps::window_rope_table(const RowBatch& rows, const Vector& inv_freq, int64_t tokens) {
  kernel_check(tokens >= 1, "window_rope_table: a window has a token");
  std::vector<int64_t> positions;
  for (const int64_t position : rows.positions) positions.push_back(position / tokens * tokens);
  RowBatch first;
  first.positions = positions;
  return rope_table(first, inv_freq, 1.0);
}

void CpuOps::write_windows(RowCache& row_cache, int64_t layer, Tensor values, const RowBatch& rows) {
  CpuRowCache& cache = static_cast<CpuRowCache&>(row_cache);
  kernel_check(layer >= 0 && layer < cache.layers(), "write_windows: no such layer");
  const int64_t tokens = cache.shape(layer).tokens;
  kernel_check(values.cols == cache.shape(layer).width, "write_windows: shapes differ");
  for (const RowGroup& g : rows.groups) {
    check_group(g, values.rows, cache.pages());
    for (int64_t i = 0; i < g.rows; ++i) {
      const int64_t position = g.first_position + i;
      if ((position + 1) % tokens != 0) continue;
      std::memcpy(cache.row(layer, g.pages, position), values.data + (g.first_row + i) * values.stride,
                  static_cast<size_t>(values.cols) * sizeof(float));
    }
  }
}

std::vector<int32_t> CpuOps::numbers_before(const RowCache& row_cache, int64_t layer, const RowBatch& rows,
                                            int64_t count) {
  const CpuRowCache& cache = static_cast<const CpuRowCache&>(row_cache);
  kernel_check(layer >= 0 && layer < cache.layers() && cache.shape(layer).width == 1 && cache.shape(layer).tokens == 1,
               "numbers_before: no such layer");
  std::vector<int32_t> out(static_cast<size_t>(rows.rows() * count), -1);
  for (const RowGroup& g : rows.groups) {
    check_group(g, rows.rows(), cache.pages());
    for (int64_t i = 0; i < g.rows; ++i) {
      for (int64_t back = 1; back <= count && back <= g.first_position + i; ++back) {
        const float number = *cache.row(layer, g.pages, g.first_position + i - back);
        out[static_cast<size_t>((g.first_row + i) * count + back - 1)] = static_cast<int32_t>(number);
      }
    }
  }
  return out;
}

}  // namespace tensorfold
