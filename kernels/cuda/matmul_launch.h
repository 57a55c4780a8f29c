// Between the entry points of matmul.h and the kernels: one launch function a weight kind, a file each.
#pragma once

#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/matmul_views.h"

namespace tensorfold {

/// What the choice of tiling reads. It changes speed, never bits.
struct GpuFacts {
  int multiprocessors = 0;
  int shared_bytes = 0;  // most that a block may have
};

/// Launches args.views (all of one kind and `sets`); fills in first_block. More than kSkinnyRows rows take the tiles.
bool launch_matmul_bf16(MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream);
bool launch_matmul_affine4(MatmulArgs& args, int sets, const GpuFacts& gpu, cudaStream_t stream);
bool launch_matmul_affine8(MatmulArgs& args, int sets, const GpuFacts& gpu, cudaStream_t stream);
bool launch_matmul_wide(CudaWeightKind kind, int sets, MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream);
/// kFp8 and kFp4.
bool launch_matmul_small_floats(CudaWeightKind kind, int sets, MatmulArgs& args, const GpuFacts& gpu,
                                cudaStream_t stream);

}  // namespace tensorfold
