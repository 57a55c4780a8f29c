#include "kernels/cuda/matmul_launch.cuh"

namespace tensorfold {
namespace {

template <int kSets>
bool launch(MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream) {
  constexpr CudaWeightKind kKind = CudaWeightKind::kAffine4;
  if (const std::optional<bool> ok = launch_stream_rows<kKind, kSets>(args, gpu, stream)) return *ok;
  if (args.rows <= 8) {
    if (few_blocks(args, gpu, 3)) return launch_skinny<kKind, kSets, 1, 1, 12, 4, 3>(args, stream);
    return launch_skinny<kKind, kSets, 1, 1, 6, 4, 5>(args, stream);
  }
  if (args.rows <= 32) return launch_skinny<kKind, kSets, 4, 2, (kSets == 1 ? 4 : 3), 2, 3>(args, stream);
  if (args.rows <= kSkinnyRows) return launch_low_tiles<kKind, kSets>(args, gpu, stream);
  return launch_tiles<kKind, kSets>(args, gpu, stream);
}

}  // namespace

bool launch_matmul_affine4(MatmulArgs& args, int sets, const GpuFacts& gpu, cudaStream_t stream) {
  return sets == 1 ? launch<1>(args, gpu, stream) : launch<2>(args, gpu, stream);
}

}  // namespace tensorfold
