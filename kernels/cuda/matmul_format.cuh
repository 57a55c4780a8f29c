// From packed weights to the A fragments of mma.m16n8k16.
//
// The order inside a block of 32 columns. mma's k places are a sum's terms, and which column stands at which place is
// ours to choose as long as it is always the same. Step s (0, 1) of block b has at places 2t, 2t + 1 columns
// 32 b + 8 t + 4 s + {0, 1} and at places 2t + 8, 2t + 9 columns 32 b + 8 t + 4 s + {2, 3}. So a lane needs of each row
// 8 consecutive columns of the block: one 16-byte load of activations, or one of packed weights.
#pragma once

#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/matmul_views.h"
#include "kernels/cuda/mma.cuh"

namespace tensorfold {

/// Column, inside a block of 32, of word `word` (two values) of lane t's 16 bytes; word 2 s + h is step s, places
/// 2t + 8h, 2t + 8h + 1.
__host__ __device__ constexpr int column_of_word(int t, int word) { return 8 * t + 2 * word; }

/// The view that a block belongs to.
__device__ __forceinline__ int view_of_block(const MatmulArgs& args, int block) {
  int v = 0;
  while (v + 1 < args.view_count && block >= args.views[v + 1].first_block) ++v;
  return v;
}

/// A half of a register twice, written so that it becomes a modifier of the instruction that uses it.
__device__ __forceinline__ Bf16x2 low_half(uint32_t v) {
  Bf16x2 d;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(d) : "r"(v));
  return d;
}
__device__ __forceinline__ Bf16x2 high_half(uint32_t v) {
  Bf16x2 d;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(d) : "r"(v));
  return d;
}

/// Eight codes of a row and their scale and bias (one word, as packed) to eight values: fma(scale, code, bias) in bf16,
/// one rounding of the exact value whichever way it is computed. (FP8: the two parts of a scale.)
template <CudaWeightKind kKind>
struct AffineValues;

/// The 8 low bits of a bf16 number, with zeros above them, are an integer times 2^-133: subnormal numbers and those of
/// the lowest exponent have the same spacing. So a code that is cut out of its word is a number as it stands, q 2^-133
/// or, four bits higher, q 2^-129; PTX keeps subnormal numbers in fma.rn.bf16x2. Scales are packed times 2^133.
template <>
struct AffineValues<CudaWeightKind::kAffine4> {
  uint32_t low, high;  // for codes in the low and in the high half of a byte
  __device__ __forceinline__ explicit AffineValues(uint32_t scale_bias)
      : low(scale_bias), high(fma_bf16x2(scale_bias, 0x3f803d80, 0x80008000)) {}  // scale 2^-4, bias; exact
  __device__ __forceinline__ void of(uint32_t codes, Bf16x2 (&out)[4]) const {
    const uint32_t upper = codes >> 8;
    out[0] = fma_bf16x2(codes & 0x000f000fu, low_half(low), high_half(low));
    out[1] = fma_bf16x2(codes & 0x00f000f0u, low_half(high), high_half(high));
    out[2] = fma_bf16x2(upper & 0x000f000fu, low_half(low), high_half(low));
    out[3] = fma_bf16x2(upper & 0x00f000f0u, low_half(high), high_half(high));
  }
};

template <>
struct AffineValues<CudaWeightKind::kAffine8> {
  uint32_t scale_bias;
  __device__ __forceinline__ explicit AffineValues(uint32_t word) : scale_bias(word) {}
  __device__ __forceinline__ void of(uint2 codes, Bf16x2 (&out)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t pair = __byte_perm(j < 2 ? codes.x : codes.y, 0, j % 2 == 0 ? 0x4140 : 0x4342);
      out[j] = fma_bf16x2(pair, low_half(scale_bias), high_half(scale_bias));
    }
  }
};

/// 0x4300 | q is 128 + q in bf16, the subtraction is exact, and the fma rounds once.
template <>
struct AffineValues<CudaWeightKind::kAffine4Wide> {
  uint32_t scale_bias;
  __device__ __forceinline__ explicit AffineValues(uint32_t word) : scale_bias(word) {}
  __device__ __forceinline__ void of(uint32_t codes, Bf16x2 (&out)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Bf16x2 raised = and_or(codes >> (4 * j), 0x000f000fu, 0x43004300u);
      out[j] = fma_bf16x2(fma_bf16x2(raised, kBf16One, 0xc300c300u), low_half(scale_bias), high_half(scale_bias));
    }
  }
};

