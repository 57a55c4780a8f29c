// The ways in which cuda_sum_norm and cuda_rms_norm can run. All give the same bits; tests and measurements choose, all
// else leaves it to kAuto.
#pragma once

#include "kernels/cuda/rowwise.h"

namespace tensorfold {

enum class NormPath : uint8_t {
  kAuto,
  kCluster,  // 8 blocks a row, one for each column part, which tell each other their sums (compute capability 9 and up)
  kBlock,    // one block a row
};

/// Rows from which one block a row is chosen: there are rows enough for all SMs then.
inline constexpr int64_t kNormBlockRows = 256;

/// True where the current device has thread block clusters.
bool norm_clusters_supported();

void cuda_rms_norm_by(NormPath path, cudaStream_t stream, DeviceMatrix x, int64_t heads, const float* weight, float eps,
                      DeviceMatrix out_f, DeviceInput out_b);
void cuda_sum_norm_by(NormPath path, cudaStream_t stream, const CudaTreeSum& sum, DeviceMatrix residual,
                      const float* weight, float eps, DeviceMatrix out_f, DeviceInput out_b);

}  // namespace tensorfold
