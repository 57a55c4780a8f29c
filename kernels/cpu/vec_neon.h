// The 16-lane vector on 64-bit Arm's Advanced SIMD: four registers. Included by isa_neon.cc only.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace tensorfold::TF_ISA {

struct Vec {
  float32x4_t a, b, c, d;
};
struct IVec {
  int32x4_t a, b, c, d;
};
struct Mask {
  uint32x4_t a, b, c, d;  // all ones or all zeros a lane
};

inline constexpr int kTileRows = 2;
inline constexpr int kTileInputs = 2;
inline constexpr int kCodedInputs = 1;
inline constexpr int kScoreBlocks = 1;
inline constexpr int kBurnChains = 6;

inline Vec v_set1(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {v, v, v, v};
}
inline Vec v_zero() { return v_set1(0.0f); }
inline Vec v_load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline void v_store(float* p, Vec x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
inline Vec v_load_n(const float* p, int64_t n) {
  float lanes[16] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(float));
  return v_load(lanes);
}
inline void v_store_n(float* p, Vec x, int64_t n) {
  float lanes[16];
  v_store(lanes, x);
  std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(float));
}
inline Vec v_add(Vec x, Vec y) {
  return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b), vaddq_f32(x.c, y.c), vaddq_f32(x.d, y.d)};
}
inline Vec v_sub(Vec x, Vec y) {
  return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b), vsubq_f32(x.c, y.c), vsubq_f32(x.d, y.d)};
}
inline Vec v_mul(Vec x, Vec y) {
  return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b), vmulq_f32(x.c, y.c), vmulq_f32(x.d, y.d)};
}
inline Vec v_div(Vec x, Vec y) {
  return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b), vdivq_f32(x.c, y.c), vdivq_f32(x.d, y.d)};
}
inline Vec v_sqrt(Vec x) { return {vsqrtq_f32(x.a), vsqrtq_f32(x.b), vsqrtq_f32(x.c), vsqrtq_f32(x.d)}; }
inline Vec v_fma(Vec x, Vec y, Vec z) {
  return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
inline Mask m_greater(Vec x, Vec y) {
  return {vcgtq_f32(x.a, y.a), vcgtq_f32(x.b, y.b), vcgtq_f32(x.c, y.c), vcgtq_f32(x.d, y.d)};
}
inline Mask m_unordered(Vec x) {
  return {vmvnq_u32(vceqq_f32(x.a, x.a)), vmvnq_u32(vceqq_f32(x.b, x.b)), vmvnq_u32(vceqq_f32(x.c, x.c)),
          vmvnq_u32(vceqq_f32(x.d, x.d))};
}
inline Mask m_first(int64_t n) {
  static const int32_t kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int32x4_t limit = vdupq_n_s32(static_cast<int32_t>(n));
  return {vcgtq_s32(limit, vld1q_s32(kIndex)), vcgtq_s32(limit, vld1q_s32(kIndex + 4)),
          vcgtq_s32(limit, vld1q_s32(kIndex + 8)), vcgtq_s32(limit, vld1q_s32(kIndex + 12))};
}
inline bool m_any(Mask m) { return vmaxvq_u32(vorrq_u32(vorrq_u32(m.a, m.b), vorrq_u32(m.c, m.d))) != 0; }
inline Vec v_select(Mask m, Vec yes, Vec no) {
  return {vbslq_f32(m.a, yes.a, no.a), vbslq_f32(m.b, yes.b, no.b), vbslq_f32(m.c, yes.c, no.c),
          vbslq_f32(m.d, yes.d, no.d)};
}

inline IVec i_set1(int32_t x) {
  const int32x4_t v = vdupq_n_s32(x);
  return {v, v, v, v};
}
inline IVec i_bits(Vec x) {
  return {vreinterpretq_s32_f32(x.a), vreinterpretq_s32_f32(x.b), vreinterpretq_s32_f32(x.c),
          vreinterpretq_s32_f32(x.d)};
}
inline Vec v_bits(IVec x) {
  return {vreinterpretq_f32_s32(x.a), vreinterpretq_f32_s32(x.b), vreinterpretq_f32_s32(x.c),
          vreinterpretq_f32_s32(x.d)};
}
inline IVec i_add(IVec x, IVec y) {
  return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b), vaddq_s32(x.c, y.c), vaddq_s32(x.d, y.d)};
}
inline IVec i_sub(IVec x, IVec y) {
  return {vsubq_s32(x.a, y.a), vsubq_s32(x.b, y.b), vsubq_s32(x.c, y.c), vsubq_s32(x.d, y.d)};
}
inline IVec i_and(IVec x, IVec y) {
  return {vandq_s32(x.a, y.a), vandq_s32(x.b, y.b), vandq_s32(x.c, y.c), vandq_s32(x.d, y.d)};
}
inline IVec i_or(IVec x, IVec y) {
  return {vorrq_s32(x.a, y.a), vorrq_s32(x.b, y.b), vorrq_s32(x.c, y.c), vorrq_s32(x.d, y.d)};
}
template <int N>
inline IVec i_shl(IVec x) {
  return {vshlq_n_s32(x.a, N), vshlq_n_s32(x.b, N), vshlq_n_s32(x.c, N), vshlq_n_s32(x.d, N)};
}
template <int N>
inline IVec i_sar(IVec x) {
  return {vshrq_n_s32(x.a, N), vshrq_n_s32(x.b, N), vshrq_n_s32(x.c, N), vshrq_n_s32(x.d, N)};
}
inline Vec v_from_int(IVec x) {
  return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)};
}

