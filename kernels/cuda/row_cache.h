// Paged rows of other things than keys and values, in fp32: index keys and their means.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

/// One layer as kernels see it: the row of position p is at data + page * page_floats + p % kPageTokens / tokens *
/// width.
struct DeviceRowLayer {
  float* data = nullptr;
  int64_t page_floats = 0;
  int32_t width = 0;
  int32_t tokens = 1;
};

class CudaRowCache final : public RowCache {
 public:
  /// All zeros. Null with cuda_failure() set if the device has no memory left. `stream` orders copies of pages.
  static std::unique_ptr<CudaRowCache> create(std::span<const RowCacheLayer> layers, int64_t pages,
                                              cudaStream_t stream);
  ~CudaRowCache() override;
  CudaRowCache(const CudaRowCache&) = delete;
  CudaRowCache& operator=(const CudaRowCache&) = delete;

  int64_t bytes() const override { return page_bytes() * pages_; }
  int64_t page_bytes() const override;
  void copy_page(int32_t from, int32_t to) override;
  /// All layers of the page, one after another.
  void save_page(int32_t page, std::span<std::byte> into) const override;
  void load_page(int32_t page, std::span<const std::byte> from) override;

  int64_t layers() const { return static_cast<int64_t>(layers_.size()); }
  int64_t pages() const { return pages_; }
  /// Stops the program where there is no such layer.
  DeviceRowLayer layer(int64_t layer) const;

 private:
  CudaRowCache(std::span<const RowCacheLayer> layers, int64_t pages, cudaStream_t stream);
  int64_t page_floats(size_t layer) const { return kPageTokens / layers_[layer].tokens * layers_[layer].width; }
  float* page_data(size_t layer, int64_t page) const { return data_ + starts_[layer] + page * page_floats(layer); }

  std::vector<RowCacheLayer> layers_;
  std::vector<int64_t> starts_;  // floats before each layer
  int64_t pages_;
  cudaStream_t stream_;
  float* data_ = nullptr;
};

/// Ops::row_write. Rows of no group write nothing.
void cuda_row_write(cudaStream_t stream, DeviceRowLayer layer, const DeviceRows& rows, DeviceMatrix values);

/// Ops::pool_means; a warp a window. inv_freq [pairs].
struct CudaPoolMeans {
  DeviceRowLayer from;
  DeviceRowLayer into;
  const float* norm = nullptr;
  float eps = 0.0f;
  const float* inv_freq = nullptr;
  int64_t pairs = 0;
};
void cuda_pool_means(cudaStream_t stream, const DeviceRows& rows, const CudaPoolMeans& args);

}  // namespace tensorfold
