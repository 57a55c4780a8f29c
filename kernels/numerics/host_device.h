// Functions that hosts and GPUs run alike, from one source: the same operations, so the same bits. A CUDA file that
// uses them for bits is compiled without contraction of products and sums (-fmad=false).
#pragma once

#include <bit>
#include <cstdint>

#ifdef __CUDACC__
#define TF_HOST_DEVICE __host__ __device__
#else
#define TF_HOST_DEVICE
#endif

namespace tensorfold {

TF_HOST_DEVICE inline uint64_t bits_of_double(double x) {
#ifdef __CUDA_ARCH__
  return static_cast<uint64_t>(__double_as_longlong(x));
#else
  return std::bit_cast<uint64_t>(x);
#endif
}

TF_HOST_DEVICE inline double double_of_bits(uint64_t bits) {
#ifdef __CUDA_ARCH__
  return __longlong_as_double(static_cast<long long>(bits));
#else
  return std::bit_cast<double>(bits);
#endif
}

/// Bits up to the highest that is set; 0 for 0.
TF_HOST_DEVICE inline int bit_width64(uint64_t x) {
#ifdef __CUDA_ARCH__
  return 64 - __clzll(static_cast<long long>(x));
#else
  return std::bit_width(x);
#endif
}

}  // namespace tensorfold
