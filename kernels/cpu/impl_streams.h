// Residuals of several gated streams, and scores of chosen keys. Included by the isa_*.cc files only.
#pragma once

namespace tensorfold::TF_ISA {

inline void delta_output_sigmoid(const float* y, const float* z, const float* norm, int64_t dv, float eps, float* out) {
  const Vec r = v_set1(inverse_root(sum_of_squares(y, dv) / static_cast<float>(dv) + eps));
  for_lanes(dv, [&](int64_t i, int64_t lanes) {
    const Vec normed = v_mul(v_mul(load_part(y + i, lanes), r), load_part(norm + i, lanes));
    store_part(out + i, v_mul(normed, v_sigmoid(load_part(z + i, lanes))), lanes);
  });
}

inline void scaled_silu(float* x, float scale, int64_t n) {
  const Vec s = v_set1(scale);
  for_lanes(n, [&](int64_t i, int64_t lanes) { store_part(x + i, v_silu(v_mul(load_part(x + i, lanes), s)), lanes); });
}

// Columns [0, n) of streams that are `width` apart.
inline void mix_streams(const float* x, const float* gate, int64_t count, int64_t width, float share, int64_t n,
                        float* out) {
  const Vec part = v_set1(share);
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    Vec sum = v_mul(v_sigmoid(load_part(gate + i, lanes)), load_part(x + i, lanes));
    for (int64_t s = 1; s < count; ++s) {
      sum = v_fma(v_sigmoid(load_part(gate + s * width + i, lanes)), load_part(x + s * width + i, lanes), sum);
    }
    store_part(out + i, v_mul(sum, part), lanes);
  });
}

inline void add_scaled(float* x, const float* y, float weight, int64_t n) {
  const Vec w = v_set1(weight);
  for_lanes(n, [&](int64_t i, int64_t lanes) {
    store_part(x + i, v_fma(w, load_part(y + i, lanes), load_part(x + i, lanes)), lanes);
  });
}

// Lane l takes elements 16 i + l in ascending order, then the fixed fold.
inline float dot(const float* a, const float* b, int64_t n) {
  Vec sum = v_zero();
  for_lanes(n, [&](int64_t i, int64_t lanes) { sum = v_fma(load_part(a + i, lanes), load_part(b + i, lanes), sum); });
  return v_fold(sum);
}

}  // namespace tensorfold::TF_ISA
