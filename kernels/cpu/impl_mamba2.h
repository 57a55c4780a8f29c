// Mamba2's step. Included by the isa_*.cc files only.
//
// S is [state][head_dim]: lanes run over head_dim, sums over the state are chains of fma in ascending order.
#pragma once

namespace tensorfold::TF_ISA {

inline void mamba2_conv(const float* const* rows, const float* weight, int64_t weight_stride, int64_t taps,
                        const float* bias, int64_t n, float* out) {
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    Vec sum = v_mul(load_part(weight + i, lanes), load_part(rows[0] + i, lanes));
    for (int64_t t = 1; t < taps; ++t) {
      sum = v_fma(load_part(weight + t * weight_stride + i, lanes), load_part(rows[t] + i, lanes), sum);
    }
    if (bias != nullptr) sum = v_add(sum, load_part(bias + i, lanes));
    store_part(out + i, v_silu(sum), lanes);
  });
}

inline void mamba2_steps(const float* dt, const float* dt_bias, const float* a_log, float least, float most, int64_t n,
                         float* step, float* decay) {
  const Vec low = v_set1(least), high = v_set1(most);
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    Vec d = v_softplus(v_add(load_part(dt + i, lanes), load_part(dt_bias + i, lanes)));
    d = v_select(m_greater(low, d), low, d);
    d = v_select(m_greater(d, high), high, d);
    store_part(step + i, d, lanes);
    store_part(decay + i, v_exp(v_neg(v_mul(v_exp(load_part(a_log + i, lanes)), d))), lanes);
  });
}

// Columns [0, 16 * Vecs) of s, of which `lanes` are used in the last vector.
template <int Vecs>
inline void mamba2_columns(float* s, int64_t state, int64_t stride, const float* x, const float* b, const float* c,
                           float step, float decay, float d, float* y, int64_t lanes) {
  const Vec g = v_set1(decay);
  Vec own[Vecs], in[Vecs], sum[Vecs];
  for (int j = 0; j < Vecs; ++j) {
    own[j] = load_part(x + 16 * j, j == Vecs - 1 ? lanes : 16);
    in[j] = v_mul(v_set1(step), own[j]);
    sum[j] = v_zero();
  }
  for (int64_t n = 0; n < state; ++n) {
    const Vec bn = v_set1(b[n]), cn = v_set1(c[n]);
    float* row = s + n * stride;
    TF_UNROLL(4)
    for (int j = 0; j < Vecs; ++j) {
      const Vec updated = v_fma(in[j], bn, v_mul(g, v_load(row + 16 * j)));
      v_store(row + 16 * j, updated);
      sum[j] = v_fma(cn, updated, sum[j]);
    }
  }
  const Vec skip = v_set1(d);
  for (int j = 0; j < Vecs; ++j) {
    store_part(y + 16 * j, v_fma(skip, own[j], sum[j]), j == Vecs - 1 ? lanes : 16);
  }
}

inline void mamba2_step(float* s, int64_t state, int64_t dim, int64_t stride, const float* x, const float* b,
                        const float* c, float step, float decay, float d, float* y) {
  int64_t i = 0;
  for (; i + 64 <= dim; i += 64) mamba2_columns<4>(s + i, state, stride, x + i, b, c, step, decay, d, y + i, 16);
  for (; i < dim; i += 16) {
    mamba2_columns<1>(s + i, state, stride, x + i, b, c, step, decay, d, y + i, dim - i < 16 ? dim - i : 16);
  }
}

inline void mamba2_output(const float* y, const float* z, const float* norm, int64_t n, float eps, float* out) {
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    store_part(out + i, v_mul(load_part(y + i, lanes), v_silu(load_part(z + i, lanes))), lanes);
  });
  const Vec r = v_set1(inverse_root(sum_of_squares(out, n) / static_cast<float>(n) + eps));
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    store_part(out + i, v_mul(v_mul(load_part(out + i, lanes), r), load_part(norm + i, lanes)), lanes);
  });
}

}  // namespace tensorfold::TF_ISA
