// FP8 and FP4 weights.
#include "kernels/cuda/matmul_launch.cuh"

namespace tensorfold {
namespace {

template <CudaWeightKind kKind, int kSets>
bool launch(MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream) {
  if (const std::optional<bool> ok = launch_stream_rows<kKind, kSets>(args, gpu, stream)) return *ok;
  if (args.rows <= 8) {
    if (few_blocks(args, gpu, 3)) return launch_skinny<kKind, kSets, 1, 1, 8, 4, 3>(args, stream);
    return launch_skinny<kKind, kSets, 1, 1, 4, 2, 5>(args, stream);
  }
  if (args.rows <= 32) return launch_skinny<kKind, kSets, 4, 2, 3, 2, 2>(args, stream);
  if (args.rows <= kSkinnyRows) return launch_low_tiles<kKind, kSets>(args, gpu, stream);
  return launch_tiles<kKind, kSets>(args, gpu, stream);
}

}  // namespace

bool launch_matmul_small_floats(CudaWeightKind kind, int sets, MatmulArgs& args, const GpuFacts& gpu,
                                cudaStream_t stream) {
  if (kind == CudaWeightKind::kFp4) {
    return sets == 1 ? launch<CudaWeightKind::kFp4, 1>(args, gpu, stream)
                     : launch<CudaWeightKind::kFp4, 2>(args, gpu, stream);
  }
  return sets == 1 ? launch<CudaWeightKind::kFp8, 1>(args, gpu, stream)
                   : launch<CudaWeightKind::kFp8, 2>(args, gpu, stream);
}

}  // namespace tensorfold
