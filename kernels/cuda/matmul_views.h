// What the kernels of a product are given.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace tensorfold {

inline constexpr int kSkinnyRows = 64;  // rows up to which a warp takes all of them
inline constexpr int kMaxMatmulViews = 16;

enum class MatmulEpilogue : int32_t {
  kStore,    // fp32 out[r, n]
  kSiluMul,  // bf16 out[r, i] of pairs: row g of a tile is gate i = 8 tile + g, row g + 8 is up i
};

/// So many tiles dealt out to so many blocks: each gets `each`, the first `more` of them one more. Made on the host:
/// a division is hundreds of cycles before the first weight is asked for.
struct TileShare {
  int32_t each = 0;
  int32_t more = 0;

  static TileShare of(int tiles, int blocks) { return {tiles / blocks, tiles % blocks}; }
  /// The first tile of a block.
  __host__ __device__ int first(int block) const { return block * each + (block < more ? block : more); }
};

/// One segment times some activations.
struct MatmulView {
  const uint8_t* weight = nullptr;
  const __nv_bfloat16* x = nullptr;  // [rows, x_stride]
  void* out = nullptr;               // fp32 or bf16, at this segment's first column
  int64_t x_stride = 0;
  int64_t out_stride = 0;
  int64_t tile_bytes = 0;
  int32_t cols = 0;         // K: what lies in x beyond it is not read
  int32_t stages = 0;       // of 64 columns
  int32_t tiles = 0;        // of 16 packed rows
  int32_t out_cols = 0;     // columns of out that there are
  int32_t first_block = 0;  // number of its first thread block
  TileShare share;          // among its blocks, where each block is of one view
};

struct MatmulArgs {
  MatmulView views[kMaxMatmulViews];
  int32_t view_count = 0;
  // Every two views are of one shape and may be added up, which tiles of many rows do where it pays. Then `added` is 2,
  // and view v's output is the sum of views v and v + view_count.
  bool may_add = false;
  int32_t added = 1;
  int32_t blocks = 0;
  int32_t rows = 0;
  int32_t never = -1;  // a number that no stage has, unknown to the compiler
  MatmulEpilogue epilogue = MatmulEpilogue::kStore;
};

}  // namespace tensorfold
