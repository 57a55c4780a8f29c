// Experts of FP8 and FP4 weights.
#include "kernels/cuda/experts_product.cuh"

namespace tensorfold {

bool launch_experts_small_floats(CudaWeightKind kind, const ExpertProductArgs& args, int sets, const ExpertGrid& grid,
                                 bool rows_way, int chunk_rows, cudaStream_t stream) {
  using Many = ExpertTileShape<2, 4, 3>;
  if (kind == CudaWeightKind::kFp4) {
    constexpr CudaWeightKind kKind = CudaWeightKind::kFp4;
    using Few = ExpertShape<1, 4, 2, 2, 3>;
    using Some = ExpertShape<2, 4, 2, 2, 3>;
    return sets == 1 ? launch_expert_shapes<kKind, 1, Few, Some, Many>(args, grid, rows_way, chunk_rows, stream)
                     : launch_expert_shapes<kKind, 2, Few, Some, Many>(args, grid, rows_way, chunk_rows, stream);
  }
  constexpr CudaWeightKind kKind = CudaWeightKind::kFp8;
  using Few = ExpertShape<1, 4, 1, 3, 3>;
  using Some = ExpertShape<2, 4, 1, 3, 3>;
  return sets == 1 ? launch_expert_shapes<kKind, 1, Few, Some, Many>(args, grid, rows_way, chunk_rows, stream)
                   : launch_expert_shapes<kKind, 2, Few, Some, Many>(args, grid, rows_way, chunk_rows, stream);
}

}  // namespace tensorfold
