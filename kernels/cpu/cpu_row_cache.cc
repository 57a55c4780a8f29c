// Paged rows of other things than keys and values.
#include <cstring>

#include "kernels/cpu/cpu_ops_impl.h"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

int64_t floats_of(std::span<const RowCacheLayer> layers, int64_t pages) {
  int64_t floats = 0;
  for (const RowCacheLayer& layer : layers) {
    kernel_check(layer.width > 0 && layer.tokens > 0 && kPageTokens % layer.tokens == 0,
                 "row cache: a row stands for a divisor of a page's tokens");
    floats += pages * (kPageTokens / layer.tokens) * layer.width;
  }
  return floats;
}

}  // namespace

CpuRowCache::CpuRowCache(std::span<const RowCacheLayer> layers, int64_t pages)
    : layers_(layers.begin(), layers.end()),
      pages_(pages),
      memory_(floats_of(layers, pages) * static_cast<int64_t>(sizeof(float))) {
  int64_t start = 0;
  for (int64_t i = 0; i < this->layers(); ++i) {
    starts_.push_back(start);
    start += pages * page_floats(i);
  }
}

int64_t CpuRowCache::page_bytes() const {
  int64_t floats = 0;
  for (int64_t i = 0; i < layers(); ++i) floats += page_floats(i);
  return floats * static_cast<int64_t>(sizeof(float));
}

void CpuRowCache::copy_page(int32_t from, int32_t to) {
  for (int64_t i = 0; i < layers(); ++i) {
    float* base = memory_.floats() + starts_[static_cast<size_t>(i)];
    std::memcpy(base + to * page_floats(i), base + from * page_floats(i),
                static_cast<size_t>(page_floats(i)) * sizeof(float));
  }
}

void CpuRowCache::save_page(int32_t page, std::span<std::byte> into) const {
  kernel_check(static_cast<int64_t>(into.size()) == page_bytes(), "row cache: save into another size");
  std::byte* to = into.data();
  for (int64_t i = 0; i < layers(); ++i) {
    const size_t bytes = static_cast<size_t>(page_floats(i)) * sizeof(float);
    std::memcpy(to, memory_.floats() + starts_[static_cast<size_t>(i)] + page * page_floats(i), bytes);
    to += bytes;
  }
}

void CpuRowCache::load_page(int32_t page, std::span<const std::byte> from) {
  kernel_check(static_cast<int64_t>(from.size()) == page_bytes(), "row cache: load of another size");
  const std::byte* at = from.data();
  for (int64_t i = 0; i < layers(); ++i) {
    const size_t bytes = static_cast<size_t>(page_floats(i)) * sizeof(float);
    std::memcpy(memory_.floats() + starts_[static_cast<size_t>(i)] + page * page_floats(i), at, bytes);
    at += bytes;
  }
}

std::unique_ptr<RowCache> CpuOps::make_row_cache(std::span<const RowCacheLayer> layers, int64_t pages) {
  return std::make_unique<CpuRowCache>(layers, pages);
}

void CpuOps::row_write(RowCache& row_cache, int64_t layer, Tensor values, const RowBatch& rows) {
  CpuRowCache& cache = static_cast<CpuRowCache&>(row_cache);
  kernel_check(layer >= 0 && layer < cache.layers(), "row_write: no such layer");
  kernel_check(cache.shape(layer).tokens == 1 && values.cols == cache.shape(layer).width, "row_write: shapes differ");
  for (const RowGroup& g : rows.groups) {
    check_group(g, values.rows, cache.pages());
    for (int64_t i = 0; i < g.rows; ++i) {
      std::memcpy(cache.row(layer, g.pages, g.first_position + i), values.data + (g.first_row + i) * values.stride,
                  static_cast<size_t>(values.cols) * sizeof(float));
    }
  }
}

}  // namespace tensorfold
