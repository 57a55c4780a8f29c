// Affine weights with scales of 2^-5 or more, which are rare.
#include "kernels/cuda/experts_product.cuh"

namespace tensorfold {
namespace {

template <CudaWeightKind kKind, int kSets>
bool launch(const ExpertProductArgs& args, const ExpertGrid& grid, bool rows_way, int chunk_rows, cudaStream_t stream) {
  return launch_expert_shapes<kKind, kSets, ExpertShape<1, 2, 1, 4, 3>, ExpertShape<2, 2, 1, 4, 3>,
                              ExpertTileShape<2, 3, 2>>(args, grid, rows_way, chunk_rows, stream);
}

}  // namespace

bool launch_experts_wide(CudaWeightKind kind, const ExpertProductArgs& args, int sets, const ExpertGrid& grid,
                         bool rows_way, int chunk_rows, cudaStream_t stream) {
  if (kind == CudaWeightKind::kAffine4Wide) {
    return sets == 1 ? launch<CudaWeightKind::kAffine4Wide, 1>(args, grid, rows_way, chunk_rows, stream)
                     : launch<CudaWeightKind::kAffine4Wide, 2>(args, grid, rows_way, chunk_rows, stream);
  }
  return sets == 1 ? launch<CudaWeightKind::kAffine8Wide, 1>(args, grid, rows_way, chunk_rows, stream)
                   : launch<CudaWeightKind::kAffine8Wide, 2>(args, grid, rows_way, chunk_rows, stream);
}

}  // namespace tensorfold
