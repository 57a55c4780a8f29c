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
  constexpr Bf16x2 kMinusZero = 0x80008000;  // a product plus it is the product
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

/// Fragments of both halves of a stage: WeightStage::fragments, but where `bad` becomes NaN.
template <CudaWeightKind kKind, int kSets>
__device__ __forceinline__ void quick_fragments(const WeightStage<kKind, kSets>& stage, Bf16x2& bad,
                                                Bf16x2 (&a)[2][2][4]) {
  if constexpr (kKind == CudaWeightKind::kBf16) {
    stage.fragments(0, a[0]);
    stage.fragments(1, a[1]);
  } else {
    QuickScale s[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half < kSets) {
        const uint2 scales = stage.scales.of(half);
        s[0] = quick_scale(scales.x, bad);
        s[1] = quick_scale(scales.y, bad);
      }
      Bf16x2 row[4], upper[4];
      if constexpr (kKind == CudaWeightKind::kAffine4) {
        quick_values4(half == 0 ? stage.codes.x : stage.codes.z, s[0], row);
        quick_values4(half == 0 ? stage.codes.y : stage.codes.w, s[1], upper);
      } else {
        quick_values8(make_uint2(stage.codes[half].x, stage.codes[half].y), s[0], row);
        quick_values8(make_uint2(stage.codes[half].z, stage.codes[half].w), s[1], upper);
      }
      fragments_of_rows(row, upper, a[half]);
    }
  }
}

}  // namespace tensorfold
