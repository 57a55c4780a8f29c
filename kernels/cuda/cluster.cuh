// Blocks of a cluster that meet and write to each other's shared memory. Architectures below compute capability 9 have
// no clusters: there these do nothing, and no kernel is launched with any.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tensorfold {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// By all threads. Between arrive and wait of all blocks, what each wrote before is seen by all: a fence over all
/// stores, those to global memory too, which takes about a microsecond.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
/// The same without the fence: that all blocks run, have opened their inboxes, and have used what they had read.
__device__ __forceinline__ void cluster_arrive_unfenced() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

/// Where another block has what this one has at `shared` (a shared-memory address).
__device__ __forceinline__ uint32_t remote_address(uint32_t shared, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
  return remote;
}
/// To this place of another block; seen after the next meeting with a fence.
__device__ __forceinline__ void store_remote4(uint32_t shared, int rank, uint32_t v) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote_address(shared, rank)), "r"(v) : "memory");
}

/// An inbox is a barrier in shared memory that counts the bytes sent to it, so that nobody waits for a fence. Opened
/// once, by one thread, before the blocks meet: it is complete when `bytes` have come.
__device__ __forceinline__ void inbox_open(uint64_t* inbox, uint32_t bytes) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(inbox));
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// `value` to the place that `mine` is here, of the block `rank`, which may be this one.
__device__ __forceinline__ void inbox_send(uint64_t* inbox, const float* mine, int rank, float value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                   remote_address(static_cast<uint32_t>(__cvta_generic_to_shared(mine)), rank)),
               "r"(__float_as_uint(value)),
               "r"(remote_address(static_cast<uint32_t>(__cvta_generic_to_shared(inbox)), rank))
               : "memory");
}
__device__ __forceinline__ void inbox_wait(uint64_t* inbox) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(inbox)))
        : "memory");
  }
}
#else
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ void cluster_arrive_unfenced() {}
__device__ __forceinline__ void store_remote4(uint32_t /*shared*/, int /*rank*/, uint32_t /*v*/) {}
__device__ __forceinline__ void inbox_open(uint64_t* /*inbox*/, uint32_t /*bytes*/) {}
__device__ __forceinline__ void inbox_send(uint64_t* /*inbox*/, const float* /*mine*/, int /*rank*/, float /*value*/) {}
__device__ __forceinline__ void inbox_wait(uint64_t* /*inbox*/) {}
#endif

}  // namespace tensorfold
