// Products of experts: rows of activations are found through lists, weights through a table.
//
// A block has a chunk of an expert's pairs (or one row) and kExpertWarps warps, each with kTiles tiles of 16 weight
// rows for all of K. A warp goes through segments: the matrices that the block's work consists of, one after the other
// (gate and up: one; down: the slices; a row by itself: its slots). It has a ring of slots in shared memory, kChunk
// stages of weights each, which copies keep full across the ends of segments; warps share nothing but the list of
// segments.
//
// Contract: an output is mma.m16n8k16 chained over K ascending, from +0, in the order of columns that matmul_format.cuh
// gives; lanes of rows that there are not take the last row's values, in columns of B which no other column's bits
// depend on and which are not stored.
#pragma once

#include <atomic>

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/experts_views.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_format.cuh"
#include "kernels/cuda/mbarrier.cuh"
#include "kernels/ops/ops.h"

namespace tensorfold {

/// A warp: kTiles tiles of weights by kRowTiles tiles of 8 rows; a ring of kSlots slots of kChunk stages.
template <int kRowTiles_, int kTiles_, int kChunk_, int kSlots_, int kBlocksPerSm_>
struct ExpertShape {
  static constexpr int kRowTiles = kRowTiles_, kTiles = kTiles_, kChunk = kChunk_, kSlots = kSlots_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_, kRows = 8 * kRowTiles;
  __host__ __device__ static constexpr int slot_bytes(CudaWeightKind kind, int sets) {
    return kTiles * kChunk * stage_bytes(kind, sets);
  }
  /// Barriers first: kSlots a warp.
  __host__ __device__ static constexpr int ring_at() { return (8 * kExpertWarps * kSlots + 127) / 128 * 128; }
  __host__ __device__ static constexpr int shared_bytes(CudaWeightKind kind, int sets) {
    return ring_at() + kExpertWarps * kSlots * slot_bytes(kind, sets);
  }
};

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

/// `bytes` of each of a warp's tiles to a slot.
template <int kTiles>
__device__ __forceinline__ void copy_tiles(uint32_t slot, int distance, const uint8_t* from, int tile_bytes, int bytes,
                                           uint32_t barrier, int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (lane == 0) {
    mbarrier_expect(barrier, static_cast<uint32_t>(kTiles * bytes));
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      copy_bulk_more(slot + m * distance, from + m * static_cast<int64_t>(tile_bytes), static_cast<uint32_t>(bytes),
                     barrier);
    }
  }
#else
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    const uint8_t* tile = from + m * static_cast<int64_t>(tile_bytes);
    for (int at = 16 * lane; at < bytes; at += 16 * 32) copy_async16(slot + m * distance + at, tile + at, true);
  }
  mbarrier_arrive_after_copies(barrier);
#endif
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr int kTileArrivals = 1;
#else
inline constexpr int kTileArrivals = 32;
#endif

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

