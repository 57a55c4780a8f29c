// The permutation from staged rows to tiles, for the pack kernel and for its test on a host.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/matmul_pack_rows.h"

namespace tensorfold {

/// Eight codes, column i at bits 4 i, to the word that the kernels take pairs from.
__host__ __device__ inline uint32_t interleave_codes4(uint32_t codes) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) word |= (codes >> (4 * i) & 15) << affine4_bit(i);
  return word;
}

/// The same for FP4: a half of the word has the codes of columns 0, 2, 4, 6 (low half) or 1, 3, 5, 7, a code's sign and
/// magnitude at the bits that fp4_bit() says.
__host__ __device__ inline uint32_t interleave_fp4(uint32_t codes) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) {
    const uint32_t code = codes >> (4 * i) & 15;
    for (int b = 0; b < 4; ++b) word |= (code >> b & 1) << (fp4_bit(i / 2, b) + 16 * (i % 2));
  }
  return word;
}
/// Four e4m3 codes, a byte each, to a word: columns 0 and 2 in its low half, 1 and 3 in its high one.
__host__ __device__ inline uint32_t interleave_fp8(uint32_t codes) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = codes >> (8 * i) & 255;
    for (int b = 0; b < 8; ++b) word |= (code >> b & 1) << (fp8_bit(i / 2, b) + 16 * (i % 2));
  }
  return word;
}

/// What the kernels have at the end of each stage of kFp4.
__host__ __device__ inline uint4 factors_piece(const Fp4Factors& low, const Fp4Factors& high) {
  const auto bits = [](float value) {
    union {
      float f;
      uint32_t u;
    } both;
    both.f = value;
    return both.u;
  };
  return make_uint4(bits(low.factor), bits(high.factor), low.multiplier, bits(low.first));
}

/// Bytes [16 index, 16 index + 16) of `tiles` tiles, from their staged rows. kFp4: `factors` is its factors_piece().
__host__ __device__ inline uint4 packed_piece(const uint8_t* staged, CudaWeightKind kind, int sets, uint4 factors,
                                              int64_t tiles, int64_t stages, int64_t index) {
  const int64_t row_bytes = staged_row_bytes(kind, stages);
  const int pieces = stage_bytes(kind, sets) / 16;
  const int piece = static_cast<int>(index % pieces);
  const int64_t stage = index / pieces % stages, tile = index / pieces / stages;
  const int lane = piece % 32, g = lane / 4, t = lane % 4;
  const uint8_t* row = staged + (tile * kTileRows + g) * row_bytes;
  const uint8_t* upper = row + 8 * row_bytes;
  const auto word = [](const uint8_t* from) { return *reinterpret_cast<const uint32_t*>(from); };
  if (kind == CudaWeightKind::kBf16) {
    const int64_t at = stage * 128 + (32 * (piece / 64) + 8 * t + 4 * (piece / 32 % 2)) * 2;
    return make_uint4(word(row + at), word(upper + at), word(row + at + 4), word(upper + at + 4));
  }
  if (kind == CudaWeightKind::kFp4) {
    if (piece == pieces - 1) return factors;
    if (piece < 32) {
      const int64_t at = stage * 32 + 4 * t;
      return make_uint4(interleave_fp4(word(row + at)), interleave_fp4(word(upper + at)),
                        interleave_fp4(word(row + at + 16)), interleave_fp4(word(upper + at + 16)));
    }
    const uint8_t* bytes = staged + tiles * kTileRows * row_bytes;
    uint32_t words[4];
    for (int w = 0; w < 4; ++w) {
      const int runs = 2 * sets, i = (piece - 32) * 4 + w, run = i % runs;  // (g, which 16 or 8 of 32 columns)
      words[w] = 0;
      for (int b = 0; b < 4; ++b) {
        const int64_t from_row = tile * kTileRows + i / runs + 8 * (b % 2);
        const int64_t at = (from_row * stages + stage) * 2 * runs + runs * (b / 2) + run;
        words[w] |= static_cast<uint32_t>(bytes[at]) << (8 * b);
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  if (kept_bits(kind) == 4 && piece < 32) {
    const int64_t at = stage * 32 + 4 * t;
    return make_uint4(interleave_codes4(word(row + at)), interleave_codes4(word(upper + at)),
                      interleave_codes4(word(row + at + 16)), interleave_codes4(word(upper + at + 16)));
  }
  if (kept_bits(kind) == 8 && piece < 64) {
    const int64_t at = stage * 64 + 32 * (piece / 32) + 8 * t;
    const uint4 codes = make_uint4(word(row + at), word(row + at + 4), word(upper + at), word(upper + at + 4));
    if (kind != CudaWeightKind::kFp8) return codes;
    return make_uint4(interleave_fp8(codes.x), interleave_fp8(codes.y), interleave_fp8(codes.z),
                      interleave_fp8(codes.w));
  }
  const uint8_t* scales = staged + tiles * kTileRows * row_bytes;
  uint32_t words[4];
  for (int w = 0; w < 4; ++w) {
    const int i = (piece - 8 * kept_bits(kind)) * 4 + w;  // (g, set, upper), the last fastest
    const int row_in_tile = i / (2 * sets) + 8 * (i % 2), set = i / 2 % sets;
    words[w] = word(scales + 4 * ((tile * kTileRows + row_in_tile) * stages * sets + stage * sets + set));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace tensorfold
