// What one instruction set's translation unit exports: plain functions over plain pointers.
//
// This header is included by code compiled with different target flags, so it holds declarations and plain structs
// only: an inline function here could be compiled with AVX-512 and then be chosen by the linker for every machine.
#pragma once

#include <cstdint>

namespace tensorfold {

/// Rows of a packed weight panel: the panel interleaves 4 rows by blocks of 16 columns, so that it is read front to
/// back.
inline constexpr int64_t kPanelRows = 4;

/// Element kinds of a panel (WeightFormat, with affine split by the kind of its scales).
enum class PanelKind : int { kF32 = 0, kBf16 = 1, kF16 = 2, kAffine = 3, kFp8 = 4, kFp4 = 5 };

/// A packed segment [rows, cols] of a weight. See weights.h for the byte layout.
struct PanelView {
  PanelKind kind = PanelKind::kF32;
  const uint8_t* data = nullptr;
  int64_t panel_bytes = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t k_blocks = 0;  // ceil(cols / 16)
  // Affine only.
  int bits = 0;
  int64_t group_bytes = 0;   // scales, biases and codes of 4 rows of one group
  bool bf16_scales = false;  // else fp32
  // Affine, FP8, FP4.
  int64_t group_blocks = 0;  // k blocks in a group
  // FP8 and FP4 only: a panel is scales [groups][4 rows], then codes.
  int64_t groups = 0;
  int64_t codes_at = 0;      // bytes from a panel's begin to its codes
  int64_t lead_blocks = 0;   // k blocks of the first group that lie before the segment
  int split_lane = 0;        // in a group's last k block, the first lane of the next group; 0: groups end with blocks
  bool byte_scales = false;  // FP8: e8m0, a byte each; else fp32, times 2^8. FP4: always a byte
  const float* values = nullptr;  // FP4: [256 scales][8 codes], what a code without its sign stands for
};

/// Up to kMaxQueries query vectors that share one key/value head and one sequence.
inline constexpr int kMaxQueries = 16;
struct AttentionItem {
  const float* kv = nullptr;       // first page of this layer
  const int32_t* pages = nullptr;  // page table of the sequence
  int64_t page_stride = 0;         // floats between pages
  int64_t head_offset = 0;         // floats from a page's start to this kv head
  int64_t block_floats = 0;        // floats of a key block: keys [head_dim][16], then values [16][value_stride]
  int64_t head_dim = 0;
  int64_t value_stride = 0;  // head_dim rounded up to 16
  float scale = 1.0f;
  int queries = 0;
  const float* q[kMaxQueries] = {};  // [head_dim]
  int64_t keys[kMaxQueries] = {};    // visible keys: position + 1
};

/// Online-softmax state of one split: running maximum, sum, and unnormalised output [value_stride].
struct AttentionState {
  float* max = nullptr;
  float* sum = nullptr;
  float* out[kMaxQueries] = {};
};

/// Heads of a latent attention item.
inline constexpr int kLatentHeads = 4;

struct KernelTable {
  const char* name;

  // out[r * out_stride + n] for n in panels [panel_begin, panel_end) and r in [0, rows); `out` is column 0 of the
  // segment. scratch: matmul_scratch_floats(view) floats, 64-byte aligned.
  void (*matmul)(const PanelView& w, int64_t panel_begin, int64_t panel_end, const float* x, int64_t x_stride,
                 int64_t rows, float* out, int64_t out_stride, float* scratch);
  int64_t (*matmul_scratch_floats)(const PanelView& w);
  void (*dequantise_row)(const PanelView& w, int64_t row, float* out);

  void (*rms_norm)(const float* x, int64_t heads, int64_t dim, const float* weight, float eps, float* out);
  void (*l2_norm)(float* x, int64_t dim, float scale);
  void (*add)(const float* a, const float* b, float* out, int64_t n);
  void (*silu_mul)(const float* gate, const float* up, float* out, int64_t n);
  void (*sigmoid_mul)(float* x, const float* gate, int64_t n);
  // out = max(x, 0)^2.
  void (*relu_squared)(const float* x, float* out, int64_t n);
  // A router's row: softmax(x), and out = sum over j of weights[j] * rows[j], ascending.
  void (*softmax)(const float* x, int64_t n, float* out);
  void (*weighted_sum)(const float* const* rows, const float* weights, int64_t count, int64_t n, float* out);
  void (*rope)(float* x, int64_t heads, int64_t head_dim, int64_t pairs, const float* cos, const float* sin);

  // One split [split * 512, …) of every query of the item, from a fresh state.
  void (*attention_split)(const AttentionItem& item, int64_t split, const AttentionState& state);
  // Adds the later split `next` into `state` for query i.
  void (*attention_merge)(const AttentionItem& item, int i, const AttentionState& state, const AttentionState& next);
  // out[head_dim] = state / sum.
  void (*attention_finish)(const AttentionItem& item, int i, const AttentionState& state, float* out);

