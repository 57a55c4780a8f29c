// attention_window.cuh for a cache of bf16 values.
#include "kernels/cuda/attention_window.cuh"

namespace tensorfold {

bool launch_attention_window_bf16(cudaStream_t stream, int dim, const AttentionParams& p, dim3 grid, int tiles,
                                 bool cluster) {
  return dim == 128 ? launch_window_dim<128, false>(stream, p, grid, tiles, cluster)
                    : launch_window_dim<256, false>(stream, p, grid, tiles, cluster);
}

}  // namespace tensorfold
