#include "kernels/cuda/matmul_launch.cuh"

namespace tensorfold {

bool launch_matmul_bf16(MatmulArgs& args, const GpuFacts& gpu, cudaStream_t stream) {
  constexpr CudaWeightKind kKind = CudaWeightKind::kBf16;
  if (const std::optional<bool> ok = launch_stream_rows<kKind, 0>(args, gpu, stream)) return *ok;
  if (args.rows <= 32) return launch_skinny<kKind, 0, 4, 2, 3, 2, 2>(args, stream);
  if (args.rows <= kSkinnyRows) return launch_skinny<kKind, 0, 8, 2, 2, 2, 2>(args, stream);
  return launch_tiles<kKind, 0>(args, gpu, stream);
}

}  // namespace tensorfold
