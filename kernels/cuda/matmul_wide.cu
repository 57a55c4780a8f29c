// Affine weights with scales of 2^-5 or more, which are rare: few configurations.
#include "kernels/cuda/matmul_launch.cuh"

namespace tensorfold {
namespace {

template <CudaWeightKind kKind, int kSets>
bool launch(MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream) {
  if (args.rows <= 8) return launch_skinny<kKind, kSets, 1, 1, 4, 2, 5>(args, stream);
  if (args.rows <= 16) return launch_skinny<kKind, kSets, 2, 1, 4, 2, 4>(args, stream);
  if (args.rows <= kSkinnyRows) return launch_skinny<kKind, kSets, 8, 2, 2, 2, 2>(args, stream);
  return launch_tile<kKind, kSets, TileShape<4, 2, 2, 8, 3, 1>>(args, gpu, stream);
}

}  // namespace

bool launch_matmul_wide(CudaWeightKind kind, int sets, MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream) {
  if (kind == CudaWeightKind::kAffine4Wide) {
    return sets == 1 ? launch<CudaWeightKind::kAffine4Wide, 1>(args, gpu, stream)
                     : launch<CudaWeightKind::kAffine4Wide, 2>(args, gpu, stream);
  }
  return sets == 1 ? launch<CudaWeightKind::kAffine8Wide, 1>(args, gpu, stream)
                   : launch<CudaWeightKind::kAffine8Wide, 2>(args, gpu, stream);
}

}  // namespace tensorfold
