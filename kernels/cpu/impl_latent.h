// Attention over cached rows, their choice and their pooling. Included by the isa_*.cc files only.
#pragma once

namespace tensorfold::TF_ISA {

inline void layer_norm(const float* x, int64_t dim, const float* weight, const float* bias, float eps, float* out) {
  Vec sum = v_zero();
  for_lanes(dim, [&](int64_t i, int64_t lanes) { sum = v_add(sum, load_part(x + i, lanes)); });
  const Vec mean = v_set1(v_fold(sum) / static_cast<float>(dim));
  // The differences first: lanes beyond the row must add nothing.
  for_lanes(dim, [&](int64_t i, int64_t lanes) { store_part(out + i, v_sub(load_part(x + i, lanes), mean), lanes); });
  const Vec r = v_set1(inverse_root(sum_of_squares(out, dim) / static_cast<float>(dim) + eps));
  for_lanes(dim, [&](int64_t i, int64_t lanes) {
    const Vec normed = v_mul(v_mul(load_part(out + i, lanes), r), load_part(weight + i, lanes));
    store_part(out + i, v_add(normed, load_part(bias + i, lanes)), lanes);
  });
}

// Compare and select, so that NaN stays NaN.
inline void silu_mul_limited(const float* gate, const float* up, float limit, float* out, int64_t n) {
  const Vec most = v_set1(limit), least = v_set1(-limit);
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    const Vec g = load_part(gate + i, lanes), u = load_part(up + i, lanes);
    const Vec gated = v_silu(v_select(m_greater(g, most), most, g));
    const Vec above = v_select(m_greater(least, u), least, u);
    store_part(out + i, v_mul(gated, v_select(m_greater(above, most), most, above)), lanes);
  });
}

inline void sqrt_softplus(const float* x, float* out, int64_t n) {
  for_lanes(n,
            [&](int64_t i, int64_t lanes) { store_part(out + i, v_sqrt(v_softplus(load_part(x + i, lanes))), lanes); });
}

inline void pool(const float* const* keys, const float* const* gates, const float* const* bias, int64_t count,
                 int64_t n, float* logits, float* out) {
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    Vec most = v_add(load_part(gates[0] + i, lanes), load_part(bias[0] + i, lanes));
    store_part(logits + i, most, lanes);
    for (int64_t j = 1; j < count; ++j) {
      const Vec logit = v_add(load_part(gates[j] + i, lanes), load_part(bias[j] + i, lanes));
      store_part(logits + j * n + i, logit, lanes);
      most = v_max(most, logit);
    }
    Vec total = v_zero(), sum = v_zero();
    for (int64_t j = 0; j < count; ++j) {
      const Vec p = v_exp(v_sub(load_part(logits + j * n + i, lanes), most));
      total = v_add(total, p);
      sum = v_fma(p, load_part(keys[j] + i, lanes), sum);
    }
    store_part(out + i, v_div(sum, total), lanes);
  });
}

inline Vec part_dot(const float* a, const float* b, int64_t n) {
  Vec sum = v_zero();
  for_lanes(n, [&](int64_t i, int64_t lanes) { sum = v_fma(load_part(a + i, lanes), load_part(b + i, lanes), sum); });
  return sum;
}

// Lane l adds heads 16 i + l in ascending order, then the fixed fold.
inline float index_score(const float* q, int64_t heads, int64_t dim, const float* key, const float* weights,
                         float scale, float weight_scale) {
  Vec sum = v_zero();
  for (int64_t first = 0; first < heads; first += 16) {
    const int64_t n = heads - first < 16 ? heads - first : 16;
    Vec acc[16];
    float dots[16];
    for (int64_t h = 0; h < 16; ++h) acc[h] = h < n ? part_dot(q + (first + h) * dim, key, dim) : v_zero();
    v_fold16(acc, dots);
    const Vec positive = v_max(v_mul(v_load(dots), v_set1(scale)), v_zero());
    sum = v_fma(v_mul(load_part(weights + first, n), v_set1(weight_scale)), positive, sum);
  }
  return v_fold(sum);
}

