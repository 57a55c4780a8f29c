// Attention for few queries over positions 0, 1, 2 …: the launch of attention_narrow.cuh.
#include "kernels/cuda/attention_narrow.cuh"

namespace tensorfold {

bool launch_attention_narrow(cudaStream_t stream, int dim, bool fp8, const AttentionParams& p, dim3 grid,
                             int shared_limit) {
  constexpr const char* kWhat = "attention of few rows";
  return fp8 ? launch_narrow_dim<true, false>(stream, dim, p, grid, shared_limit, kWhat)
             : launch_narrow_dim<false, false>(stream, dim, p, grid, shared_limit, kWhat);
}

}  // namespace tensorfold
