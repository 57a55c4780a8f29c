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

__device__ __forceinline__ Bf16x2 low_twice(uint32_t v) { return __byte_perm(v, v, 0x1010); }
__device__ __forceinline__ Bf16x2 high_twice(uint32_t v) { return __byte_perm(v, v, 0x3232); }

/// Eight 4-bit codes to eight values. 0x4300 | q is 128 + q in bf16, the subtraction is exact, and the fma rounds once.
__device__ __forceinline__ void values_of_codes4(uint32_t codes, Bf16x2 scale, Bf16x2 bias, Bf16x2 (&out)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const Bf16x2 raised = and_or(codes >> (4 * j), 0x000f000fu, 0x43004300u);
    out[j] = fma_bf16x2(fma_bf16x2(raised, kBf16One, 0xc300c300u), scale, bias);
  }
}

__device__ __forceinline__ void values_of_codes4(uint32_t codes, uint32_t scale_bias, Bf16x2 (&out)[4]) {
  values_of_codes4(codes, low_twice(scale_bias), high_twice(scale_bias), out);
}

/// Eight 8-bit codes to eight values. 0x4b000000 | q is 2^23 + q in fp32; q has 8 significant bits, so the upper half
/// of its fp32 form is its bf16 form.
__device__ __forceinline__ void values_of_codes8(uint2 codes, Bf16x2 scale, Bf16x2 bias, Bf16x2 (&out)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t word = j < 2 ? codes.x : codes.y;
    const uint32_t at = 2 * (j % 2);
    const float low = __fadd_rn(__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + at)), -8388608.0f);
    const float high = __fadd_rn(__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7441 + at)), -8388608.0f);
    const Bf16x2 pair = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
    out[j] = fma_bf16x2(pair, scale, bias);
  }
}

__device__ __forceinline__ void values_of_codes8(uint2 codes, uint32_t scale_bias, Bf16x2 (&out)[4]) {
  values_of_codes8(codes, low_twice(scale_bias), high_twice(scale_bias), out);
}

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

/// A lane's part of a stage in registers (skinny kernels), and of half a stage read from shared memory (tile kernels).
template <CudaWeightKind kKind, int kSets>
struct WeightStage;

template <int kSets>
struct WeightScales;
template <>
struct WeightScales<1> {
  uint2 v;
  __device__ __forceinline__ void load(const uint8_t* p, bool present) { load_stream8(v, p, present); }
  __device__ __forceinline__ uint2 of(int /*half*/) const { return v; }
};
template <>
struct WeightScales<2> {
  uint4 v;
  __device__ __forceinline__ void load(const uint8_t* p, bool present) { load_stream16(v, p, present); }
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
  static __device__ __forceinline__ void shared_fragments(uint32_t stage, int half, int lane, Bf16x2 (&a)[2][4]) {
    unpack(load_shared16(stage + bf16_offset(half, 0, lane)), a[0]);
    unpack(load_shared16(stage + bf16_offset(half, 1, lane)), a[1]);
  }
};

template <int kSets>
struct WeightStage<CudaWeightKind::kAffine4, kSets> {
  static constexpr CudaWeightKind kKind = CudaWeightKind::kAffine4;
  uint4 codes;
  WeightScales<kSets> scales;
  __device__ __forceinline__ void load(const uint8_t* stage, int lane, bool present) {
    load_stream16(codes, stage + affine4_offset(0, 0, lane), present);
    scales.load(stage + scale_offset(kKind, kSets, 0, lane / 4, 0), present);
  }
  static __device__ __forceinline__ void convert(uint2 codes, uint2 scales, Bf16x2 (&a)[2][4]) {
    Bf16x2 row[4], upper[4];
    values_of_codes4(codes.x, scales.x, row);
    values_of_codes4(codes.y, scales.y, upper);
    fragments_of_rows(row, upper, a);
  }
  __device__ __forceinline__ void fragments(int half, Bf16x2 (&a)[2][4]) const {
    convert(half == 0 ? make_uint2(codes.x, codes.y) : make_uint2(codes.z, codes.w), scales.of(half), a);
  }
  static __device__ __forceinline__ void shared_fragments(uint32_t stage, int half, int lane, Bf16x2 (&a)[2][4]) {
    convert(load_shared8(stage + affine4_offset(half, 0, lane)),
            load_shared8(stage + scale_offset(kKind, kSets, kSets == 2 ? half : 0, lane / 4, 0)), a);
  }
};

template <int kSets>
struct WeightStage<CudaWeightKind::kAffine8, kSets> {
  static constexpr CudaWeightKind kKind = CudaWeightKind::kAffine8;
  uint4 codes[2];
  WeightScales<kSets> scales;
  __device__ __forceinline__ void load(const uint8_t* stage, int lane, bool present) {
    load_stream16(codes[0], stage + affine8_offset(0, 0, lane), present);
    load_stream16(codes[1], stage + affine8_offset(1, 0, lane), present);
    scales.load(stage + scale_offset(kKind, kSets, 0, lane / 4, 0), present);
  }
  static __device__ __forceinline__ void convert(uint4 codes, uint2 scales, Bf16x2 (&a)[2][4]) {
    Bf16x2 row[4], upper[4];
    values_of_codes8(make_uint2(codes.x, codes.y), scales.x, row);
    values_of_codes8(make_uint2(codes.z, codes.w), scales.y, upper);
    fragments_of_rows(row, upper, a);
  }
  __device__ __forceinline__ void fragments(int half, Bf16x2 (&a)[2][4]) const {
    convert(codes[half], scales.of(half), a);
  }
  static __device__ __forceinline__ void shared_fragments(uint32_t stage, int half, int lane, Bf16x2 (&a)[2][4]) {
    convert(load_shared16(stage + affine8_offset(half, 0, lane)),
            load_shared8(stage + scale_offset(kKind, kSets, kSets == 2 ? half : 0, lane / 4, 0)), a);
  }
};

}  // namespace tensorfold