// Scores of Heads queries with four rows.
template <int Heads>
inline void score_rows(const float* const* q, const float* const* rows, int64_t width, float* out) {
  Vec acc[4 * Heads];
  for (Vec& a : acc) a = v_zero();
  for_lanes(width, [&](int64_t i, int64_t lanes) {
    Vec row[4];
    TF_UNROLL(4)
    for (int j = 0; j < 4; ++j) row[j] = load_part(rows[j] + i, lanes);
    TF_UNROLL(4)
    for (int h = 0; h < Heads; ++h) {
      const Vec x = load_part(q[h] + i, lanes);
      TF_UNROLL(4)
      for (int j = 0; j < 4; ++j) acc[4 * h + j] = v_fma(row[j], x, acc[4 * h + j]);
    }
  });
  for (int h = 0; h < Heads; ++h) v_fold4(acc + 4 * h, out + 4 * h);
}

template <int Heads>
inline void latent_scores(const float* const* q, const float* const* rows, int64_t keys, int64_t width, float* scores) {
  float part[4 * Heads];
  for (int64_t j = 0; j < keys; j += 4) {
    const float* four[4];
    for (int64_t k = 0; k < 4; ++k) four[k] = rows[j + k < keys ? j + k : keys - 1];
    score_rows<Heads>(q, four, width, part);
    for (int h = 0; h < Heads; ++h) {
      for (int64_t k = 0; k < 4 && j + k < keys; ++k) scores[h * keys + j + k] = part[4 * h + k];
    }
  }
}

// A chain of fma over the rows in order for each value.
template <int Heads>
inline void latent_values(const float* scores, const float* const* rows, int64_t keys, int64_t width,
                          float* const* out) {
  for_lanes(width, [&](int64_t i, int64_t lanes) {
    Vec sum[Heads];
    for (Vec& s : sum) s = v_zero();
    for (int64_t j = 0; j < keys; ++j) {
      const Vec row = load_part(rows[j] + i, lanes);
      TF_UNROLL(4)
      for (int h = 0; h < Heads; ++h) sum[h] = v_fma(v_set1(scores[h * keys + j]), row, sum[h]);
    }
    for (int h = 0; h < Heads; ++h) store_part(out[h] + i, sum[h], lanes);
  });
}

template <int Heads>
inline void latent_heads(const float* const* q, const float* const* rows, int64_t keys, int64_t width, float scale,
                         float* scores, float* max, float* sum, float* const* out) {
  latent_scores<Heads>(q, rows, keys, width, scores);
  for (int h = 0; h < Heads; ++h) {
    float* s = scores + h * keys;
    float most = -__builtin_inff();
    for (int64_t j = 0; j < keys; ++j) {
      s[j] *= scale;
      most = s[j] > most ? s[j] : most;
    }
    max[h] = most;
    Vec total = v_zero();
    for_lanes(keys, [&](int64_t j, int64_t lanes) {
      store_part(s + j, v_exp(v_sub(load_part(s + j, lanes), v_set1(most))), lanes);
      total = v_add(total, load_part(s + j, lanes));  // read back: lanes beyond the list are zero
    });
    sum[h] = v_fold(total);
  }
  latent_values<Heads>(scores, rows, keys, width, out);
}

inline void latent_split(const float* const* q, int heads, const float* const* rows, int64_t keys, int64_t width,
                         float scale, float* scores, float* max, float* sum, float* const* out) {
  switch (heads) {
    case 1:
      return latent_heads<1>(q, rows, keys, width, scale, scores, max, sum, out);
    case 2:
      return latent_heads<2>(q, rows, keys, width, scale, scores, max, sum, out);
    case 3:
      return latent_heads<3>(q, rows, keys, width, scale, scores, max, sum, out);
    default:
      return latent_heads<4>(q, rows, keys, width, scale, scores, max, sum, out);
  }
}

}  // namespace tensorfold::TF_ISA
