// exp, sigmoid, silu and softplus on 16 lanes: our own, from + * / and explicit fma only, so equal on every instruction
// set. Included by the isa_*.cc files only, after their vec_*.h.
#pragma once

namespace tensorfold::TF_ISA {

// Written as compare and select, because the instructions for maximum differ between machines on NaN and signed zeros:
// a > b ? a : b, so b when either is NaN.
inline Vec v_max(Vec a, Vec b) { return v_select(m_greater(a, b), a, b); }

inline float v_fold_max(Vec a) {
  float lane[16];
  v_store(lane, a);
  float best = lane[0];
  for (int l = 1; l < 16; ++l) best = lane[l] > best ? lane[l] : best;
  return best;
}

inline Vec v_neg(Vec a) { return v_bits(i_sub(i_bits(a), i_set1(INT32_MIN))); }  // flips the sign bit

// e^x within 1 ulp. Over 88.73 gives inf, under -104 gives 0, NaN stays NaN.
inline Vec v_exp(Vec x) {
  const Vec high = v_set1(88.8f), low = v_set1(-104.0f);
  const Mask over = m_greater(x, high), under = m_greater(low, x), nan = m_unordered(x);
  const Vec safe = v_select(nan, v_zero(), v_select(over, high, v_select(under, low, x)));
  // x = n ln 2 + r; adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
  const Vec magic = v_set1(12582912.0f);
  const Vec shifted = v_fma(safe, v_set1(0x1.715476p0f), magic);
  const Vec n = v_sub(shifted, magic);
  Vec r = v_fma(n, v_set1(-0x1.62e43p-1f), safe);  // ln 2 = 0x1.62e43p-1 - 0x1.05c61p-29
  r = v_fma(n, v_set1(0x1.05c61p-29f), r);
  Vec p = v_set1(1.0f / 5040.0f);
  p = v_fma(p, r, v_set1(1.0f / 720.0f));
  p = v_fma(p, r, v_set1(1.0f / 120.0f));
  p = v_fma(p, r, v_set1(1.0f / 24.0f));
  p = v_fma(p, r, v_set1(1.0f / 6.0f));
  p = v_fma(p, r, v_set1(0.5f));
  p = v_add(v_set1(1.0f), v_fma(v_mul(r, r), p, r));
  // 2^n in two exact factors, so that a subnormal result is rounded once.
  const IVec whole = i_sub(i_bits(shifted), i_bits(magic));
  const IVec half = i_sar<1>(whole);
  const IVec bias = i_set1(127);
  const Vec scale0 = v_bits(i_shl<23>(i_add(half, bias)));
  const Vec scale1 = v_bits(i_shl<23>(i_add(i_sub(whole, half), bias)));
  Vec result = v_mul(v_mul(p, scale0), scale1);
  result = v_select(over, v_bits(i_set1(0x7f800000)), result);
  result = v_select(under, v_zero(), result);
  return v_select(nan, x, result);
}

// 1 / (1 + e^-x).
inline Vec v_sigmoid(Vec x) { return v_div(v_set1(1.0f), v_add(v_set1(1.0f), v_exp(v_neg(x)))); }

// x / (1 + e^-x).
inline Vec v_silu(Vec x) { return v_div(x, v_add(v_set1(1.0f), v_exp(v_neg(x)))); }

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|), with log1p(u) = 2 atanh(u / (2 + u)), whose argument is at most 1/3.
inline Vec v_softplus(Vec x) {
  const Vec magnitude = v_max(x, v_neg(x));
  const Vec u = v_exp(v_neg(magnitude));
  const Vec s = v_div(u, v_add(v_set1(2.0f), u));
  const Vec z = v_mul(s, s);
  Vec p = v_set1(2.0f / 17.0f);
  p = v_fma(p, z, v_set1(2.0f / 15.0f));
  p = v_fma(p, z, v_set1(2.0f / 13.0f));
  p = v_fma(p, z, v_set1(2.0f / 11.0f));
  p = v_fma(p, z, v_set1(2.0f / 9.0f));
  p = v_fma(p, z, v_set1(2.0f / 7.0f));
  p = v_fma(p, z, v_set1(2.0f / 5.0f));
  p = v_fma(p, z, v_set1(2.0f / 3.0f));
  const Vec log1p = v_fma(v_mul(s, z), p, v_add(s, s));
  return v_add(v_max(x, v_zero()), log1p);
}

// Calls body(offset, lanes) for 16 lanes at a time; the last call may have fewer.
template <typename Body>
inline void for_lanes(int64_t n, Body body) {
  for (int64_t i = 0; i < n; i += 16) body(i, n - i < 16 ? n - i : 16);
}
inline Vec load_part(const float* p, int64_t lanes) { return lanes == 16 ? v_load(p) : v_load_n(p, lanes); }
inline void store_part(float* p, Vec a, int64_t lanes) {
  if (lanes == 16) {
    v_store(p, a);
  } else {
    v_store_n(p, a, lanes);
  }
}

}  // namespace tensorfold::TF_ISA
