// Arguments and arithmetic of operations on latents: attention whose keys are compressed rows of a RowCache, the choice
// of rows to attend to, and residuals of several streams.
//
// Everywhere: sums over a dimension have 16 lanes and the fixed fold; lists are visited in ascending position.
#pragma once

#include "kernels/ops/ops.h"

namespace tensorfold {

/// Most streams of a residual.
inline constexpr int64_t kMostStreams = 8;

/// A residual of n streams X_s, mixed by manifold-constrained hyper-connections.
///
/// collapse: out = sum over s of pre_s X_s (weighted_sum's order), zero = 0, weights = post | comb, with
///   pre = sigmoid(mix * scale[0] + base) + eps, post = 2 sigmoid(mix * scale[1] + base),
///   C = softmax of rows(mix * scale[2] + base) + eps, then C /= sum over j of C[j, k] + eps, then iterations - 1 times
///   rows and columns: C /= sum over k + eps, C /= sum over j + eps. Sums in ascending order.
/// A mix of only n columns gives pre alone (no weights, scale [1]); no mix gives the mean, pre = 1 / n.
/// With `carried` the sum's weights are what it holds, and it gets this mix's pre (if there is a mix): a block's input
/// is then summed by what the block before computed (supports_shared_latents). expand: X_k = post_k y + sum over j of
/// C[j, k] X_j, y first, j ascending (weighted_sum's order), in place.
struct HyperArgs {
  Tensor streams;                 // [rows, n * width]
  int64_t count = 0;              // n
  Tensor mix;                     // [rows, n + n + n * n]: pre | post | C row by row
  const Vector* scale = nullptr;  // [3]
  const Vector* base = nullptr;   // as wide as mix
  float eps = 0.0f;
  int64_t iterations = 1;
  Tensor weights;  // [rows, n + n * n]; out of collapse, in of expand
  Tensor out;      // collapse: [rows, width]
  Tensor zero;     // collapse: [rows, width], or no data
  Tensor y;        // expand: [rows, width], what the block gave
  Tensor carried;  // collapse: [rows, n] in and out, or no data
};

/// Pools windows of `tokens` consecutive rows [keys | gates] of one cache layer into one row of another: per channel
/// sum over j ascending of softmax_j(gate_j + bias_j) * key_j; then rms norm, then rope_pairs at the window's first
/// position. Pools every window whose last token is in the pass; its rows must have been written.
struct PoolArgs {
  int64_t from = 0;  // layer of one row a token
  int64_t into = 0;  // layer of pooled rows; a window's row is the one that holds its last token
  int64_t tokens = 1;
  /// Keys and gates are two halves A | B each: a window takes the A of the window before it (nothing in the first
  /// window), then its own B.
  bool overlap = false;
  const Vector* bias = nullptr;      // [tokens * gates of a row]
  const Vector* norm = nullptr;      // [width of a pooled row], or null
  float eps = 0.0f;                  // of the norm
  const Vector* inv_freq = nullptr;  // [pairs], or null
  RowBatch rows;
};

/// Chooses, for each row of the pass, up to out.cols of the whole windows that end at or before its position, by
/// (score descending, window ascending, NaN last); score = sum over heads of weights[h] * weight_scale *
/// max(scale * q_h . key, 0). out: their numbers ascending, then -1.
///
/// Candidates (supports_shared_latents): `block` windows make a block, the first windows the first one. With
/// `candidates` only windows of the blocks listed there are chosen from. With `blocks_out` the row's best blocks are
/// listed too, numbers ascending, then -1: up to its columns of them, the newest one always, the others by (best score
/// of a visible window descending, block ascending).
struct SelectArgs {
  int64_t layer = 0;   // of pooled keys
  int64_t tokens = 1;  // of a window
  int64_t heads = 0;
  Tensor q;        // [rows, heads * width of a key]
  Tensor weights;  // [rows, heads]
  float scale = 1.0f;
  float weight_scale = 1.0f;
  Tensor out;  // [rows, most]
  int64_t block = 0;
  Tensor candidates;  // [rows, most blocks], or no data
  Tensor blocks_out;  // [rows, most blocks], or no data
  RowBatch rows;
};

/// For each row of the pass that ends a window of `tokens` rows [keys | gates] of a cache layer: per channel the sum
/// over j ascending of softmax_j(gate_j) * key_j, not normed, not rotated. 0 for rows that end none. The window's rows
/// must have been written.
struct PoolLatentsArgs {
  int64_t from = 0;  // layer of one row a token
  int64_t tokens = 1;
  Tensor out;  // [rows, keys of a row]
  RowBatch rows;
};

/// Softmax attention of every head over one list of cached rows that are keys and values at once. A row's list is,
/// ascending in each part:
///   window = 0: the tokens of the selected windows, then those after the last whole window (all tokens if nothing is
///   selected); window > 0: the pooled rows of the selected windows (all whole ones if there is no selection; none if
///   `pooled` is -1), then the last `window` tokens;
///   with `block`: the last `window` cached rows before its group's first_position (all of them if window is 0; there
///   may be none), then all rows of its group in `block`. The same list for every row of a group: attention looks in
///   both directions. `pooled` is -1 and nothing is selected.
/// Visited in splits of 512 of the list, merged in ascending order.
struct LatentAttentionArgs {
  Tensor q;    // [rows, heads * width of a row]
  Tensor out;  // the same shape
  int64_t heads = 0;
  float scale = 1.0f;
  const Vector* sinks = nullptr;  // [heads], or null: exp(sink) joins the denominator
  int64_t layer = 0;              // of one row a token
  int64_t window = 0;
  int64_t pooled = -1;  // layer
  int64_t tokens = 1;   // of a selected window
  Tensor selected;      // [rows, most] of select_rows, or no data
  /// [rows, width]: the pass' groups are blocks (block_ops.h), these their own rows, as they would be in the cache; or
  /// no data. Another tensor than `out`; on CUDA aligned to 16 bytes, the stride a multiple of 4.
  Tensor block;
  RowBatch rows;
};

}  // namespace tensorfold
