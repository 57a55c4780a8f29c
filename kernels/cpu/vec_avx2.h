// The 16-lane vector on AVX2, FMA and F16C: two registers. Included by isa_avx2.cc only.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace tensorfold::TF_ISA {

struct Vec {
  __m256 lo, hi;
};
struct IVec {
  __m256i lo, hi;
};
struct Mask {
  __m256 lo, hi;  // all ones or all zeros a lane
};

inline constexpr int kTileRows = 2;
inline constexpr int kTileInputs = 2;
inline constexpr int kCodedInputs = 1;
inline constexpr int kScoreBlocks = 1;
inline constexpr int kBurnChains = 6;

inline Vec v_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec v_set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec v_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void v_store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline __m256i lanes_below(int64_t n, int first) {
  const __m256i index = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int32_t>(n)), index);
}
inline Vec v_load_n(const float* p, int64_t n) {
  return {_mm256_maskload_ps(p, lanes_below(n, 0)),
          n > 8 ? _mm256_maskload_ps(p + 8, lanes_below(n, 8)) : _mm256_setzero_ps()};
}
inline void v_store_n(float* p, Vec a, int64_t n) {
  _mm256_maskstore_ps(p, lanes_below(n, 0), a.lo);
  if (n > 8) _mm256_maskstore_ps(p + 8, lanes_below(n, 8), a.hi);
}
inline Vec v_add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec v_sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec v_mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec v_div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec v_sqrt(Vec a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
inline Vec v_fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline Mask m_greater(Vec a, Vec b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ)};
}
inline Mask m_unordered(Vec a) {
  return {_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)};
}
inline Mask m_first(int64_t n) {
  return {_mm256_castsi256_ps(lanes_below(n, 0)), _mm256_castsi256_ps(lanes_below(n, 8))};
}
inline bool m_any(Mask m) { return _mm256_movemask_ps(_mm256_or_ps(m.lo, m.hi)) != 0; }
inline Vec v_select(Mask m, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}

inline IVec i_set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline IVec i_bits(Vec a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline Vec v_bits(IVec a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline IVec i_add(IVec a, IVec b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline IVec i_sub(IVec a, IVec b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline IVec i_and(IVec a, IVec b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline IVec i_or(IVec a, IVec b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int N>
inline IVec i_shl(IVec a) {
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
template <int N>
inline IVec i_sar(IVec a) {
  return {_mm256_srai_epi32(a.lo, N), _mm256_srai_epi32(a.hi, N)};
}
inline Vec v_from_int(IVec a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

inline __m128i load_half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline Vec v_load_bf16(const uint16_t* p) {
  const __m256i lo = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(p)), 16);
  const __m256i hi = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(p + 8)), 16);
  return {_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)};
}
inline Vec v_load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(load_half(p)), _mm256_cvtph_ps(load_half(p + 8))}; }

// e4m3 codes as numbers, times 2^-8: their exponent and mantissa are those of an f16 number, whose bias is 8 more. Not
// for the codes of NaN.
inline Vec v_load_e4m3(const uint8_t* p) {
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_half(p)), 7);
  const __m256i halves = _mm256_and_si256(wide, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}

// Code planes: lane l of the 4-bit plane is at bit 32 * (l % 2) + 4 * (l / 2), of the others at bits * l.
inline IVec i_codes8(const uint8_t* p) {
  const __m128i raw = load_half(p);
  return {_mm256_cvtepu8_epi32(raw), _mm256_cvtepu8_epi32(_mm_srli_si128(raw, 8))};
}
inline IVec shift_and_mask(__m256i word, __m256i lo_shift, __m256i hi_shift, int32_t mask) {
  const __m256i m = _mm256_set1_epi32(mask);
  return {_mm256_and_si256(_mm256_srlv_epi32(word, lo_shift), m),
          _mm256_and_si256(_mm256_srlv_epi32(word, hi_shift), m)};
}
inline IVec i_codes4(const uint8_t* p) {
  int64_t word;
  std::memcpy(&word, p, 8);
  return shift_and_mask(_mm256_set1_epi64x(word), _mm256_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12),
                        _mm256_setr_epi32(16, 16, 20, 20, 24, 24, 28, 28), 15);
}
// Eight numbers by the low three bits of 4-bit codes, minus where the highest is set.
inline Vec v_pick_signed(const float* eight, IVec codes) {
  const __m256 numbers = _mm256_loadu_ps(eight);
  const __m256i sign = _mm256_set1_epi32(INT32_MIN);
  const auto pick = [&](__m256i code) {
    const __m256i minus = _mm256_and_si256(_mm256_slli_epi32(code, 28), sign);
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(numbers, code), _mm256_castsi256_ps(minus));
  };
  return {pick(codes.lo), pick(codes.hi)};
}
inline IVec i_codes2(const uint8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return shift_and_mask(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14),
                        _mm256_setr_epi32(16, 18, 20, 22, 24, 26, 28, 30), 3);
}
inline IVec i_codes1(const uint8_t* p) {
  uint16_t word;
  std::memcpy(&word, p, 2);
  return shift_and_mask(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                        _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15), 1);
}

// The fixed fold of 16 lanes: l + 8, l + 4, l + 2, l + 1.
inline __m128 fold_to_four(Vec a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}
inline float v_fold(Vec a) {
  const __m128 four = fold_to_four(a);
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// out[j] = v_fold(a[j]).
inline void v_fold4(const Vec* a, float* out) {
  const __m128 x0 = fold_to_four(a[0]), x1 = fold_to_four(a[1]), x2 = fold_to_four(a[2]), x3 = fold_to_four(a[3]);
  const __m128 p = _mm_add_ps(_mm_movelh_ps(x0, x1), _mm_movehl_ps(x1, x0));
  const __m128 q = _mm_add_ps(_mm_movelh_ps(x2, x3), _mm_movehl_ps(x3, x2));
  _mm_storeu_ps(out, _mm_add_ps(_mm_shuffle_ps(p, q, 0x88), _mm_shuffle_ps(p, q, 0xdd)));
}
inline void v_fold8(const Vec* a, float* out) {
  v_fold4(a, out);
  v_fold4(a + 4, out + 4);
}
inline void v_fold16(const Vec* a, float* out) {
  v_fold8(a, out);
  v_fold8(a + 8, out + 8);
}

}  // namespace tensorfold::TF_ISA
