// Launches of attention_window.cuh.
#include "kernels/cuda/attention_window.cuh"

namespace tensorfold {
namespace {

template <int kDim, int kTiles, int kCluster>
bool launch(cudaStream_t stream, const AttentionParams& p, dim3 grid) {
  constexpr int kBytes = WindowShape<kDim, kTiles, kCluster>::kShared;
  auto kernel = window_kernel<kDim, kTiles, kCluster>;
  grid.x *= kCluster;
  return cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
                 "attention of windows") &&
         launch_kernel(kernel, grid, dim3(kWindowThreads), static_cast<size_t>(kBytes), stream, "attention of windows",
                       p);
}

template <int kDim>
bool launch_dim(cudaStream_t stream, const AttentionParams& p, dim3 grid, int tiles, bool cluster) {
  if (cluster) return launch<kDim, 1, kDim / 64>(stream, p, grid);
  return tiles == 1   ? launch<kDim, 1, 1>(stream, p, grid)
         : tiles == 3 ? launch<kDim, 3, 1>(stream, p, grid)
                      : launch<kDim, 6, 1>(stream, p, grid);
}

}  // namespace

bool launch_attention_window(cudaStream_t stream, int dim, const AttentionParams& p, dim3 grid, int tiles,
                             bool cluster) {
  return dim == 128 ? launch_dim<128>(stream, p, grid, tiles, cluster)
                    : launch_dim<256>(stream, p, grid, tiles, cluster);
}

}  // namespace tensorfold
