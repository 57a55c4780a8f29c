// The PTX that the matrix products are made of, each instruction wrapped once.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace tensorfold {

/// Two bf16 values in a register, the lower one in the lower half.
using Bf16x2 = uint32_t;

inline constexpr Bf16x2 kBf16One = 0x3f803f80;

/// d += a b: a is 16 x 16 (row, k), b is 16 x 8 (k, column). Lane (g = lane / 4, t = lane % 4) holds
/// a[0] = rows g, k {2t, 2t+1}; a[1] = row g + 8, same k; a[2] = row g, k {2t+8, 2t+9}; a[3] = row g + 8, same k;
/// b0 = column g, k {2t, 2t+1}; b1 = column g, k {2t+8, 2t+9};
/// d[0], d[1] = row g, columns 2t, 2t+1; d[2], d[3] = row g + 8, same columns.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const Bf16x2 (&a)[4], Bf16x2 b0, Bf16x2 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// a * b + c in both halves, one rounding; subnormals are kept.
__device__ __forceinline__ Bf16x2 fma_bf16x2(Bf16x2 a, Bf16x2 b, Bf16x2 c) {
  Bf16x2 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

/// (a & b) | c in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

/// Weights: read once, so they pass by L1, and the next 256 bytes come to L2 with them. `v` stays as it is when
/// `present` is false (the address is not read). The predicate is inside so that the assembler has no branch to move
/// the load behind, and the path is not the read-only one, whose loads it moves across any fence.
__device__ __forceinline__ void load_stream16(uint4& v, const void* p, bool present) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(p), "r"(static_cast<int>(present))
               : "memory");
}
__device__ __forceinline__ void load_stream8(uint2& v, const void* p, bool present) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %3, 0; @p ld.global.L1::no_allocate.L2::256B.v2.u32 {%0,%1}, [%2];}"
               : "+r"(v.x), "+r"(v.y)
               : "l"(p), "r"(static_cast<int>(present))
               : "memory");
}

/// Activations: written by an earlier kernel, so never through the read-only path; L1 keeps them for the other warps.
__device__ __forceinline__ void load_rows16(uint4& v, const void* p, bool present) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(p), "r"(static_cast<int>(present))
               : "memory");
}

/// 16 bytes from global to shared memory, asynchronously; zeros when `present` is false (the address is not read).
__device__ __forceinline__ void copy_async16(uint32_t shared, const void* global, bool present) {
  const int bytes = present ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_async8(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}
/// Nothing at all when `wanted` is false.
__device__ __forceinline__ void copy_async16_if(uint32_t shared, const void* global, bool wanted) {
  asm volatile(
      "{.reg .pred p; setp.ne.s32 p, %2, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;}" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(wanted))
      : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ uint4 load_shared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared16(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint2 load_shared8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

}  // namespace tensorfold