/// Asks for the lines of the chunk's activations, so that they are in L1 when the first weights come.
template <int kRows>
__device__ __forceinline__ void touch_activations(const ExpertProductArgs& args, const ExpertWork<kRows>& work,
                                                  bool sums) {
  for (int s = 0; s < work.segment_count; ++s) {
    const int lines = (work.segments[s].cols + kStageColumns - 1) / kStageColumns;
    for (int i = threadIdx.x; i < lines * work.rows; i += 32 * kExpertWarps) {
      const int pair = sums ? 0 : work.pair_of[i / lines];
      const __nv_bfloat16* at = args.x + work.segments[s].x_at +
                                (args.inner ? pair / args.slots : pair) * args.x_stride + i % lines * kStageColumns;
      unsigned unused;
      asm volatile("ld.global.u16 %0, [%1];" : "=r"(unused) : "l"(at) : "memory");
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

/// kSum: the block has a row and a slice, and segments are the row's slots. Else it has a chunk of an expert's pairs.
template <CudaWeightKind kKind, int kSets, typename Shape, bool kSum>
__global__ void __launch_bounds__(32 * kExpertWarps, Shape::kBlocksPerSm)
    expert_product_kernel(const __grid_constant__ ExpertProductArgs args) {
  constexpr int kStage = stage_bytes(kKind, kSets);
  constexpr int kRowTiles = Shape::kRowTiles, kTiles = Shape::kTiles, kChunk = Shape::kChunk, kSlots = Shape::kSlots;
  constexpr int kSlotBytes = Shape::slot_bytes(kKind, kSets), kDistance = kChunk * kStage;
  static_assert(!kSum || kRowTiles == 1);
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ ExpertWork<Shape::kRows> work;
  pdl_launch();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t base = shared_address(memory);
  const uint32_t full = base + 8 * kSlots * warp, ring = base + Shape::ring_at() + kSlots * kSlotBytes * warp;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) mbarrier_init(full + 8 * i, kTileArrivals);
    mbarrier_init_done();
  }
  __syncwarp();
  ask_table(args);
  pdl_wait();
  if (warp == 0) {
    if constexpr (kSum) {
      find_slots(args, work, lane);
    } else {
      find_chunk(args, ExpertFormat{kKind, kSets}, work, lane);
    }
  }
  __syncthreads();
  const int count = work.segment_count, rows = work.rows;
  const int tile = (static_cast<int>(blockIdx.x) * kExpertWarps + warp) * kTiles;
  if ((!kSum && count == 0) || tile >= (count == 0 ? args.tiles : work.segments[0].tiles)) return;

  // The copying end of the ring.
  const uint8_t* copy_from = nullptr;
  int copy_segment = 0, copy_left = 0, copy_tile_bytes = 0;
  const auto fill = [&](int slot) {
    if (copy_left == 0) {
      if (copy_segment == count) return;
      const ExpertSegment& s = work.segments[copy_segment++];
      copy_left = s.stages;
      // A second tile that there is not is the first one again, not stored.
      copy_tile_bytes = kTiles == 1 || tile + 1 < s.tiles ? s.tile_bytes : 0;
      copy_from = s.data + static_cast<int64_t>(tile) * s.tile_bytes;
    }
    const int stages = min(kChunk, copy_left);
    copy_tiles<kTiles>(ring + slot * kSlotBytes, kDistance, copy_from, copy_tile_bytes, stages * kStage,
                       full + 8 * slot, lane);
    copy_from += stages * kStage;
    copy_left -= stages;
  };
#pragma unroll 1
  for (int i = 0; i < kSlots; ++i) fill(i);
  if constexpr (kRowTiles <= 2) touch_activations(args, work, kSum);

  int64_t x_row[kRowTiles];
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
    x_row[j] = 8 * (lane % 4);
    if constexpr (!kSum) {
      const int pair = work.pair_of[min(8 * j + lane / 4, rows - 1)];
      x_row[j] += (args.inner ? pair / args.slots : pair) * args.x_stride;
    }
  }
  float sum[kTiles][2] = {};
  int slot = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int s = 0; s < count; ++s) {
    const ExpertSegment& segment = work.segments[s];
    const __nv_bfloat16* x = args.x + segment.x_at;
    int cols_left = segment.cols - 8 * (lane % 4);
    float acc[kTiles][kRowTiles][4] = {};
#pragma unroll 1
    for (int left = segment.stages; left > 0; left -= kChunk) {
      uint4 b[kChunk][2][kRowTiles];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int j = 0; j < kRowTiles; ++j) {
            const int column = i * kStageColumns + 32 * half;
            const bool present = column < cols_left && (j == 0 || 8 * j < rows);
            if (!present) b[i][half][j] = make_uint4(0, 0, 0, 0);  // what lies beyond K must not count
            load_rows16(b[i][half][j], x + x_row[j] + column, present);
          }
        }
      }
      mbarrier_wait(full + 8 * slot, parity);
      const uint32_t at = ring + slot * kSlotBytes;
      WeightStage<kKind, kSets> w[2][kTiles];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) w[0][m].load_shared(at + m * kDistance, lane);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (i < left) {
          if (i + 1 < kChunk && i + 1 < left) {
#pragma unroll
            for (int m = 0; m < kTiles; ++m) w[(i + 1) % 2][m].load_shared(at + m * kDistance + (i + 1) * kStage, lane);
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            Bf16x2 a[kTiles][2][4];
#pragma unroll
            for (int m = 0; m < kTiles; ++m) w[i % 2][m].fragments(half, a[m]);
#pragma unroll
            for (int j = 0; j < kRowTiles; ++j) {
              if (j > 0 && 8 * j >= rows) continue;
              const uint4 v = b[i][half][j];
#pragma unroll
              for (int m = 0; m < kTiles; ++m) mma_m16n8k16(acc[m][j], a[m][0], v.x, v.y);
#pragma unroll
              for (int m = 0; m < kTiles; ++m) mma_m16n8k16(acc[m][j], a[m][1], v.z, v.w);
            }
          }
        }
      }
      __syncwarp();
      fill(slot);
      if (++slot == kSlots) slot = 0, parity ^= 1;
      x += kChunk * kStageColumns;
      cols_left -= kChunk * kStageColumns;
    }
    if constexpr (kSum) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float y = acc[m][0][2 * h];
          sum[m][h] = s == 0 ? __fmul_rn(segment.weight, y) : __fmaf_rn(segment.weight, y, sum[m][h]);
        }
      }
    } else {
      store_expert<Shape::kRows>(args, work, segment, tile, lane, acc);
    }
  }
  if constexpr (kSum) {
    if (lane % 4 != 0) return;
    float* out = args.partial[blockIdx.y] + blockIdx.z * args.out_stride;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int column = 16 * (tile + m) + 8 * h + lane / 4;
        if (column < args.partial_cols) out[column] = sum[m][h];
      }
    }
  }
}