inline float32x4_t widen_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline Vec v_load_bf16(const uint16_t* p) {
  return {widen_bf16(p), widen_bf16(p + 4), widen_bf16(p + 8), widen_bf16(p + 12)};
}
inline float32x4_t widen_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline Vec v_load_f16(const uint16_t* p) {
  return {widen_f16(p), widen_f16(p + 4), widen_f16(p + 8), widen_f16(p + 12)};
}

// e4m3 codes as numbers, times 2^-8: their exponent and mantissa are those of an f16 number, whose bias is 8 more. Not
// for the codes of NaN.
inline Vec v_load_e4m3(const uint8_t* p) {
  const int8x16_t raw = vreinterpretq_s8_u8(vld1q_u8(p));
  const uint16x8_t mask = vdupq_n_u16(0xbfff);
  const uint16x8_t lo = vandq_u16(vreinterpretq_u16_s16(vshlq_n_s16(vmovl_s8(vget_low_s8(raw)), 7)), mask);
  const uint16x8_t hi = vandq_u16(vreinterpretq_u16_s16(vshlq_n_s16(vmovl_s8(vget_high_s8(raw)), 7)), mask);
  return {vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(lo))), vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(lo))),
          vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(hi))), vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(hi)))};
}

// Code planes: lane l of the 4-bit plane is at bit 32 * (l % 2) + 4 * (l / 2), of the others at bits * l.
inline IVec i_codes8(const uint8_t* p) {
  const uint8x16_t raw = vld1q_u8(p);
  const uint16x8_t lo = vmovl_u8(vget_low_u8(raw)), hi = vmovl_u8(vget_high_u8(raw));
  return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(lo))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(lo))),
          vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(hi))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(hi)))};
}
inline int32x4_t shift_and_mask(uint32x4_t word, const int32_t* right, uint32_t mask) {
  return vreinterpretq_s32_u32(vandq_u32(vshlq_u32(word, vnegq_s32(vld1q_s32(right))), vdupq_n_u32(mask)));
}
inline IVec shift_and_mask16(uint32x4_t word, const int32_t* right, uint32_t mask) {
  return {shift_and_mask(word, right, mask), shift_and_mask(word, right + 4, mask),
          shift_and_mask(word, right + 8, mask), shift_and_mask(word, right + 12, mask)};
}
inline IVec i_codes4(const uint8_t* p) {
  static const int32_t kShift[16] = {0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28};
  uint64_t word;
  std::memcpy(&word, p, 8);
  return shift_and_mask16(vreinterpretq_u32_u64(vdupq_n_u64(word)), kShift, 15);
}
// Eight numbers by the low three bits of 4-bit codes, minus where the highest is set.
inline float32x4_t pick_signed4(uint8x16x2_t eight, int32x4_t codes) {
  const uint32x4_t code = vreinterpretq_u32_s32(codes);
  // Number i is bytes 4 i to 4 i + 3.
  const uint32x4_t first = vmulq_n_u32(vandq_u32(code, vdupq_n_u32(7)), 0x04040404u);
  const uint8x16_t picked = vqtbl2q_u8(eight, vreinterpretq_u8_u32(vaddq_u32(first, vdupq_n_u32(0x03020100u))));
  const uint32x4_t minus = vandq_u32(vshlq_n_u32(code, 28), vdupq_n_u32(0x80000000u));
  return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_u8(picked), minus));
}
inline Vec v_pick_signed(const float* eight, IVec x) {
  const uint8x16x2_t numbers = {vreinterpretq_u8_f32(vld1q_f32(eight)), vreinterpretq_u8_f32(vld1q_f32(eight + 4))};
  return {pick_signed4(numbers, x.a), pick_signed4(numbers, x.b), pick_signed4(numbers, x.c),
          pick_signed4(numbers, x.d)};
}
inline IVec i_codes2(const uint8_t* p) {
  static const int32_t kShift[16] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  uint32_t word;
  std::memcpy(&word, p, 4);
  return shift_and_mask16(vdupq_n_u32(word), kShift, 3);
}
inline IVec i_codes1(const uint8_t* p) {
  static const int32_t kShift[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  uint16_t word;
  std::memcpy(&word, p, 2);
  return shift_and_mask16(vdupq_n_u32(word), kShift, 1);
}

// The fixed fold of 16 lanes: l + 8, l + 4, l + 2, l + 1.
inline float32x4_t fold_to_four(Vec x) { return vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d)); }
inline float v_fold(Vec x) {
  const float32x4_t four = fold_to_four(x);
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
// out[j] = v_fold(x[j]).
inline void v_fold4(const Vec* x, float* out) {
  float32x2_t two[4];
  for (int j = 0; j < 4; ++j) {
    const float32x4_t four = fold_to_four(x[j]);
    two[j] = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  }
  vst1q_f32(out, vpaddq_f32(vcombine_f32(two[0], two[1]), vcombine_f32(two[2], two[3])));
}
inline void v_fold8(const Vec* x, float* out) {
  v_fold4(x, out);
  v_fold4(x + 4, out + 4);
}
inline void v_fold16(const Vec* x, float* out) {
  v_fold8(x, out);
  v_fold8(x + 8, out + 8);
}

}  // namespace tensorfold::TF_ISA
