// The 16-lane vector on AVX-512 (F, BW, VL, DQ). Included by isa_avx512.cc only.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace tensorfold::TF_ISA {

struct Vec {
  __m512 v;
};
struct IVec {
  __m512i v;
};
struct Mask {
  __mmask16 m;
};

// Register tile of the matmul (weight rows x input rows), input rows beside codes that are decoded in registers, and
// key blocks scored together: what fits 32 registers.
inline constexpr int kTileRows = 4;
inline constexpr int kTileInputs = 6;
inline constexpr int kCodedInputs = 4;
inline constexpr int kScoreBlocks = 4;
inline constexpr int kBurnChains = 12;

inline Vec v_zero() { return {_mm512_setzero_ps()}; }
inline Vec v_set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec v_load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void v_store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
inline Vec v_load_n(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void v_store_n(float* p, Vec a, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
inline Vec v_add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec v_sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec v_mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec v_div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec v_sqrt(Vec a) { return {_mm512_sqrt_ps(a.v)}; }
inline Vec v_fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Mask m_greater(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
inline Mask m_unordered(Vec a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
inline Mask m_first(int64_t n) { return {first_lanes(n)}; }
inline bool m_any(Mask m) { return m.m != 0; }
inline Vec v_select(Mask m, Vec yes, Vec no) { return {_mm512_mask_blend_ps(m.m, no.v, yes.v)}; }

inline IVec i_set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline IVec i_bits(Vec a) { return {_mm512_castps_si512(a.v)}; }
inline Vec v_bits(IVec a) { return {_mm512_castsi512_ps(a.v)}; }
inline IVec i_add(IVec a, IVec b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline IVec i_sub(IVec a, IVec b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline IVec i_and(IVec a, IVec b) { return {_mm512_and_si512(a.v, b.v)}; }
inline IVec i_or(IVec a, IVec b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N>
inline IVec i_shl(IVec a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
inline IVec i_sar(IVec a) {
  return {_mm512_srai_epi32(a.v, N)};
}
inline Vec v_from_int(IVec a) { return {_mm512_cvtepi32_ps(a.v)}; }

inline Vec v_load_bf16(const uint16_t* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
inline Vec v_load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

// e4m3 codes as numbers, times 2^-8: their exponent and mantissa are those of an f16 number, whose bias is 8 more. Not
// for the codes of NaN.
inline Vec v_load_e4m3(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {
      _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff))))};
}

// Code planes: lane l of the 4-bit plane is at bit 32 * (l % 2) + 4 * (l / 2), of the others at bits * l.
inline IVec i_codes8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline IVec i_codes4(const uint8_t* p) {
  int64_t word;
  std::memcpy(&word, p, 8);
  const __m512i shift = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
  return {_mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi64(word), shift), _mm512_set1_epi32(15))};
}
// Eight numbers by the low three bits of 4-bit codes, minus where the highest is set.
inline Vec v_pick_signed(const float* eight, IVec codes) {
  const __m512 minus = _mm512_castsi512_ps(_mm512_maskz_set1_epi32(0xff00, INT32_MIN));
  const __m512 sixteen = _mm512_xor_ps(_mm512_broadcast_f32x8(_mm256_loadu_ps(eight)), minus);
  return {_mm512_permutexvar_ps(codes.v, sixteen)};
}
inline IVec i_codes2(const uint8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  const __m512i shift = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return {_mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32(word), shift), _mm512_set1_epi32(3))};
}
inline IVec i_codes1(const uint8_t* p) {
  uint16_t word;
  std::memcpy(&word, p, 2);
  return {_mm512_maskz_set1_epi32(static_cast<__mmask16>(word), 1)};
}

// The fixed fold of 16 lanes: l + 8, l + 4, l + 2, l + 1.
inline float v_fold(Vec a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Steps of the fold on several vectors at once: each adds the same pairs of lanes as v_fold and packs the sums.
inline __m512 fold_halves(__m512 a, __m512 b) {  // -> 8 lanes of a | 8 of b
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
inline __m512 fold_quarters(__m512 a, __m512 b) {  // a, b: two vectors each -> 4 lanes of each of the four
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
inline __m512 fold_pairs(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}
inline __m512 fold_last(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

// out[j] = v_fold(a[j]).
inline void v_fold16(const Vec* a, float* out) {
  // Quarter t of the result holds the vectors 4 t … 4 t + 3 when they enter in this order.
  const __m512 q0 = fold_quarters(fold_halves(a[0].v, a[4].v), fold_halves(a[8].v, a[12].v));
  const __m512 q1 = fold_quarters(fold_halves(a[1].v, a[5].v), fold_halves(a[9].v, a[13].v));
  const __m512 q2 = fold_quarters(fold_halves(a[2].v, a[6].v), fold_halves(a[10].v, a[14].v));
  const __m512 q3 = fold_quarters(fold_halves(a[3].v, a[7].v), fold_halves(a[11].v, a[15].v));
  _mm512_storeu_ps(out, fold_last(fold_pairs(q0, q1), fold_pairs(q2, q3)));
}
inline void v_fold8(const Vec* a, float* out) {
  const __m512 q0 = fold_quarters(fold_halves(a[0].v, a[4].v), fold_halves(a[2].v, a[6].v));
  const __m512 q1 = fold_quarters(fold_halves(a[1].v, a[5].v), fold_halves(a[3].v, a[7].v));
  const __m512 pairs = fold_pairs(q0, q1);  // quarter: (0, 1), (4, 5), (2, 3), (6, 7)
  const __m512 sums = fold_last(pairs, pairs);
  const __m512i order = _mm512_setr_epi32(0, 1, 8, 9, 4, 5, 12, 13, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums)));
}
inline void v_fold4(const Vec* a, float* out) {
  const __m512 q = fold_quarters(fold_halves(a[0].v, a[1].v), fold_halves(a[2].v, a[3].v));
  const __m512 sums = fold_last(fold_pairs(q, q), fold_pairs(q, q));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(order, sums)));
}

}  // namespace tensorfold::TF_ISA
