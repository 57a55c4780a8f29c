// Four (or one) fp32 columns of a row at a time, and the tree over slices on them. Used by the row-wise kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/rowwise.h"

namespace tensorfold {

/// W neighbouring columns of a thread: 4 in one 16-byte access, or 1 where an address or a width is not a multiple.
template <int W>
struct Lanes {
  float v[W];
};

template <int W>
__device__ __forceinline__ Lanes<W> load_lanes(const float* p) {
  Lanes<W> out;
  if constexpr (W == 4) {
    const float4 f = *reinterpret_cast<const float4*>(p);
    out.v[0] = f.x;
    out.v[1] = f.y;
    out.v[2] = f.z;
    out.v[3] = f.w;
  } else {
    out.v[0] = *p;
  }
  return out;
}

/// Bf16 values. Widening is exact; moving bits keeps NaNs as they are.
template <int W>
__device__ __forceinline__ Lanes<W> load_lanes(const __nv_bfloat16* p) {
  const auto widen = [](unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); };
  const unsigned short* from = reinterpret_cast<const unsigned short*>(p);
  Lanes<W> out;
  if constexpr (W == 4) {
    const ushort4 four = *reinterpret_cast<const ushort4*>(from);
    out.v[0] = widen(four.x);
    out.v[1] = widen(four.y);
    out.v[2] = widen(four.z);
    out.v[3] = widen(four.w);
  } else {
    out.v[0] = widen(*from);
  }
  return out;
}

/// Fp32 values, not moved behind later loads of its kind: the compiler would rather save registers than latency.
template <int W>
__device__ __forceinline__ Lanes<W> load_lanes_now(const float* p) {
  Lanes<W> out;
  if constexpr (W == 4) {
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(out.v[0]), "=f"(out.v[1]), "=f"(out.v[2]), "=f"(out.v[3])
                 : "l"(p)
                 : "memory");
  } else {
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(out.v[0]) : "l"(p) : "memory");
  }
  return out;
}

template <int W>
__device__ __forceinline__ void store_lanes(float* p, const Lanes<W>& x) {
  if constexpr (W == 4) {
    *reinterpret_cast<float4*>(p) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
  } else {
    *p = x.v[0];
  }
}

/// Rounds to bf16, nearest even.
template <int W>
__device__ __forceinline__ void store_lanes(__nv_bfloat16* p, const Lanes<W>& x) {
  if constexpr (W == 4) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(x.v[0], x.v[1]);
    const __nv_bfloat162 high = __floats2bfloat162_rn(x.v[2], x.v[3]);
    uint2 both;
    both.x = *reinterpret_cast<const unsigned*>(&low);
    both.y = *reinterpret_cast<const unsigned*>(&high);
    *reinterpret_cast<uint2*>(p) = both;
  } else {
    *p = __float2bfloat16_rn(x.v[0]);
  }
}

template <int W>
__device__ __forceinline__ Lanes<W> add_lanes(const Lanes<W>& a, const Lanes<W>& b) {
  Lanes<W> out;
#pragma unroll
  for (int i = 0; i < W; ++i) out.v[i] = __fadd_rn(a.v[i], b.v[i]);
  return out;
}

/// The balanced tree over kParts parts at element `offset` of each: all loads first, so that their latencies overlap.
template <int kParts, int W>
__device__ __forceinline__ Lanes<W> balanced_tree(const CudaTreeSum& sum, int64_t offset) {
  Lanes<W> part[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) part[i] = load_lanes_now<W>(sum.parts[i] + offset);
#pragma unroll
  for (int step = 1; step < kParts; step *= 2) {
#pragma unroll
    for (int i = 0; i < kParts; i += 2 * step) part[i] = add_lanes<W>(part[i], part[i + step]);
  }
  return part[0];
}

/// Any plan of additions. The parts live in local memory here (indices are not known to the compiler), which costs some
/// tens of cycles a step: worlds of 3, 5, 6 and 7 ranks only.
template <int W>
__device__ __forceinline__ void any_tree(const CudaTreeSum& sum, int64_t offset, Lanes<W> (&part)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i < sum.part_count) part[i] = load_lanes<W>(sum.parts[i] + offset);
  }
  for (int s = 0; s < sum.step_count; ++s) {
    part[sum.steps[s].dst] = add_lanes<W>(part[sum.steps[s].dst], part[sum.steps[s].src]);
  }
}

/// Stops the program if indices or counts of the plan are out of range.
void check_tree(const CudaTreeSum& sum);

inline bool aligned_to(const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }
/// Whether rows may be read or written 4 columns at a time; true for absent tensors.
inline bool by_fours(const DeviceMatrix& m) {
  return m.data == nullptr || (aligned_to(m.data, 16) && m.stride % 4 == 0);
}
inline bool by_fours(const DeviceInput& m) { return m.data == nullptr || (aligned_to(m.data, 8) && m.stride % 4 == 0); }
inline bool by_fours(const CudaTreeSum& sum) {
  bool all = sum.part_stride % 4 == 0;
  for (int i = 0; i < sum.part_count; ++i) all = all && aligned_to(sum.parts[i], 16);
  return all;
}

}  // namespace tensorfold
