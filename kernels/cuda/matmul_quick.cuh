// Affine codes to bf16 values in fewer instructions, for scales below 2^-5.
//
// The 8 low bits of a bf16 number, with zeros above them, are an integer times 2^-133: subnormal numbers and those of
// the lowest exponent have the same spacing. So a code that is cut out of its word is a number as it stands, q 2^-133
// or, four bits higher, q 2^-129, and fma(that, scale 2^133, bias) is fma(q, scale, bias): one rounding of the same
// exact value, so the same bits (PTX keeps subnormal numbers in fma.rn.bf16x2). A scale of 2^-5 or more becomes
// infinite; `bad` then turns into NaN, and the caller does the work again the general way.
#pragma once

#include "kernels/cuda/matmul_format.cuh"

namespace tensorfold {

struct QuickScale {
  Bf16x2 low, high, bias;  // scale 2^133, scale 2^129, each twice
};

__device__ __forceinline__ QuickScale quick_scale(uint32_t scale_bias, Bf16x2& bad) {
  constexpr Bf16x2 kMinusZero = 0x80008000;                              // a product plus it is the product
  const Bf16x2 raised = fma_bf16x2(scale_bias, 0x3f807f00, kMinusZero);  // scale 2^127, bias
  const Bf16x2 scale = low_twice(raised);
  QuickScale quick;
  quick.low = fma_bf16x2(scale, 0x42804280, kMinusZero);   // 2^6
  quick.high = fma_bf16x2(scale, 0x40804080, kMinusZero);  // 2^2
  quick.bias = high_twice(raised);
  bad = fma_bf16x2(quick.low, 0, bad);
  return quick;
}

__device__ __forceinline__ void quick_values4(uint32_t codes, const QuickScale& s, Bf16x2 (&out)[4]) {
  const uint32_t upper = codes >> 8;
  out[0] = fma_bf16x2(codes & 0x000f000fu, s.low, s.bias);
  out[1] = fma_bf16x2(codes & 0x00f000f0u, s.high, s.bias);
  out[2] = fma_bf16x2(upper & 0x000f000fu, s.low, s.bias);
  out[3] = fma_bf16x2(upper & 0x00f000f0u, s.high, s.bias);
}

__device__ __forceinline__ void quick_values8(uint2 codes, const QuickScale& s, Bf16x2 (&out)[4]) {
  out[0] = fma_bf16x2(__byte_perm(codes.x, 0, 0x4140), s.low, s.bias);
  out[1] = fma_bf16x2(__byte_perm(codes.x, 0, 0x4342), s.low, s.bias);
  out[2] = fma_bf16x2(__byte_perm(codes.y, 0, 0x4140), s.low, s.bias);
  out[3] = fma_bf16x2(__byte_perm(codes.y, 0, 0x4342), s.low, s.bias);
}

/// A lane's part of a stage, as WeightStage, read from shared memory.
template <CudaWeightKind kKind, int kSets>
struct QuickStage {
  uint32_t codes[2][kKind == CudaWeightKind::kAffine4 ? 2 : 4];  // of rows g and g + 8
  uint32_t scales[kSets][2];

  __device__ __forceinline__ void load(uint32_t stage, int lane) {
    if constexpr (kKind == CudaWeightKind::kAffine4) {
      const uint4 v = load_shared16(stage + affine4_offset(0, 0, lane));
      codes[0][0] = v.x, codes[1][0] = v.y, codes[0][1] = v.z, codes[1][1] = v.w;
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 v = load_shared16(stage + affine8_offset(half, 0, lane));
        codes[0][2 * half] = v.x, codes[0][2 * half + 1] = v.y;
        codes[1][2 * half] = v.z, codes[1][2 * half + 1] = v.w;
      }
    }
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const uint2 v = load_shared8(stage + scale_offset(kKind, kSets, set, lane / 4, 0));
      scales[set][0] = v.x, scales[set][1] = v.y;
    }
  }

  /// WeightStage::fragments of both halves, but where `bad` becomes NaN.
  __device__ __forceinline__ void fragments(Bf16x2& bad, Bf16x2 (&a)[2][2][4]) const {
    QuickScale s[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Bf16x2 rows[2][4];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (half < kSets) s[r] = quick_scale(scales[half][r], bad);
        if constexpr (kKind == CudaWeightKind::kAffine4) {
          quick_values4(codes[r][half], s[r], rows[r]);
        } else {
          quick_values8(make_uint2(codes[r][2 * half], codes[r][2 * half + 1]), s[r], rows[r]);
        }
      }
      fragments_of_rows(rows[0], rows[1], a[half]);
    }
  }
};

/// bf16 weights are their values.
template <>
struct QuickStage<CudaWeightKind::kBf16, 0> {
  WeightStage<CudaWeightKind::kBf16, 0> stage;
  __device__ __forceinline__ void load(uint32_t at, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) stage.v[i] = load_shared16(at + bf16_offset(i / 2, i % 2, lane));
  }
  __device__ __forceinline__ void fragments(Bf16x2& /*bad*/, Bf16x2 (&a)[2][2][4]) const {
    stage.fragments(0, a[0]);
    stage.fragments(1, a[1]);
  }
};

}  // namespace tensorfold
