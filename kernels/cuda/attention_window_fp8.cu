// attention_window.cuh for a cache of fp8 values.
#include "kernels/cuda/attention_window.cuh"

namespace tensorfold {

bool launch_attention_window_fp8(cudaStream_t stream, int dim, const AttentionParams& p, dim3 grid, int tiles,
                                 bool cluster) {
  return dim == 128 ? launch_window_dim<128, true>(stream, p, grid, tiles, cluster)
                    : launch_window_dim<256, true>(stream, p, grid, tiles, cluster);
}

}  // namespace tensorfold
