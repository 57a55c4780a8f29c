// What the kernels of experts' products share: finding a block's work on the device, and storing what it made.
#pragma once

#include <atomic>

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/experts_views.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_format.cuh"
#include "kernels/ops/ops.h"

namespace tensorfold {

/// A matrix that a block's work consists of.
struct ExpertSegment {
  const uint8_t* data;
  int64_t x_at;  // values from args.x, beyond the row's own place
  int32_t tile_bytes;
  int32_t stages;
  int32_t cols;
  int32_t tiles;
  int32_t out_cols;
  int32_t which;  // matrix of the expert
  float weight;   // of a slot
};

/// What a block does. Built by its first warp.
template <int kRows>
struct ExpertWork {
  ExpertSegment segments[kMostExpertSlots];
  int32_t pair_of[kRows];
  int32_t segment_count;
  int32_t rows;
};

/// The expert's number, or -1.
__device__ __forceinline__ int expert_at(const ExpertProductArgs& args, int row, int slot) {
  const float id = args.ids[row * args.ids_stride + slot];
  return id >= 0.0f && id < static_cast<float>(args.experts) ? static_cast<int>(id) : -1;
}

/// Appends the lanes' segments in lane order.
template <int kRows>
__device__ __forceinline__ void append_segment(ExpertWork<kRows>& work, int& count, const ExpertMatrix& matrix,
                                               int64_t x_at, int which, float weight, bool wanted, int lane) {
  const unsigned all = __ballot_sync(0xffffffffu, wanted);
  if (wanted) {
    ExpertSegment& s = work.segments[count + __popc(all & ((1u << lane) - 1))];
    s.data = matrix.data;
    s.x_at = x_at + matrix.first_col;
    s.tile_bytes = matrix.tile_bytes;
    s.stages = matrix.stages;
    s.cols = matrix.cols;
    s.tiles = matrix.tiles;
    s.out_cols = matrix.out_cols;
    s.which = which;
    s.weight = weight;
  }
  count += __popc(all);
}

/// One expert's pairs: a segment for each of its matrices that has this format.
template <int kRows>
__device__ __forceinline__ void find_chunk(const ExpertProductArgs& args, ExpertFormat format, ExpertWork<kRows>& work,
                                           int lane) {
  ExpertChunk chunk;
  if (args.pairs == nullptr) {
    const int pair = blockIdx.y;
    chunk.expert = expert_at(args, pair / args.slots, pair % args.slots);
    chunk.first = pair;
    chunk.count = chunk.expert >= 0 ? 1 : 0;
  } else {
    const int4 packed = *reinterpret_cast<const int4*>(args.chunks + blockIdx.y);
    chunk.expert = packed.x;
    chunk.first = packed.y;
    chunk.count = static_cast<int>(blockIdx.y) < *args.chunk_count ? packed.z : 0;
  }
  int count = 0;
  if (chunk.count > 0) {
    for (int p = lane; p < chunk.count; p += 32) {
      work.pair_of[p] = args.pairs == nullptr ? chunk.first : args.pairs[chunk.first + p];
    }
    for (int base = 0; base < args.matrix_count; base += 32) {
      const int which = base + lane;
      ExpertMatrix matrix;
      if (which < args.matrix_count) {
        matrix = args.matrices[static_cast<int64_t>(chunk.expert) * args.per_expert + args.first_matrix + which];
      }
      append_segment(work, count, matrix, 0, which, 0.0f, which < args.matrix_count && matrix.format == format, lane);
    }
  }
  if (lane == 0) work.rows = chunk.count, work.segment_count = count;
}

/// One row's slots for slice blockIdx.y.
template <int kRows>
__device__ __forceinline__ void find_slots(const ExpertProductArgs& args, ExpertWork<kRows>& work, int lane) {
  const int row = blockIdx.z;
  int count = 0;
  for (int base = 0; base < args.slots; base += 32) {
    const int slot = base + lane;
    int expert = -1;
    float weight = 0.0f;
    if (slot < args.slots) {
      expert = expert_at(args, row, slot);
      weight = args.weights[row * args.weights_stride + slot];
    }
    ExpertMatrix matrix;
    if (expert >= 0) {
      matrix = args.matrices[static_cast<int64_t>(expert) * args.per_expert + args.first_matrix + blockIdx.y];
    }
    append_segment(work, count, matrix, (static_cast<int64_t>(row) * args.slots + slot) * args.x_stride, blockIdx.y,
                   weight, expert >= 0, lane);
  }
  if (lane == 0) work.rows = 1, work.segment_count = count;
}

__device__ __forceinline__ float limited_silu_mul(float gate, float up, float limit) {
  if (limit > 0.0f) {  // NaN stays
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  return __fmul_rn(silu(gate), up);
}
__device__ __forceinline__ float relu_squared_value(float x) {
  const float kept = x < 0.0f ? 0.0f : x;  // NaN stays
  return __fmul_rn(kept, kept);
}

/// Lane (g, t) has weight rows g and g + 8, rows 2t and 2t + 1 of a row tile.
template <int kRows, int kTiles, int kRowTiles>
__device__ __forceinline__ void store_expert(const ExpertProductArgs& args, const ExpertWork<kRows>& work,
                                             const ExpertSegment& segment, int first_tile, int lane,
                                             const float (&acc)[kTiles][kRowTiles][4]) {
  const bool paired = args.inner && args.gated;
  const int first_col = first_tile * (paired ? 8 : 16) + lane / 4;
  const int left = segment.out_cols - first_col;
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int local = 8 * j + 2 * (lane % 4) + c;
      if (local >= work.rows) continue;
      const int64_t at = work.pair_of[local] * args.out_stride + first_col;
      if (!args.inner) {
        float* out = static_cast<float*>(args.out) + segment.which * args.matrix_stride + at;
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          if (16 * m < left) out[16 * m] = acc[m][j][c];
          if (16 * m + 8 < left) out[16 * m + 8] = acc[m][j][2 + c];
        }
        continue;
      }
      __nv_bfloat16* out = static_cast<__nv_bfloat16*>(args.out) + at;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        if (paired) {
          if (8 * m < left)
            out[8 * m] = __float2bfloat16_rn(limited_silu_mul(acc[m][j][c], acc[m][j][2 + c], args.limit));
        } else {
          if (16 * m < left) out[16 * m] = __float2bfloat16_rn(relu_squared_value(acc[m][j][c]));
          if (16 * m + 8 < left) out[16 * m + 8] = __float2bfloat16_rn(relu_squared_value(acc[m][j][2 + c]));
        }
      }
    }
  }
}

/// Asks the layer's table into L2 while the kernels ahead run; other layers' weights have driven it out.
__device__ __forceinline__ void ask_table(const ExpertProductArgs& args) {
  constexpr int64_t kLine = 128;
  const int64_t block = (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t at = (block * blockDim.x + threadIdx.x) * kLine;
  if (at >= static_cast<int64_t>(args.experts) * args.per_expert * static_cast<int64_t>(sizeof(ExpertMatrix))) return;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const uint8_t*>(args.matrices) + at));
}

/// Leave for more shared memory than 48 KiB, asked for once a device (a bit each in `allowed`).
template <typename Kernel>
bool allow_shared(Kernel kernel, int bytes, std::atomic<uint64_t>& allowed) {
  int device = 0;
  if (!cuda_ok(cudaGetDevice(&device), "experts")) return false;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((allowed.load() & bit) != 0) return true;
  if (!cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "experts")) {
    return false;
  }
  allowed.fetch_or(bit);
  return true;
}

}  // namespace tensorfold
