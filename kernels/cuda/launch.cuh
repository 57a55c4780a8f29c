// Launching with programmatic dependent launch: a kernel's blocks may come in while the kernel before it on the stream
// is still leaving, do what does not depend on it (reading weights), and then wait for it.
//
// The rule for every kernel of the backend: call pdl_launch() at the start and pdl_wait() before the first read of
// anything that an earlier kernel wrote and before the first write of anything at all. Every block of a grid must come
// to pdl_wait(): a grid that ends without it would let its successor pass its predecessor. After it, every earlier
// kernel of the stream has ended and its writes are visible.
//
// What no kernel writes may be read before: weights, and a pass's rows (DeviceRows), which a copy brings that comes
// between passes and that all kernels wait for. So may what earlier passes left, where this one does not write: states,
// keys and values before a group's first row (a page is shared only after the pass that filled it has been reported).
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/device.h"

namespace tensorfold {

/// Lets the next kernel's blocks start as soon as all blocks of this grid have come here or ended.
__device__ __forceinline__ void pdl_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the kernels before this one have ended, with all their writes.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// True where the current device overlaps dependent kernels; clusters and the copy engine came with it (compute
/// capability 9). Read once: the GPUs of a rank are of one kind.
inline bool pdl_supported() {
  static const bool supported = [] {
    int device = 0;
    int major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
  }();
  return supported;
}

/// Enqueues kernel(args...) in clusters of so many blocks along x (0: none); may be captured into a graph. `what` names
/// the launch in cuda_failure(). Kernels that want more than 48 KiB of dynamic shared memory must have been given leave
/// for it before (cudaFuncSetAttribute).
template <typename... Params, typename... Args>
bool launch_cluster_kernel(unsigned cluster, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                           cudaStream_t stream, const char* what, Args... args) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (pdl_supported()) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 0) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = cluster;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cuda_ok(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), what);
}

template <typename... Params, typename... Args>
bool launch_kernel(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   const char* what, Args... args) {
  return launch_cluster_kernel(0, kernel, grid, block, shared_bytes, stream, what, args...);
}

}  // namespace tensorfold
