// What tests of attention over the paged cache share: rounding, what the cache keeps, the memory behind DeviceRows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cuda/kv_cache.h"
#include "tests/cuda/gpu.h"

namespace tensorfold {

inline float bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
inline float from_bits(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}

/// What the cache keeps of a vector of a head.
inline void keep(const float* x, int64_t dim, CudaKvFormat format, double* to) {
  float amax = 0.0f;
  for (int64_t i = 0; i < dim; ++i) amax = std::max(amax, std::fabs(x[i]));
  int e = amax > 0.0f ? std::max(-110, std::ilogb(amax) - 10) : -110;
  while (e < 119 && std::ldexp(amax, -e) > 448.0f) ++e;  // the smallest power of two that brings it into range
  for (int64_t i = 0; i < dim; ++i) {
    to[i] = format == CudaKvFormat::kBf16
                ? static_cast<double>(bf16(x[i]))
                : std::ldexp(static_cast<double>(static_cast<float>(__nv_fp8_e4m3(std::ldexp(x[i], -e)))), e);
  }
}

/// A pass's groups and rows; group_of is -1 for padding. `garbage` groups beyond the last must not be used.
struct PassGroups {
  std::vector<DeviceGroup> groups;
  std::vector<int32_t> pages, group_of;
  std::vector<int64_t> positions;  // may be empty
  int64_t garbage = 0;
};

/// Their device memory.
class PassMemory {
 public:
  explicit PassMemory(const PassGroups& all)
      : groups_(with_garbage(all)),
        pages_(all.pages),
        group_of_(all.group_of),
        count_(std::vector<int32_t>{static_cast<int32_t>(all.groups.size())}),
        positions_(all.positions) {}

  DeviceRows rows(int64_t max_keys) const {
    DeviceRows rows;
    rows.rows = static_cast<int32_t>(group_of_.size());
    rows.max_groups = static_cast<int32_t>(groups_.size());
    rows.max_keys = max_keys;
    rows.group_count = count_.data();
    if (positions_.size() > 0) rows.positions = positions_.data();
    rows.group_of = group_of_.data();
    rows.groups = groups_.data();
    rows.pages = pages_.data();
    return rows;
  }

 private:
  static std::vector<DeviceGroup> with_garbage(const PassGroups& all) {
    DeviceGroup garbage;
    garbage.rows = 1000;
    garbage.first_page = 1 << 28;
    std::vector<DeviceGroup> groups = all.groups;
    groups.insert(groups.end(), static_cast<size_t>(all.garbage), garbage);
    return groups;
  }

  DeviceArray<DeviceGroup> groups_;
  DeviceArray<int32_t> pages_, group_of_, count_;
  DeviceArray<int64_t> positions_;
};

}  // namespace tensorfold
