#include "kernels/cuda/matmul_launch.cuh"

namespace tensorfold {
namespace {

template <int kSets>
bool launch(MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream) {
  constexpr CudaWeightKind kKind = CudaWeightKind::kAffine8;
  if (const std::optional<bool> ok = launch_stream_rows<kKind, kSets>(args, gpu, stream)) return *ok;
  if (args.rows <= 8) {
    if (few_blocks(args, gpu, 3)) return launch_skinny<kKind, kSets, 1, 1, 8, 4, 3>(args, stream);
    return launch_skinny<kKind, kSets, 1, 1, 4, (kSets == 1 ? 4 : 2), 5>(args, stream);
  }
  if (args.rows <= 32) return launch_skinny<kKind, kSets, 4, 2, 3, 2, 2>(args, stream);
  if (args.rows <= kSkinnyRows) return launch_low_tiles<kKind, kSets>(args, gpu, stream);
  return launch_tiles<kKind, kSets>(args, gpu, stream);
}

}  // namespace

bool launch_matmul_affine8(MatmulArgs& args, int sets, const GpuFacts& gpu, cudaStream_t stream) {
  return sets == 1 ? launch<1>(args, gpu, stream) : launch<2>(args, gpu, stream);
}

}  // namespace tensorfold
