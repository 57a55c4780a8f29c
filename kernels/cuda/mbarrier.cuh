// Barriers in shared memory that copies arrive at, and the copies. Each instruction wrapped once.
#pragma once

#include <cstdint>

namespace tensorfold {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Makes the calling thread's barriers known to the bulk copies' side of the machine.
__device__ __forceinline__ void mbarrier_init_done() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// Waits for the end of the barrier's phase of this parity (the first phase is 0).
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  do {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#else
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#endif
  } while (done == 0);
}

/// True once the phase of this parity is over.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

/// One of the barrier's arrivals.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(barrier) : "memory");
}

/// One of the barrier's arrivals, made when the calling thread's cp.async copies so far have come.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/// True in one lane, the same one each time; all 32 must come here. Unlike `lane == 0` it tells the compiler that the
/// operands of a bulk copy are one lane's, which it then moves to uniform registers without a loop over lanes.
__device__ __forceinline__ bool elect_lane() {
  uint32_t elected = 0;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; @p mov.u32 %0, 1;}" : "+r"(elected));
  return elected != 0;
}
/// One of the barrier's arrivals; its phase ends when `bytes` have come too.
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Copies bytes that are expected.
__device__ __forceinline__ void copy_bulk_more(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}
/// Copies `bytes` (a multiple of 16, both addresses too) to shared memory; one arrival, made when they have come.
__device__ __forceinline__ void copy_bulk(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  mbarrier_expect(barrier, bytes);
  copy_bulk_more(shared, global, bytes, barrier);
}
#endif

}  // namespace tensorfold
