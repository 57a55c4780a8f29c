#include "kernels/cuda/experts_product.cuh"

namespace tensorfold {

bool launch_experts_bf16(const ExpertProductArgs& args, const ExpertGrid& grid, bool rows_way, int chunk_rows,
                         cudaStream_t stream) {
  return launch_expert_shapes<CudaWeightKind::kBf16, 0, ExpertShape<1, 2, 2, 2, 3>, ExpertShape<2, 2, 2, 2, 3>,
                              ExpertTileShape<2, 3, 3>>(args, grid, rows_way, chunk_rows, stream);
}

}  // namespace tensorfold