template <CudaWeightKind kKind, int kSets, typename Shape, bool kSum>
bool launch_expert_kernel(const ExpertProductArgs& args, const ExpertGrid& grid, cudaStream_t stream) {
  constexpr int kShared = Shape::shared_bytes(kKind, kSets);
  static_assert(kShared <= 90 * 1024, "a block has at most 99 KiB on the smallest GPUs, the list of its work included");
  const auto kernel = expert_product_kernel<kKind, kSets, Shape, kSum>;
  static std::atomic<uint64_t> allowed{0};  // a bit a device
  int device = 0;
  if (!cuda_ok(cudaGetDevice(&device), "experts")) return false;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((allowed.load() & bit) == 0) {
    if (!cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "experts")) {
      return false;
    }
    allowed.fetch_or(bit);
  }
  constexpr int kBlockTiles = kExpertWarps * Shape::kTiles;
  const dim3 blocks(static_cast<unsigned>((args.tiles + kBlockTiles - 1) / kBlockTiles),
                    static_cast<unsigned>(kSum ? args.matrix_count : grid.pairs),
                    static_cast<unsigned>(kSum ? grid.rows : 1));
  return launch_kernel(kernel, blocks, dim3(32 * kExpertWarps), kShared, stream, "experts", args);
}

/// Few, Some, Many: shapes for chunks of 8, 16 and 64 rows.
template <CudaWeightKind kKind, int kSets, typename Few, typename Some, typename Many>
bool launch_expert_shapes(const ExpertProductArgs& args, const ExpertGrid& grid, bool rows_way, int chunk_rows,
                          cudaStream_t stream) {
  static_assert(Few::kRows == 8 && Some::kRows == 16 && Many::kRows == 64);
  if (rows_way) return launch_expert_kernel<kKind, kSets, Few, true>(args, grid, stream);
  if (chunk_rows == 8) return launch_expert_kernel<kKind, kSets, Few, false>(args, grid, stream);
  if (chunk_rows == 16) return launch_expert_kernel<kKind, kSets, Some, false>(args, grid, stream);
  return launch_expert_kernel<kKind, kSets, Many, false>(args, grid, stream);
}

}  // namespace tensorfold
