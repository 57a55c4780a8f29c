// The paged cache as the kernels of this folder see it.
#pragma once

#include "kernels/cuda/attention.h"

namespace tensorfold {

/// Memory, for each layer, page and kv head: a block of keys, then a block of values, each [64 tokens][padded head_dim]
/// with the units of a row in the order of attention_layout.h. fp8: one byte a value, and a scale (fp32, a power of
/// two) for each token of each block. All zeros at first, and never anything but finite values: what a mask or a
/// zero-padded dimension multiplies by zero is zero.
class PagedKvCache final : public CudaKvCache {
 public:
  PagedKvCache(int64_t layers, int64_t pages, int64_t kv_heads, int64_t head_dim, CudaKvFormat format,
               cudaStream_t stream);
  ~PagedKvCache() override;
  PagedKvCache(const PagedKvCache&) = delete;
  PagedKvCache& operator=(const PagedKvCache&) = delete;
  /// False with cuda_failure() set if there is no memory.
  bool allocate();

  int64_t bytes() const override { return payload_bytes() + scale_floats() * static_cast<int64_t>(sizeof(float)); }
  int64_t page_bytes() const override { return bytes() / pages_; }
  void copy_page(int32_t from, int32_t to) override;
  void save_page(int32_t page, std::span<std::byte> into) const override;
  void load_page(int32_t page, std::span<const std::byte> from) override;
  int64_t layers() const override { return layers_; }
  int64_t pages() const override { return pages_; }
  int64_t kv_heads() const override { return kv_heads_; }
  int64_t head_dim() const override { return head_dim_; }

  bool fp8() const { return format_ == CudaKvFormat::kFp8; }
  int padded_dim() const { return padded_dim_; }
  char* layer_data(int64_t layer) const { return data_ + layer * (payload_bytes() / layers_); }
  /// Null for bf16.
  float* layer_scales(int64_t layer) const {
    return scales_ == nullptr ? nullptr : scales_ + layer * (scale_floats() / layers_);
  }

 private:
  int64_t page_payload() const { return payload_bytes() / layers_ / pages_; }  // bytes in one layer
  int64_t page_scales() const { return scale_floats() / layers_ / pages_ * 4; }
  int64_t blocks() const { return layers_ * pages_ * kv_heads_ * 2; }
  int64_t payload_bytes() const { return blocks() * kPageTokens * padded_dim_ * (fp8() ? 1 : 2); }
  int64_t scale_floats() const { return fp8() ? blocks() * kPageTokens : 0; }

  int64_t layers_;
  int64_t pages_;
  int64_t kv_heads_;
  int64_t head_dim_;
  int padded_dim_;
  CudaKvFormat format_;
  cudaStream_t stream_;
  char* data_ = nullptr;
  float* scales_ = nullptr;
};

}  // namespace tensorfold
