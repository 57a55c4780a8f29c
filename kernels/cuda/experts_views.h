// What the kernels of experts.h are given.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/cuda_weight.h"

namespace tensorfold {

/// How a matrix of an expert is packed.
struct ExpertFormat {
  CudaWeightKind kind = CudaWeightKind::kBf16;
  int32_t sets = 0;
  bool operator==(const ExpertFormat&) const = default;
};

/// One packed matrix of an expert: gate and up (in pairs of rows, or up alone), or down of a slice.
struct ExpertMatrix {
  const uint8_t* data = nullptr;  // first tile
  int32_t tile_bytes = 0;
  int32_t stages = 0;     // of 64 columns, a tile
  int32_t tiles = 0;      // of 16 packed rows
  int32_t cols = 0;       // K
  int32_t first_col = 0;  // where its columns begin in a row of inputs
  int32_t out_cols = 0;
  ExpertFormat format;
};

/// Pairs of one expert that a block takes together.
struct ExpertChunk {
  int32_t expert = 0;
  int32_t first = 0;  // place in the list of pairs
  int32_t count = 0;
  int32_t unused = 0;
};

inline constexpr int kExpertWarps = 4;      // of a block, each with tiles of its own
inline constexpr int kFewExpertRows = 8;    // rows of a pass up to which chunks have 8 rows
inline constexpr int kSomeExpertRows = 64;  // … 16 rows; 64 above it
/// Pairs of a chunk; a function of the pass's rows that no bits depend on.
__host__ __device__ constexpr int expert_chunk_rows(int64_t rows) {
  return rows <= kFewExpertRows ? 8 : rows <= kSomeExpertRows ? 16 : 64;
}

/// One launch of products.
struct ExpertProductArgs {
  const ExpertMatrix* matrices = nullptr;  // [experts][per_expert]
  int32_t per_expert = 1;
  int32_t experts = 0;
  int32_t first_matrix = 0;  // of an expert's: the launch does first_matrix … + matrix_count - 1
  int32_t matrix_count = 1;
  const float* ids = nullptr;      // [rows, slots]
  const float* weights = nullptr;  // [rows, slots]
  int64_t ids_stride = 0;
  int64_t weights_stride = 0;
  int32_t slots = 0;
  const int32_t* pairs = nullptr;       // by expert; null: pair blockIdx.y by itself
  const ExpertChunk* chunks = nullptr;  // of the list
  const int32_t* chunk_count = nullptr;
  const __nv_bfloat16* x = nullptr;
  int64_t x_stride = 0;
  bool inner = false;  // inputs are the pass's rows and outputs bf16 inner values; else inputs are pairs
  bool gated = false;
  float limit = 0.0f;
  void* out = nullptr;        // inner: bf16 [pairs]; else fp32 [matrix_count][pairs]
  int64_t out_stride = 0;     // between pairs, or rows of partial
  int64_t matrix_stride = 0;  // between the outputs of an expert's matrices
  float* partial[16] = {};    // sums of rows: of each matrix
  int32_t partial_cols = 0;
  int32_t tiles = 0;  // most tiles of a matrix
};

struct ExpertGrid {
  int64_t pairs = 0;  // blocks down: chunks at most, or pairs
  int64_t rows = 0;   // of sums
};

/// Launches the matrices of a format. rows_way: each row's slots one after the other, summed. `chunk_rows`: 8, 16, 64.
bool launch_experts_bf16(const ExpertProductArgs& args, const ExpertGrid& grid, bool rows_way, int chunk_rows,
                         cudaStream_t stream);
bool launch_experts_affine4(const ExpertProductArgs& args, int sets, const ExpertGrid& grid, bool rows_way,
                            int chunk_rows, cudaStream_t stream);
bool launch_experts_affine8(const ExpertProductArgs& args, int sets, const ExpertGrid& grid, bool rows_way,
                            int chunk_rows, cudaStream_t stream);
bool launch_experts_wide(CudaWeightKind kind, const ExpertProductArgs& args, int sets, const ExpertGrid& grid,
                         bool rows_way, int chunk_rows, cudaStream_t stream);
bool launch_experts_small_floats(CudaWeightKind kind, const ExpertProductArgs& args, int sets, const ExpertGrid& grid,
                                 bool rows_way, int chunk_rows, cudaStream_t stream);

}  // namespace tensorfold