/// 0x4b000000 | q is 2^23 + q in fp32; q has 8 significant bits, so the upper half of its fp32 form is its bf16 form.
template <>
struct AffineValues<CudaWeightKind::kAffine8Wide> {
  uint32_t scale_bias;
  __device__ __forceinline__ explicit AffineValues(uint32_t word) : scale_bias(word) {}
  __device__ __forceinline__ void of(uint2 codes, Bf16x2 (&out)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t word = j < 2 ? codes.x : codes.y;
      const uint32_t at = 2 * (j % 2);
      const float low = __fadd_rn(__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + at)), -8388608.0f);
      const float high = __fadd_rn(__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7441 + at)), -8388608.0f);
      const Bf16x2 pair = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
      out[j] = fma_bf16x2(pair, low_half(scale_bias), high_half(scale_bias));
    }
  }
};

/// FP8: a code's sign, exponent and mantissa stand where bf16 has them, so it is a number as it is cut out, c 2^-120
/// (subnormal codes too: bf16's subnormal numbers are spaced alike). Scales are packed times 2^120, in two parts: the
/// fma rounds once, and what the parts lose changes no weight (matmul_pack_scales.h).
__device__ __forceinline__ Bf16x2 scaled_by_parts(Bf16x2 code, Bf16x2 hi, Bf16x2 lo) {
  constexpr Bf16x2 kMinusZero = 0x80008000;
  return fma_bf16x2(code, hi, fma_bf16x2(code, lo, kMinusZero));
}
template <>
struct AffineValues<CudaWeightKind::kFp8> {
  uint32_t parts;
  __device__ __forceinline__ explicit AffineValues(uint32_t word) : parts(word) {}
  __device__ __forceinline__ void of(uint2 codes, Bf16x2 (&out)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = i == 0 ? codes.x : codes.y;
      const Bf16x2 first = word & 0x87f087f0u;
      const Bf16x2 second = and_or(word >> 4, 0x07000700u, (word << 4) & 0x80f080f0u);
      out[2 * i] = scaled_by_parts(first, low_half(parts), high_half(parts));
      out[2 * i + 1] = scaled_by_parts(second, low_half(parts), high_half(parts));
    }
  }
};

/// FP4: the same with c 2^-126.
__device__ __forceinline__ void fp4_codes(uint32_t word, Bf16x2 (&out)[4]) {
  constexpr uint32_t kMask = 0x81c081c0u;
  out[0] = word & kMask;
  out[1] = (word << 3) & kMask;
  out[2] = (word << 6) & kMask;
  out[3] = and_or(word << 1, 0x80008000u, and_or(word >> 3, 0x00800080u, (word >> 5) & 0x01400140u));
}
__device__ __forceinline__ float fp4_scale(uint32_t byte, uint4 factors, bool upper) {
  const float number = __fmul_rn(__uint_as_float(byte * factors.z), __uint_as_float(factors.w));
  return __fmul_rn(number, __uint_as_float(upper ? factors.y : factors.x));
}
/// The parts of the scales of row g (low halves) and row g + 8 of a half of a stage.
struct Fp4Parts {
  Bf16x2 hi, lo;
  __device__ __forceinline__ Fp4Parts(uint32_t scales, uint4 factors, int half) {
    const uint32_t both = scales >> (16 * half);
    const float low = fp4_scale(both & 255, factors, false), high = fp4_scale(both >> 8 & 255, factors, true);
    hi = bf16_pair(low, high);
    lo = bf16_pair(__fsub_rn(low, __uint_as_float(hi << 16)), __fsub_rn(high, __uint_as_float(hi & 0xffff0000u)));
  }
  __device__ __forceinline__ void of(uint32_t word, bool upper, Bf16x2 (&out)[4]) const {
    Bf16x2 codes[4];
    fp4_codes(word, codes);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      out[j] = upper ? scaled_by_parts(codes[j], high_half(hi), high_half(lo))
                     : scaled_by_parts(codes[j], low_half(hi), low_half(lo));
    }
  }
};

/// The rows g and g + 8 of a block as the two steps' A fragments.
__device__ __forceinline__ void fragments_of_rows(const Bf16x2 (&row)[4], const Bf16x2 (&upper)[4], Bf16x2 (&a)[2][4]) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    a[s][0] = row[2 * s];
    a[s][1] = upper[2 * s];
    a[s][2] = row[2 * s + 1];
    a[s][3] = upper[2 * s + 1];
  }
}

/// A lane's part of a stage in registers.
template <CudaWeightKind kKind, int kSets>
struct WeightStage;