  // out = silu(sum over taps of weight[tap][c] * rows[tap][c]), oldest tap first.
  void (*conv_silu)(const float* const* rows, const float* weight, int64_t weight_stride, int64_t taps, int64_t n,
                    float* out);
  // beta = sigmoid(b), decay = exp(-exp(a_log) * softplus(a + dt_bias)).
  void (*delta_gates)(const float* b, const float* a, const float* a_log, const float* dt_bias, int64_t n, float* beta,
                      float* decay);
  // One head's decays with a floor: exp(floor * sigmoid(exp(a_log) * (a + dt_bias))).
  void (*channel_decay)(const float* a, const float* dt_bias, float a_log, float floor, int64_t n, float* decay);
  // One token of one head; s [dk][dv_stride]; decay[i * decay_step] is that of key channel i.
  void (*delta_step)(float* s, int64_t dk, int64_t dv, int64_t dv_stride, const float* q, const float* k,
                     const float* v, const float* decay, int64_t decay_step, float beta, float* y);
  // out = rms(y, norm) * silu(z).
  void (*delta_output)(const float* y, const float* z, const float* norm, int64_t dv, float eps, float* out);

  // Latents (impl_latent.h).
  void (*layer_norm)(const float* x, int64_t dim, const float* weight, const float* bias, float eps, float* out);
  void (*silu_mul_limited)(const float* gate, const float* up, float limit, float* out, int64_t n);
  void (*sqrt_softplus)(const float* x, float* out, int64_t n);
  // Per channel: sum over j of softmax_j(gates[j] + bias[j]) * keys[j]; logits: count * n floats of scratch.
  void (*pool)(const float* const* keys, const float* const* gates, const float* const* bias, int64_t count, int64_t n,
               float* logits, float* out);
  // sum over heads of weights[h] * weight_scale * max(scale * q_h . key, 0).
  float (*index_score)(const float* q, int64_t heads, int64_t dim, const float* key, const float* weights, float scale,
                       float weight_scale);
  // One split of a list: scores[h * keys + j] = softmax numerators of q[h] . rows[j] * scale, with their maxima and
  // sums; then out[h] = sum over j of scores * rows[j]. At most kLatentHeads heads.
  void (*latent_split)(const float* const* q, int heads, const float* const* rows, int64_t keys, int64_t width,
                       float scale, float* scores, float* max, float* sum, float* const* out);

  // out = rms(y, norm) * sigmoid(z).
  void (*delta_output_sigmoid)(const float* y, const float* z, const float* norm, int64_t dv, float eps, float* out);
  // Gated streams and chosen keys (impl_streams.h).
  void (*scaled_silu)(float* x, float scale, int64_t n);
  void (*mix_streams)(const float* x, const float* gate, int64_t count, int64_t width, float share, int64_t n,
                      float* out);
  void (*add_scaled)(float* x, const float* y, float weight, int64_t n);  // x = fma(weight, y, x)
  float (*dot)(const float* a, const float* b, int64_t n);

  // out = silu(sum over taps of weight[tap][c] * rows[tap][c], oldest tap first, + bias[c]); bias may be null.
  void (*mamba2_conv)(const float* const* rows, const float* weight, int64_t weight_stride, int64_t taps,
                      const float* bias, int64_t n, float* out);
  // step = softplus(dt + dt_bias) within [least, most], decay = exp(-exp(a_log) * step).
  void (*mamba2_steps)(const float* dt, const float* dt_bias, const float* a_log, float least, float most, int64_t n,
                       float* step, float* decay);
  // One token of one head; s [state][stride], x and y [dim].
  void (*mamba2_step)(float* s, int64_t state, int64_t dim, int64_t stride, const float* x, const float* b,
                      const float* c, float step, float decay, float d, float* y);
  // y = rms(y * silu(z)) * norm of one group.
  void (*mamba2_output)(const float* y, const float* z, const float* norm, int64_t n, float eps, float* out);

  // First index in [begin, end) with x > threshold, or end.
  int64_t (*find_greater)(const float* x, int64_t begin, int64_t end, float threshold);

  // The vector math alone, for tests.
  void (*exp)(const float* x, float* out, int64_t n);
  void (*sigmoid)(const float* x, float* out, int64_t n);
  void (*softplus)(const float* x, float* out, int64_t n);

  // Measurement: reads n floats (n a multiple of 128); does `steps` fused multiply-adds on each lane of several chains
  // and returns how many floating-point operations that was.
  float (*read_all)(const float* x, int64_t n);
  double (*burn_fma)(int64_t steps, float* sink);
};

// Only those that this build has are defined; see isa.cc.
const KernelTable* kernels_avx512();
const KernelTable* kernels_avx2();
const KernelTable* kernels_neon();
const KernelTable* kernels_portable();

}  // namespace tensorfold
