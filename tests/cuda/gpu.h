// For tests that run kernels: skip by name without a GPU, device arrays that live for a scope, a stream.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "kernels/cuda/device.h"

namespace tensorfold {

inline bool have_gpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

/// First line of a test that needs a GPU.
#define TF_NEED_GPU() \
  if (!have_gpu()) GTEST_SKIP() << "no CUDA device on this machine"

/// `count` values in device memory; freed with the object.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    EXPECT_EQ(cudaMalloc(&data_, sizeof(T) * (count == 0 ? 1 : count)), cudaSuccess);
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { put(values); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  size_t size() const { return count_; }
  void put(const std::vector<T>& values) {
    ASSERT_EQ(values.size(), count_);
    ASSERT_EQ(cudaMemcpy(data_, values.data(), sizeof(T) * count_, cudaMemcpyHostToDevice), cudaSuccess);
  }
  /// Waits for the device first.
  std::vector<T> get() const {
    std::vector<T> values(count_);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, sizeof(T) * count_, cudaMemcpyDeviceToHost), cudaSuccess);
    return values;
  }
  /// Fills every byte, so that what a kernel forgets to write shows (0xff: NaN).
  void poison(int byte = 0xff) { ASSERT_EQ(cudaMemset(data_, byte, sizeof(T) * count_), cudaSuccess); }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

inline std::vector<float> random_floats(size_t count, uint32_t seed, float scale = 1.0f) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(engine);
  return values;
}

/// Equal bit for bit, NaNs included.
template <typename T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

}  // namespace tensorfold
