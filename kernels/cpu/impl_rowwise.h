// Norms, activations, rotary embedding, search and measurement. Included by the isa_*.cc files only.
#pragma once

namespace tensorfold::TF_ISA {

// Sum of squares: lane l takes elements 16 i + l in ascending order, then the fixed fold.
inline float sum_of_squares(const float* x, int64_t n) {
  Vec sum = v_zero();
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    const Vec v = load_part(x + i, lanes);
    sum = v_fma(v, v, sum);
  });
  return v_fold(sum);
}

// 1 / sqrt(x): both operations are correctly rounded by IEEE 754.
inline float inverse_root(float x) { return 1.0f / __builtin_sqrtf(x); }

inline void rms_norm(const float* x, int64_t heads, int64_t dim, const float* weight, float eps, float* out) {
  for (int64_t h = 0; h < heads; ++h, x += dim, out += dim) {
    const float mean = sum_of_squares(x, dim) / static_cast<float>(dim);
    const Vec r = v_set1(inverse_root(mean + eps));
    for_lanes(dim, [&](int64_t i, int64_t lanes) {
      store_part(out + i, v_mul(v_mul(load_part(x + i, lanes), r), load_part(weight + i, lanes)), lanes);
    });
  }
}

// x * rsqrt(sum x^2 + 1e-6) * scale.
inline void l2_norm(float* x, int64_t dim, float scale) {
  const Vec r = v_set1(inverse_root(sum_of_squares(x, dim) + 1e-6f));
  const Vec s = v_set1(scale);
  for_lanes(dim,
            [&](int64_t i, int64_t lanes) { store_part(x + i, v_mul(v_mul(load_part(x + i, lanes), r), s), lanes); });
}

inline void add(const float* a, const float* b, float* out, int64_t n) {
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    store_part(out + i, v_add(load_part(a + i, lanes), load_part(b + i, lanes)), lanes);
  });
}

inline void silu_mul(const float* gate, const float* up, float* out, int64_t n) {
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    store_part(out + i, v_mul(v_silu(load_part(gate + i, lanes)), load_part(up + i, lanes)), lanes);
  });
}

inline void sigmoid_mul(float* x, const float* gate, int64_t n) {
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    store_part(x + i, v_mul(load_part(x + i, lanes), v_sigmoid(load_part(gate + i, lanes))), lanes);
  });
}

// max(x, 0)^2; NaN stays.
inline void relu_squared(const float* x, float* out, int64_t n) {
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    const Vec v = load_part(x + i, lanes);
    const Vec kept = v_select(m_greater(v_zero(), v), v_zero(), v);
    store_part(out + i, v_mul(kept, kept), lanes);
  });
}

// exp(x - max) / sum: lane l adds elements 16 i + l in ascending order, then the fixed fold. The maximum has no order.
inline void softmax(const float* x, int64_t n, float* out) {
  float most = x[0];
  for (int64_t i = 1; i < n; ++i) most = x[i] > most ? x[i] : most;
  const Vec top = v_set1(most);
  Vec sum = v_zero();
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    store_part(out + i, v_exp(v_sub(load_part(x + i, lanes), top)), lanes);
    sum = v_add(sum, load_part(out + i, lanes));  // read back: lanes beyond the row are zero
  });
  const Vec total = v_set1(v_fold(sum));
  for_lanes(n, [&](int64_t i, int64_t lanes) { store_part(out + i, v_div(load_part(out + i, lanes), total), lanes); });
}

// The first product is rounded, the others are added by fma.
inline void weighted_sum(const float* const* rows, const float* weights, int64_t count, int64_t n, float* out) {
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    Vec sum = v_mul(v_set1(weights[0]), load_part(rows[0] + i, lanes));
    for (int64_t j = 1; j < count; ++j) sum = v_fma(v_set1(weights[j]), load_part(rows[j] + i, lanes), sum);
    store_part(out + i, sum, lanes);
  });
}

// Pairs (i, i + pairs): a' = a cos - b sin, b' = b cos + a sin, each product and sum rounded.
inline void rope(float* x, int64_t heads, int64_t head_dim, int64_t pairs, const float* cos, const float* sin) {
  for (int64_t h = 0; h < heads; ++h, x += head_dim) {
    for_lanes(pairs, [&](int64_t i, int64_t lanes) {
      const Vec a = load_part(x + i, lanes), b = load_part(x + pairs + i, lanes);
      const Vec c = load_part(cos + i, lanes), s = load_part(sin + i, lanes);
      store_part(x + i, v_sub(v_mul(a, c), v_mul(b, s)), lanes);
      store_part(x + pairs + i, v_add(v_mul(b, c), v_mul(a, s)), lanes);
    });
  }
}

inline int64_t find_greater(const float* x, int64_t begin, int64_t end, float threshold) {
  const Vec t = v_set1(threshold);
  int64_t i = begin;
  for (; i + 16 <= end; i += 16) {
    if (m_any(m_greater(v_load(x + i), t))) break;
  }
  while (i < end && !(x[i] > threshold)) ++i;
  return i;
}

inline void exp_lanes(const float* x, float* out, int64_t n) {
  for_lanes(n, [&](int64_t i, int64_t lanes) { store_part(out + i, v_exp(load_part(x + i, lanes)), lanes); });
}
inline void sigmoid_lanes(const float* x, float* out, int64_t n) {
  for_lanes(n, [&](int64_t i, int64_t lanes) { store_part(out + i, v_sigmoid(load_part(x + i, lanes)), lanes); });
}
inline void softplus_lanes(const float* x, float* out, int64_t n) {
  for_lanes(n, [&](int64_t i, int64_t lanes) { store_part(out + i, v_softplus(load_part(x + i, lanes)), lanes); });
}

inline float read_all(const float* x, int64_t n) {
  Vec sum[8];
  for (Vec& s : sum) s = v_zero();
  for (int64_t i = 0; i < n; i += 128) {
    for (int j = 0; j < 8; ++j) sum[j] = v_add(sum[j], v_load(x + i + 16 * j));
    __builtin_prefetch(x + i + 1024);
    __builtin_prefetch(x + i + 1088);
  }
  float total = 0.0f;
  for (const Vec& s : sum) total += v_fold(s);
  return total;
}

inline double burn_fma(int64_t steps, float* sink) {
  Vec chain[kBurnChains];
  for (int j = 0; j < kBurnChains; ++j) chain[j] = v_set1(static_cast<float>(j));
  const Vec a = v_set1(0.999f), b = v_set1(0.001f);
  for (int64_t i = 0; i < steps; ++i) {
    TF_UNROLL(16)
    for (int j = 0; j < kBurnChains; ++j) chain[j] = v_fma(chain[j], a, b);
  }
  float total = 0.0f;
  for (const Vec& c : chain) total += v_fold(c);
  *sink = total;
  return 2.0 * 16.0 * kBurnChains * static_cast<double>(steps);
}

}  // namespace tensorfold::TF_ISA
