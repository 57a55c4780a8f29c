// Between cuda_experts() and its small kernels: the list of pairs by expert, and the sums over a row's slots.
#pragma once

#include "kernels/cuda/experts_views.h"

namespace tensorfold {

/// Lists of a pass, all in device memory.
struct ExpertLists {
  int32_t* pairs = nullptr;       // [pairs], by expert, of an expert ascending
  ExpertChunk* chunks = nullptr;  // [most_expert_chunks()]
  int32_t* chunk_count = nullptr;
};
/// Bound on chunks, whatever the routing.
int64_t most_expert_chunks(int64_t pairs, int64_t experts, int64_t chunk_rows);
void group_experts(cudaStream_t stream, const float* ids, int64_t ids_stride, int64_t rows, int64_t slots,
                   int64_t experts, int64_t chunk_rows, const ExpertLists& lists);

/// partial[i][r] = sum over slots of weight * y[i][r * slots + slot].
struct ExpertSumArgs {
  const float* y = nullptr;
  int64_t y_stride = 0;       // between pairs
  int64_t matrix_stride = 0;  // between slices
  const float* ids = nullptr;
  const float* weights = nullptr;
  int64_t ids_stride = 0;
  int64_t weights_stride = 0;
  int32_t slots = 0;
  int32_t experts = 0;
  int32_t cols = 0;
  float* partial[16] = {};
  int64_t partial_stride = 0;
};
void sum_experts(cudaStream_t stream, const ExpertSumArgs& args, int64_t rows, int64_t slices);

}  // namespace tensorfold
