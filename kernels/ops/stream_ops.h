// Arguments and arithmetic of operations on residuals of several gated streams, and of attention over chosen keys.
//
// Everywhere: sums over a dimension have 16 lanes and the fixed fold; sums over streams, heads or tokens ascend; lists
// are visited in ascending position.
#pragma once

#include "kernels/ops/ops.h"

namespace tensorfold {

/// Most streams of a residual.
inline constexpr int64_t kMostGatedStreams = 8;

/// out = (sum over s of sigmoid(gate_s) * x_s) * (1 / count), the first product rounded, the others added by fma.
struct MixStreamsArgs {
  Tensor x;     // [rows, count * width]
  Tensor gate;  // the same shape
  int64_t count = 0;
  Tensor out;  // [rows, width]
};

/// x_s = fma(2 * sigmoid(inject_s * (1 / count)), y, x_s).
struct InjectStreamsArgs {
  Tensor x;       // [rows, count * width]
  Tensor inject;  // [rows, count]
  int64_t count = 0;
  Tensor y;  // [rows, width]
};

/// g = (sum over the width of key_s * query_s) / sqrt(width); g = sign(g) * sqrt(max(|g|, 1e-6)); out_s = sigmoid(g) *
/// value.
struct GateStreamsArgs {
  Tensor key;    // [rows, count * width]
  Tensor query;  // the same shape
  Tensor value;  // [rows, width]
  int64_t count = 0;
  Tensor out;  // as key
};

/// out = silu(sum over taps j of conv[j] * x of (taps - 1 - j) * dilation rows before), oldest first, as delta_net's
/// convolution; steps and commits as delta_net's. The state also keeps the tokens of its rows (embed_ngrams).
struct ShortConvArgs {
  const ShortConvShape* shape = nullptr;
  Tensor x;                      // [rows, channels]
  const Vector* conv = nullptr;  // [channels * taps], taps of one channel together, oldest first
  Tensor out;                    // [rows, channels]
  RowBatch rows;
  int64_t layer = 0;  // of rows.recurrent
};

/// Tables of n-grams: each head looks up a row of its table by ngram_row() (kernels/numerics/ngram_hash.h). Heads of
/// 2-grams come first, then those of 3-grams …
struct NgramHeads {
  int64_t heads_per_size = 1;
  int32_t end_token = 0;
  std::vector<int64_t> multipliers;  // of the newest token, the one before it …: a factor a token of the longest n-gram
  std::vector<int64_t> table_rows;  // of each head's table, below 2^31

  /// Tokens before the newest one that a head looks at.
  int64_t backs(int64_t head) const { return head / heads_per_size + 1; }
};

/// For each row, the rows of tables that the n-grams ending with its token pick, one head after another. The tokens
/// before a group's rows come from the state of a ShortConvShape layer, which the pass's short_conv moves on
/// afterwards.
struct EmbedNgramsArgs {
  const NgramHeads* heads = nullptr;
  const ShortConvShape* shape = nullptr;  // of the layer's states
  std::span<const Weight* const> tables;  // of heads first_head, first_head + 1 …; equal columns
  int64_t first_head = 0;
  Tensor out;  // [rows, tables * columns of one]
  RowBatch rows;
  int64_t layer = 0;  // of rows.recurrent
};

/// Pointers to weights that their owner keeps.
inline std::vector<const Weight*> borrowed(std::span<const std::unique_ptr<Weight>> owned) {
  std::vector<const Weight*> weights;
  for (const std::unique_ptr<Weight>& weight : owned) weights.push_back(weight.get());
  return weights;
}

/// Means of windows of `tokens` consecutive rows of one cache layer: sum over them of (1 / tokens) * row, then rms
/// norm, then rope ("rotate half") at the window's first position, into another layer. Pools every window whose last
/// token is in the pass; its rows must have been written.
struct PoolMeansArgs {
  int64_t from = 0;  // layer of one row a token
  int64_t into = 0;  // layer of one row for `tokens` tokens
  int64_t tokens = 1;
  const Vector* norm = nullptr;  // [width]
  float eps = 0.0f;
  const Vector* inv_freq = nullptr;  // [pairs]
  RowBatch rows;
};

/// Chooses, for each row of the pass, up to out.cols of the whole windows that end at or before its position, by (score
/// descending, window ascending, NaN last); score = (sum over heads of max(q_h . key, 0)) * scale. out: their numbers
/// ascending, as whole fp32 numbers, then -1.
struct SelectWindowsArgs {
  int64_t layer = 0;   // of pooled keys
  int64_t tokens = 1;  // of a window
  int64_t heads = 0;
  Tensor q;  // [rows, heads * width of a key]
  float scale = 1.0f;
  Tensor out;  // [rows, most]
  RowBatch rows;
};

}  // namespace tensorfold