template <int kSets>
struct WeightScales;
template <>
struct WeightScales<1> {
  uint2 v;
  __device__ __forceinline__ void load(const uint8_t* p, bool present) { load_stream8(v, p, present); }
  __device__ __forceinline__ void load_shared(uint32_t p) { v = load_shared8(p); }
  __device__ __forceinline__ uint2 of(int /*half*/) const { return v; }
};
template <>
struct WeightScales<2> {
  uint4 v;
  __device__ __forceinline__ void load(const uint8_t* p, bool present) { load_stream16(v, p, present); }
  __device__ __forceinline__ void load_shared(uint32_t p) { v = load_shared16(p); }
  __device__ __forceinline__ uint2 of(int half) const {
    return half == 0 ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
  }
};

template <>
struct WeightStage<CudaWeightKind::kBf16, 0> {
  uint4 v[4];
  __device__ __forceinline__ void load(const uint8_t* stage, int lane, bool present) {
#pragma unroll
    for (int i = 0; i < 4; ++i) load_stream16(v[i], stage + bf16_offset(i / 2, i % 2, lane), present);
  }
  static __device__ __forceinline__ void unpack(uint4 v, Bf16x2 (&a)[4]) {
    a[0] = v.x;
    a[1] = v.y;
    a[2] = v.z;
    a[3] = v.w;
  }
  __device__ __forceinline__ void fragments(int half, Bf16x2 (&a)[2][4]) const {
    unpack(v[2 * half], a[0]);
    unpack(v[2 * half + 1], a[1]);
  }
  __device__ __forceinline__ void load_shared(uint32_t stage, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = load_shared16(stage + bf16_offset(i / 2, i % 2, lane));
  }
};

template <int kSets>
struct WeightStage<CudaWeightKind::kFp4, kSets> {
  uint4 codes, factors;
  uint32_t scales;
  __device__ __forceinline__ void load(const uint8_t* stage, int lane, bool present) {
    load_stream16(codes, stage + lane * 16, present);
    load_stream4(scales, stage + fp4_scale_offset(kSets, lane), present);
    load_stream16(factors, stage + fp4_factors_offset(kSets), present);
  }
  __device__ __forceinline__ void load_shared(uint32_t stage, int lane) {
    codes = load_shared16(stage + lane * 16);
    scales = load_shared4(stage + fp4_scale_offset(kSets, lane));
    factors = load_shared16(stage + fp4_factors_offset(kSets));
  }
  __device__ __forceinline__ void fragments(int half, Bf16x2 (&a)[2][4]) const {
    const Fp4Parts parts(scales, factors, half);
    Bf16x2 row[4], upper[4];
    parts.of(half == 0 ? codes.x : codes.z, false, row);
    parts.of(half == 0 ? codes.y : codes.w, true, upper);
    fragments_of_rows(row, upper, a);
  }
};

/// Affine codes and FP8, 4 or 8 bits. Per half of the stage, codes of row g and of row g + 8.
template <CudaWeightKind kKind, int kSets>
struct WeightStage {
  static constexpr bool kFour = kept_bits(kKind) == 4;
  uint4 codes[kFour ? 1 : 2];
  WeightScales<kSets> scales;
  __device__ __forceinline__ void load(const uint8_t* stage, int lane, bool present) {
    load_stream16(codes[0], stage + lane * 16, present);
    if constexpr (!kFour) load_stream16(codes[1], stage + affine8_offset(1, 0, lane), present);
    scales.load(stage + scale_offset(kKind, kSets, 0, lane / 4, 0), present);
  }
  /// The same from shared memory.
  __device__ __forceinline__ void load_shared(uint32_t stage, int lane) {
    codes[0] = load_shared16(stage + lane * 16);
    if constexpr (!kFour) codes[1] = load_shared16(stage + affine8_offset(1, 0, lane));
    scales.load_shared(stage + scale_offset(kKind, kSets, 0, lane / 4, 0));
  }
  __device__ __forceinline__ void fragments(int half, Bf16x2 (&a)[2][4]) const {
    const uint2 scale = scales.of(half);
    const AffineValues<kKind> low(scale.x), high(scale.y);
    Bf16x2 row[4], upper[4];
    if constexpr (kFour) {
      low.of(half == 0 ? codes[0].x : codes[0].z, row);
      high.of(half == 0 ? codes[0].y : codes[0].w, upper);
    } else {
      low.of(make_uint2(codes[half].x, codes[half].y), row);
      high.of(make_uint2(codes[half].z, codes[half].w), upper);
    }
    fragments_of_rows(row, upper, a);
  }
};

}  // namespace tensorfold
