// Causal attention of several queries over one key/value head. Included by the isa_*.cc files only.
//
// Order, per query: keys in blocks of 16 at absolute positions (the 16 keys are the 16 lanes); a score is a chain of
// fma over the head dimension, ascending, times the scale. Online softmax per block inside a split of 512 keys: new
// maximum, rescale by exp(old - new), add the folded sum of exp(score - maximum), then each output element adds p *
// value by fma in ascending key order. Splits are merged in ascending order. Keys beyond a query's own position are
// never added.
#pragma once

namespace tensorfold::TF_ISA {

inline constexpr int kQueryTile = 4;
inline constexpr int kPageBlocks = static_cast<int>(kAttentionPage / 16);

inline const float* key_block(const AttentionItem& t, int64_t block) {
  return t.kv + t.pages[block / kPageBlocks] * t.page_stride + t.head_offset + (block % kPageBlocks) * t.block_floats;
}

// Scores of `Queries` queries against `Blocks` consecutive key blocks of a page: out[q][block * 16 + lane].
template <int Queries, int Blocks>
inline void score_blocks(const float* const* q, const float* keys, int64_t block_floats, int64_t head_dim, float scale,
                         float (*out)[kAttentionPage]) {
  Vec acc[Queries * Blocks];
  for (Vec& a : acc) a = v_zero();
  for (int64_t d = 0; d < head_dim; ++d) {
    Vec k[Blocks];
    TF_UNROLL(4)
    for (int b = 0; b < Blocks; ++b) k[b] = v_load(keys + b * block_floats + 16 * d);
    TF_UNROLL(4)
    for (int i = 0; i < Queries; ++i) {
      const Vec qd = v_set1(q[i][d]);
      TF_UNROLL(4)
      for (int b = 0; b < Blocks; ++b) acc[i * Blocks + b] = v_fma(qd, k[b], acc[i * Blocks + b]);
    }
  }
  const Vec s = v_set1(scale);
  for (int i = 0; i < Queries; ++i) {
    for (int b = 0; b < Blocks; ++b) v_store(out[i] + 16 * b, v_mul(acc[i * Blocks + b], s));
  }
}

template <int Queries>
inline void score_page(const AttentionItem& t, int first_query, const float* keys, int64_t blocks,
                       float (*out)[kAttentionPage]) {
  int64_t b = 0;
  for (; b + kScoreBlocks <= blocks; b += kScoreBlocks) {
    score_blocks<Queries, kScoreBlocks>(t.q + first_query, keys + b * t.block_floats, t.block_floats, t.head_dim,
                                        t.scale, reinterpret_cast<float(*)[kAttentionPage]>(out[0] + 16 * b));
  }
  for (; b < blocks; ++b) {
    score_blocks<Queries, 1>(t.q + first_query, keys + b * t.block_floats, t.block_floats, t.head_dim, t.scale,
                             reinterpret_cast<float(*)[kAttentionPage]>(out[0] + 16 * b));
  }
}

// out[q][d] = out[q][d] * alpha[q], then + p[q][j] * value[j][d] for j ascending; `Vecs` vectors of d at offset d0.
template <int Queries, int Vecs>
inline void add_values(const float* values, int64_t stride, int64_t keys, float (*p)[16], const float* alpha,
                       float* const* out, int64_t d0) {
  Vec acc[Queries * Vecs];
  for (int i = 0; i < Queries; ++i) {
    for (int c = 0; c < Vecs; ++c) acc[i * Vecs + c] = v_mul(v_load(out[i] + d0 + 16 * c), v_set1(alpha[i]));
  }
  for (int64_t j = 0; j < keys; ++j) {
    Vec v[Vecs];
    TF_UNROLL(4)
    for (int c = 0; c < Vecs; ++c) v[c] = v_load(values + j * stride + d0 + 16 * c);
    TF_UNROLL(4)
    for (int i = 0; i < Queries; ++i) {
      const Vec pj = v_set1(p[i][j]);
      TF_UNROLL(4)
      for (int c = 0; c < Vecs; ++c) acc[i * Vecs + c] = v_fma(pj, v[c], acc[i * Vecs + c]);
    }
  }
  for (int i = 0; i < Queries; ++i) {
    for (int c = 0; c < Vecs; ++c) v_store(out[i] + d0 + 16 * c, acc[i * Vecs + c]);
  }
}

template <int Queries>
inline void add_all_values(const float* values, int64_t stride, int64_t keys, float (*p)[16], const float* alpha,
                           float* const* out) {
  int64_t d = 0;
  if constexpr (kScoreBlocks >= 4) {
    for (; d + 64 <= stride; d += 64) add_values<Queries, 4>(values, stride, keys, p, alpha, out, d);
  }
  for (; d < stride; d += 16) add_values<Queries, 1>(values, stride, keys, p, alpha, out, d);
}

// One key block for queries [first, first + n): softmax state, then values.
inline void softmax_block(const AttentionItem& t, int first, int n, int64_t block, float (*scores)[kAttentionPage],
                          int64_t offset, const float* values, const AttentionState& state) {
  float p[kQueryTile][16];
  float shift[16] = {}, alpha[16];
  int64_t visible[kQueryTile] = {};
  for (int i = 0; i < n; ++i) {
    const int64_t left = t.keys[first + i] - 16 * block;
    visible[i] = left > 16 ? 16 : left;
    if (left <= 0) continue;
    const Mask mask = m_first(visible[i]);
    const Vec s = v_select(mask, v_load(scores[i] + offset), v_bits(i_set1(static_cast<int32_t>(0xff800000u))));
    const float block_max = v_fold_max(s);
    float* max = state.max + first + i;
    const float new_max = block_max > *max ? block_max : *max;
    shift[i] = *max - new_max;
    *max = new_max;
    v_store(p[i], v_select(mask, v_exp(v_sub(s, v_set1(new_max))), v_zero()));
  }
  v_store(alpha, v_exp(v_load(shift)));
  bool together = true;
  for (int i = 0; i < n; ++i) {
    if (visible[i] <= 0) {
      together = false;
      continue;
    }
    float* sum = state.sum + first + i;
    *sum = __builtin_fmaf(*sum, alpha[i], v_fold(v_load(p[i])));
    together = together && visible[i] == visible[0];
  }
  if (together && visible[0] > 0) {
    switch (n) {
      case 1:
        return add_all_values<1>(values, t.value_stride, visible[0], p, alpha, state.out + first);
      case 2:
        return add_all_values<2>(values, t.value_stride, visible[0], p, alpha, state.out + first);
      case 3:
        return add_all_values<3>(values, t.value_stride, visible[0], p, alpha, state.out + first);
      default:
        return add_all_values<4>(values, t.value_stride, visible[0], p, alpha, state.out + first);
    }
  }
  for (int i = 0; i < n; ++i) {
    if (visible[i] > 0) add_all_values<1>(values, t.value_stride, visible[i], p + i, alpha + i, state.out + first + i);
  }
}

inline void attention_split(const AttentionItem& t, int64_t split, const AttentionState& state) {
  int64_t most = 0;
  for (int i = 0; i < t.queries; ++i) {
    most = t.keys[i] > most ? t.keys[i] : most;
    state.max[i] = -__builtin_inff();
    state.sum[i] = 0.0f;
    for (int64_t d = 0; d < t.value_stride; d += 16) v_store(state.out[i] + d, v_zero());
  }
  const int64_t begin = split * (kAttentionSplit / 16);
  const int64_t all = (most + 15) / 16, limit = begin + kAttentionSplit / 16;
  const int64_t end = all < limit ? all : limit;
  float scores[kQueryTile][kAttentionPage];
  for (int64_t page = begin; page < end; page += kPageBlocks) {
    const int64_t blocks = end - page < kPageBlocks ? end - page : kPageBlocks;
    const float* keys = key_block(t, page);
    for (int first = 0; first < t.queries; first += kQueryTile) {
      const int n = t.queries - first < kQueryTile ? t.queries - first : kQueryTile;
      switch (n) {
        case 1:
          score_page<1>(t, first, keys, blocks, scores);
          break;
        case 2:
          score_page<2>(t, first, keys, blocks, scores);
          break;
        case 3:
          score_page<3>(t, first, keys, blocks, scores);
          break;
        default:
          score_page<4>(t, first, keys, blocks, scores);
          break;
      }
      for (int64_t b = 0; b < blocks; ++b) {
        const float* values = keys + b * t.block_floats + 16 * t.head_dim;
        softmax_block(t, first, n, page + b, scores, 16 * b, values, state);
      }
    }
  }
}

inline void attention_merge(const AttentionItem& t, int i, const AttentionState& state, const AttentionState& next) {
  const float a = state.max[i], b = next.max[i];
  const float new_max = b > a ? b : a;
  float shift[16] = {a - new_max, b - new_max};
  float factor[16];
  v_store(factor, v_exp(v_load(shift)));
  state.max[i] = new_max;
  state.sum[i] = __builtin_fmaf(state.sum[i], factor[0], next.sum[i] * factor[1]);
  const Vec keep = v_set1(factor[0]), take = v_set1(factor[1]);
  for (int64_t d = 0; d < t.value_stride; d += 16) {
    v_store(state.out[i] + d, v_fma(v_load(state.out[i] + d), keep, v_mul(v_load(next.out[i] + d), take)));
  }
}

inline void attention_finish(const AttentionItem& t, int i, const AttentionState& state, float* out) {
  const Vec sum = v_set1(state.sum[i]);
  for_lanes(t.head_dim,
            [&](int64_t d, int64_t lanes) { store_part(out + d, v_div(v_load(state.out[i] + d), sum), lanes); });
}

}  // namespace tensorfold::TF_ISA
