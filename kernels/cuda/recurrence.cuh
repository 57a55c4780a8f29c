// What the kernels of recurrent layers (the gated delta net, Mamba2) share: how a warp's lanes share columns of a
// state, sums over them, which step a slot is, and copies into shared memory that nobody waits for.
#pragma once

#include "kernels/cuda/recurrence_layout.h"

namespace tensorfold {

__device__ __forceinline__ float4 load_four(const float* from) { return *reinterpret_cast<const float4*>(from); }

template <int Bytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(global) : "memory");
  }
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void copies_wait_all_but_one() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

/// Group of rows and step of a slot: rows of the pass first, then those that groups replay, `window` a group.
struct RecurrentSlot {
  int g = -1;
  int i = 0;
};
/// False for padding and for slots of replayed rows that are not in use.
template <class Params>
__device__ __forceinline__ bool find_slot(const Params& p, int64_t slot, RecurrentSlot* at) {
  if (slot < p.rows) {
    at->g = p.group_of[slot];
    if (at->g < 0) return false;
    const DeviceGroup& group = p.groups[at->g];
    at->i = group.accepted + static_cast<int>(slot) - group.first_row;
    return true;
  }
  const int replay = static_cast<int>(slot - p.rows);
  at->g = replay / p.window;
  at->i = replay % p.window;
  return at->g < *p.group_count && at->i < p.groups[at->g].accepted;
}

/// Lanes are added by a butterfly over 16, 8, 4, 2, 1; all get the sum.
__device__ __forceinline__ float sum_over_lanes(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, d));
  return x;
}
/// A column's segments are added by a butterfly over 4, 2, 1; all its lanes get the sum.
__device__ __forceinline__ float sum_over_segments(float sum) {
  sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 8));
  sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 4));
  return __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
}

__device__ __forceinline__ float add_squares(float4 x, float sum) {
  sum = __fmaf_rn(x.x, x.x, sum);
  sum = __fmaf_rn(x.y, x.y, sum);
  sum = __fmaf_rn(x.z, x.z, sum);
  return __fmaf_rn(x.w, x.w, sum);
}

/// One channel's convolution of 4 taps, oldest first.
__device__ __forceinline__ float four_taps(float4 w, float x0, float x1, float x2, float x3) {
  return __fmaf_rn(w.w, x3, __fmaf_rn(w.z, x2, __fmaf_rn(w.y, x1, __fmul_rn(w.x, x0))));
}

}  // namespace tensorfold
