// Measures what this GPU can do, as the limits that kernels are held against in the same run.
//
// Read bandwidth: all SMs sum a buffer far larger than the L2 cache with 16-byte loads. Matrix rate: chains of
// mma.sync.m16n8k16 (bf16 in, fp32 out) on registers alone, with random non-zero operands, since a GPU's clock depends
// on what it multiplies. Node: the time that an empty kernel adds to a chain in a CUDA graph. Probes take turns and the
// best turn of each counts.
#pragma once

namespace tensorfold {

struct CudaLimits {
  double bandwidth = 0;     // bytes a second
  double mma_rate = 0;      // floating-point operations a second; a multiplication and its addition are two
  double node_seconds = 0;  // a kernel in a graph, launched one after another as kernels of the backend are
};

/// Takes turns for about `seconds`, at least three of each, on the current device. Holds up to 2 GB of device memory
/// meanwhile. All zeros with cuda_failure() set if something fails.
CudaLimits measure_cuda_limits(double seconds);

}  // namespace tensorfold
