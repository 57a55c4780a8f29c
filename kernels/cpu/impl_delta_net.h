// The gated delta net's step. Included by the isa_*.cc files only.
//
// S is [dk][dv]: lanes run over dv, sums over dk are chains of fma in ascending order.
#pragma once

namespace tensorfold::TF_ISA {

inline void conv_silu(const float* const* rows, const float* weight, int64_t weight_stride, int64_t taps, int64_t n,
                      float* out) {
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    Vec sum = v_mul(load_part(weight + i, lanes), load_part(rows[0] + i, lanes));
    for (int64_t t = 1; t < taps; ++t) {
      sum = v_fma(load_part(weight + t * weight_stride + i, lanes), load_part(rows[t] + i, lanes), sum);
    }
    store_part(out + i, v_silu(sum), lanes);
  });
}

inline void delta_gates(const float* b, const float* a, const float* a_log, const float* dt_bias, int64_t n,
                        float* beta, float* decay) {
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    store_part(beta + i, v_sigmoid(load_part(b + i, lanes)), lanes);
    const Vec step = v_softplus(v_add(load_part(a + i, lanes), load_part(dt_bias + i, lanes)));
    store_part(decay + i, v_exp(v_neg(v_mul(v_exp(load_part(a_log + i, lanes)), step))), lanes);
  });
}

inline void channel_decay(const float* a, const float* dt_bias, float a_log, float floor, int64_t n, float* decay) {
  const Vec rate = v_exp(v_set1(a_log)), least = v_set1(floor);
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    const Vec gate = v_sigmoid(v_mul(rate, v_add(load_part(a + i, lanes), load_part(dt_bias + i, lanes))));
    store_part(decay + i, v_exp(v_mul(least, gate)), lanes);
  });
}

// Columns [0, 16 * Vecs) of s, of which `lanes` are used in the last vector.
template <int Vecs>
inline void delta_columns(float* s, int64_t dk, int64_t stride, const float* q, const float* k, const float* v,
                          const float* decay, int64_t decay_step, float beta, float* y, int64_t lanes) {
  Vec r[Vecs];
  for (Vec& x : r) x = v_zero();
  for (int64_t i = 0; i < dk; ++i) {
    const Vec ki = v_set1(k[i]), g = v_set1(decay[i * decay_step]);
    float* row = s + i * stride;
    TF_UNROLL(4)
    for (int c = 0; c < Vecs; ++c) {
      const Vec decayed = v_mul(v_load(row + 16 * c), g);
      v_store(row + 16 * c, decayed);
      r[c] = v_fma(ki, decayed, r[c]);
    }
  }
  const Vec b = v_set1(beta);
  Vec d[Vecs], sum[Vecs];
  for (int c = 0; c < Vecs; ++c) {
    d[c] = v_mul(v_sub(load_part(v + 16 * c, c == Vecs - 1 ? lanes : 16), r[c]), b);
    sum[c] = v_zero();
  }
  for (int64_t i = 0; i < dk; ++i) {
    const Vec ki = v_set1(k[i]), qi = v_set1(q[i]);
    float* row = s + i * stride;
    TF_UNROLL(4)
    for (int c = 0; c < Vecs; ++c) {
      const Vec updated = v_fma(ki, d[c], v_load(row + 16 * c));
      v_store(row + 16 * c, updated);
      sum[c] = v_fma(qi, updated, sum[c]);
    }
  }
  for (int c = 0; c < Vecs; ++c) store_part(y + 16 * c, sum[c], c == Vecs - 1 ? lanes : 16);
}

inline void delta_step(float* s, int64_t dk, int64_t dv, int64_t stride, const float* q, const float* k, const float* v,
                       const float* decay, int64_t decay_step, float beta, float* y) {
  int64_t c = 0;
  for (; c + 64 <= dv; c += 64) delta_columns<4>(s + c, dk, stride, q, k, v + c, decay, decay_step, beta, y + c, 16);
  for (; c < dv; c += 16) {
    delta_columns<1>(s + c, dk, stride, q, k, v + c, decay, decay_step, beta, y + c, dv - c < 16 ? dv - c : 16);
  }
}

inline void delta_output(const float* y, const float* z, const float* norm, int64_t dv, float eps, float* out) {
  const Vec r = v_set1(inverse_root(sum_of_squares(y, dv) / static_cast<float>(dv) + eps));
  for_lanes(dv, [&](int64_t i, int64_t lanes) {
    const Vec normed = v_mul(v_mul(load_part(y + i, lanes), r), load_part(norm + i, lanes));
    store_part(out + i, v_mul(normed, v_silu(load_part(z + i, lanes))), lanes);
  });
}

}  // namespace tensorfold::TF_ISA
