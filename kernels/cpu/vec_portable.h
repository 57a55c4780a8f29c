// The 16-lane vector in portable C++: an array. Included by isa_portable.cc only, which is compiled without target
// flags, so that it runs on every machine of the architecture.
#pragma once

#include <cstdint>
#include <cstring>

namespace tensorfold::TF_ISA {

struct Vec {
  float f[16];
};
struct IVec {
  int32_t i[16];
};
struct Mask {
  bool m[16];
};

inline constexpr int kTileRows = 2;
inline constexpr int kTileInputs = 2;
inline constexpr int kCodedInputs = 1;
inline constexpr int kScoreBlocks = 1;
inline constexpr int kBurnChains = 4;

template <typename F>
inline Vec lanes(F f) {
  Vec r;
  for (int l = 0; l < 16; ++l) r.f[l] = f(l);
  return r;
}
template <typename F>
inline IVec int_lanes(F f) {
  IVec r;
  for (int l = 0; l < 16; ++l) r.i[l] = f(l);
  return r;
}
template <typename F>
inline Mask mask_lanes(F f) {
  Mask r;
  for (int l = 0; l < 16; ++l) r.m[l] = f(l);
  return r;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline Vec v_set1(float x) {
  return lanes([&](int) { return x; });
}
inline Vec v_zero() { return v_set1(0.0f); }
inline Vec v_load(const float* p) {
  Vec r;
  std::memcpy(r.f, p, sizeof r.f);
  return r;
}
inline void v_store(float* p, Vec a) { std::memcpy(p, a.f, sizeof a.f); }
inline Vec v_load_n(const float* p, int64_t n) {
  Vec r = v_zero();
  std::memcpy(r.f, p, static_cast<size_t>(n) * sizeof(float));
  return r;
}
inline void v_store_n(float* p, Vec a, int64_t n) { std::memcpy(p, a.f, static_cast<size_t>(n) * sizeof(float)); }
inline Vec v_add(Vec a, Vec b) {
  return lanes([&](int l) { return a.f[l] + b.f[l]; });
}
inline Vec v_sub(Vec a, Vec b) {
  return lanes([&](int l) { return a.f[l] - b.f[l]; });
}
inline Vec v_mul(Vec a, Vec b) {
  return lanes([&](int l) { return a.f[l] * b.f[l]; });
}
inline Vec v_div(Vec a, Vec b) {
  return lanes([&](int l) { return a.f[l] / b.f[l]; });
}
inline Vec v_sqrt(Vec a) {
  return lanes([&](int l) { return __builtin_sqrtf(a.f[l]); });
}
inline Vec v_fma(Vec a, Vec b, Vec c) {
  return lanes([&](int l) { return __builtin_fmaf(a.f[l], b.f[l], c.f[l]); });
}
inline Mask m_greater(Vec a, Vec b) {
  return mask_lanes([&](int l) { return a.f[l] > b.f[l]; });
}
inline Mask m_unordered(Vec a) {
  return mask_lanes([&](int l) { return a.f[l] != a.f[l]; });
}
inline Mask m_first(int64_t n) {
  return mask_lanes([&](int l) { return l < n; });
}
inline bool m_any(Mask m) {
  bool any = false;
  for (int l = 0; l < 16; ++l) any |= m.m[l];
  return any;
}
inline Vec v_select(Mask m, Vec yes, Vec no) {
  return lanes([&](int l) { return m.m[l] ? yes.f[l] : no.f[l]; });
}

inline IVec i_set1(int32_t x) {
  return int_lanes([&](int) { return x; });
}
inline IVec i_bits(Vec a) {
  IVec r;
  std::memcpy(r.i, a.f, sizeof r.i);
  return r;
}
inline Vec v_bits(IVec a) {
  Vec r;
  std::memcpy(r.f, a.i, sizeof r.f);
  return r;
}
inline int32_t wrap(uint32_t x) { return static_cast<int32_t>(x); }
inline uint32_t u32(int32_t x) { return static_cast<uint32_t>(x); }
inline IVec i_add(IVec a, IVec b) {
  return int_lanes([&](int l) { return wrap(u32(a.i[l]) + u32(b.i[l])); });
}
inline IVec i_sub(IVec a, IVec b) {
  return int_lanes([&](int l) { return wrap(u32(a.i[l]) - u32(b.i[l])); });
}
inline IVec i_and(IVec a, IVec b) {
  return int_lanes([&](int l) { return a.i[l] & b.i[l]; });
}
inline IVec i_or(IVec a, IVec b) {
  return int_lanes([&](int l) { return a.i[l] | b.i[l]; });
}
template <int N>
inline IVec i_shl(IVec a) {
  return int_lanes([&](int l) { return wrap(u32(a.i[l]) << N); });
}
template <int N>
inline IVec i_sar(IVec a) {
  return int_lanes([&](int l) { return a.i[l] >> N; });
}
inline Vec v_from_int(IVec a) {
  return lanes([&](int l) { return static_cast<float>(a.i[l]); });
}

inline uint16_t half_at(const uint16_t* p, int l) {
  uint16_t h;
  std::memcpy(&h, p + l, 2);
  return h;
}
inline Vec v_load_bf16(const uint16_t* p) {
  return lanes([&](int l) { return float_of(static_cast<uint32_t>(half_at(p, l)) << 16); });
}
inline float widen_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 31;
  const uint32_t mantissa = h & 0x3ff;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return float_of(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
}
inline Vec v_load_f16(const uint16_t* p) {
  return lanes([&](int l) { return widen_f16(half_at(p, l)); });
}

// e4m3 codes as numbers, times 2^-8: their exponent and mantissa are those of an f16 number, whose bias is 8 more. Not
// for the codes of NaN.
inline Vec v_load_e4m3(const uint8_t* p) {
  return lanes([&](int l) { return widen_f16(static_cast<uint16_t>((p[l] & 0x80) << 8 | (p[l] & 0x7f) << 7)); });
}

// Code planes: lane l of the 4-bit plane is at bit 32 * (l % 2) + 4 * (l / 2), of the others at bits * l.
inline IVec i_codes8(const uint8_t* p) {
  return int_lanes([&](int l) { return static_cast<int32_t>(p[l]); });
}
inline IVec i_codes4(const uint8_t* p) {
  return int_lanes([&](int l) { return (p[4 * (l % 2) + l / 4] >> (4 * (l / 2 % 2))) & 15; });
}
// Eight numbers by the low three bits of 4-bit codes, minus where the highest is set.
inline Vec v_pick_signed(const float* eight, IVec codes) {
  return lanes([&](int l) { return (codes.i[l] & 8) != 0 ? -eight[codes.i[l] & 7] : eight[codes.i[l] & 7]; });
}
inline IVec i_codes2(const uint8_t* p) {
  return int_lanes([&](int l) { return (p[l / 4] >> (2 * (l % 4))) & 3; });
}
inline IVec i_codes1(const uint8_t* p) {
  return int_lanes([&](int l) { return (p[l / 8] >> (l % 8)) & 1; });
}

// The fixed fold of 16 lanes: l + 8, l + 4, l + 2, l + 1.
inline float v_fold(Vec a) {
  for (int half = 8; half >= 1; half /= 2) {
    for (int l = 0; l < half; ++l) a.f[l] = a.f[l] + a.f[l + half];
  }
  return a.f[0];
}
// out[j] = v_fold(a[j]).
inline void v_fold4(const Vec* a, float* out) {
  for (int j = 0; j < 4; ++j) out[j] = v_fold(a[j]);
}
inline void v_fold8(const Vec* a, float* out) {
  for (int j = 0; j < 8; ++j) out[j] = v_fold(a[j]);
}
inline void v_fold16(const Vec* a, float* out) {
  for (int j = 0; j < 16; ++j) out[j] = v_fold(a[j]);
}

}  // namespace tensorfold::TF_ISA
