// Arguments and arithmetic of what block drafters need beside everyone's operations: rows taken from a residual of one
// or several streams, a convolution along the rows of a block whose taps each row chooses, and attention of a whole
// block, each row over what is cached of the sequence and over all rows of the block.
//
// A block is a RowGroup of at most kMostBlockRows rows. Its first_position is the number of cached rows before it; its
// own keys and values are tensors and never enter the cache. The page table may end before the block does.
#pragma once

#include "kernels/ops/ops.h"

namespace tensorfold {

inline constexpr int64_t kMostBlockRows = 16;
/// Most taps of a block's convolution.
inline constexpr int64_t kMostBlockTaps = 4;

/// out[r, c] = sum over taps t, ascending, of x[r - t, c] * (base[t, c] + dynamic[r, t, c / group]); rows before a
/// block's first are 0 and add nothing. Sum and product are each rounded.
struct BlockConvArgs {
  Tensor x;                      // [rows, width]
  Tensor dynamic;                // [rows, taps * (width / group)]
  const Vector* base = nullptr;  // [taps * width]
  int64_t taps = 0;
  int64_t group = 0;  // neighbouring channels that share a row's own taps; divides the width
  RowBatch rows;
  Tensor out;  // [rows, width], another tensor than x
};

/// Keys are visited in an order of the backend's own, which reads the block, its place and the window alone. On the
/// CPU: the block's rows, ascending, as one split; then cached rows in splits of kKeySplit, by position, or, where
/// there is a window, from the newest back. Blocks of 16 keys, online softmax and the merging of splits are
/// attention's. On CUDA: kernels/cuda/attention_block.cu.
struct BlockAttentionArgs {
  Tensor q;  // [rows, heads * head_dim], normed and roped
  Tensor k;  // [rows, kv_heads * head_dim], the block's own, normed and roped
  Tensor v;
  Tensor out;  // [rows, heads * head_dim]
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  std::span<const int32_t> kv_head_of;  // [heads]: local key/value head of each local query head, ascending
  float scale = 1.0f;
  int64_t window = 0;  // a row sees cached rows less than so many positions before it; at least a block; 0: all
  RowBatch rows;
};

}  // namespace tensorfold
