// Products of experts for few rows: activations are found through lists, weights through a table.
//
// A block has a chunk of an expert's pairs and kExpertWarps warps, each with a tile of 16 weight rows for all of K. A
// warp goes through segments: the matrices that the block's work consists of, one after the other (gate and up: one;
// down: the slices). Or the block has one row, a slice and a tile, and segments are the row's slots, which the warps
// divide among them and add in the end. A warp has a ring of slots in shared memory, a few units of kUnit stages of
// weights each, which copies keep full across the ends of segments; warps share nothing but the list of segments.
//
// Contract: an output is mma.m16n8k16 chained over K ascending, from +0, in the order of columns that matmul_format.cuh
// gives; lanes of rows that there are not take the last row's values, in columns of B which no other column's bits
// depend on and which are not stored.
#pragma once

#include <atomic>
#include <type_traits>

#include "kernels/cuda/experts_tile.cuh"
#include "kernels/cuda/experts_work.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_format.cuh"
#include "kernels/cuda/mbarrier.cuh"
#include "kernels/cuda/warp.cuh"

namespace tensorfold {

/// A warp: a tile of weights by kRowTiles tiles of 8 rows; a ring of kSlots slots of kUnits units of kUnit stages.
template <int kRowTiles_, int kUnit_, int kUnits_, int kSlots_, int kBlocksPerSm_>
struct ExpertShape {
  static constexpr int kRowTiles = kRowTiles_, kUnit = kUnit_, kUnits = kUnits_, kSlots = kSlots_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_, kRows = 8 * kRowTiles, kSlotStages = kUnit * kUnits;
  __host__ __device__ static constexpr int slot_bytes(CudaWeightKind kind, int sets) {
    return kSlotStages * stage_bytes(kind, sets);
  }
  /// Barriers first: kSlots a warp.
  __host__ __device__ static constexpr int ring_at() { return (8 * kExpertWarps * kSlots + 127) / 128 * 128; }
  __host__ __device__ static constexpr int shared_bytes(CudaWeightKind kind, int sets) {
    return ring_at() + kExpertWarps * kSlots * slot_bytes(kind, sets);
  }
};

/// Weights to a slot, by a warp.
__device__ __forceinline__ void copy_weights(uint32_t slot, const uint8_t* from, int bytes, uint32_t barrier,
                                             int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (lane == 0) copy_bulk(slot, from, static_cast<uint32_t>(bytes), barrier);
#else
  for (int at = 16 * lane; at < bytes; at += 16 * 32) copy_async16(slot + at, from + at, true);
  mbarrier_arrive_after_copies(barrier);
#endif
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr int kCopyArrivalsOfWarp = 1;
#else
inline constexpr int kCopyArrivalsOfWarp = 32;
#endif

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

/// kSum: the block has a row, a slice and a tile, and segments are the row's slots. Else it has a chunk of an expert's
/// pairs, and a tile a warp.
template <CudaWeightKind kKind, int kSets, typename Shape, bool kSum>
__global__ void __launch_bounds__(32 * kExpertWarps, Shape::kBlocksPerSm)
    expert_product_kernel(const __grid_constant__ ExpertProductArgs args) {
  constexpr int kStage = stage_bytes(kKind, kSets);
  constexpr int kRowTiles = Shape::kRowTiles, kUnit = Shape::kUnit, kSlots = Shape::kSlots;
  constexpr int kSlotBytes = Shape::slot_bytes(kKind, kSets);
  constexpr int kStep = kSum ? kExpertWarps : 1;  // from a warp's segment to its next
  static_assert(!kSum || kRowTiles == 1);
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ ExpertWork<Shape::kRows> work;
  __shared__ float slot_out[kSum ? kMostExpertSlots : 1][kTileRows];
  pdl_launch();
  const int lane = threadIdx.x % 32, warp = uniform_warp();
  const uint32_t base = shared_address(memory);
  const uint32_t full = base + 8 * kSlots * warp, ring = base + Shape::ring_at() + kSlots * kSlotBytes * warp;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) mbarrier_init(full + 8 * i, kCopyArrivalsOfWarp);
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
  const int tile = kSum ? static_cast<int>(blockIdx.x) : static_cast<int>(blockIdx.x) * kExpertWarps + warp;
  if (!kSum && (count == 0 || tile >= work.segments[0].tiles)) return;

  // The copying end of the ring.
  const uint8_t* copy_from = nullptr;
  int copy_segment = kSum ? warp : 0, copy_left = 0;
  const auto fill = [&](int slot) {
    if (copy_left == 0) {
      if (copy_segment >= count) return;
      const ExpertSegment& s = work.segments[copy_segment];
      copy_segment += kStep;
      copy_left = s.stages;
      copy_from = s.data + static_cast<int64_t>(tile) * s.tile_bytes;
    }
    const int stages = min(Shape::kSlotStages, copy_left);
    copy_weights(ring + slot * kSlotBytes, copy_from, stages * kStage, full + 8 * slot, lane);
    copy_from += stages * kStage;
    copy_left -= stages;
  };
#pragma unroll 1
  for (int i = 0; i < kSlots; ++i) fill(i);
  touch_activations(args, work, kSum);

  int64_t x_row[kRowTiles];
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
    x_row[j] = 8 * (lane % 4);
    if constexpr (!kSum) {
      const int pair = work.pair_of[min(8 * j + lane / 4, rows - 1)];
      x_row[j] += (args.inner ? pair / args.slots : pair) * args.x_stride;
    }
  }
  int slot = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int s = kSum ? warp : 0; s < count; s += kStep) {
    const ExpertSegment& segment = work.segments[s];
    const __nv_bfloat16* x = args.x + segment.x_at;
    int columns = segment.cols;  // that are left
    float acc[1][kRowTiles][4] = {};
    // `stages` (at most kUnit) at `at`, a place in the ring.
    const auto multiply = [&](uint32_t at, auto whole, int stages) {
      constexpr bool kWhole = decltype(whole)::value;
      uint4 b[kUnit][2][kRowTiles];
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int j = 0; j < kRowTiles; ++j) {
            const int column = i * kStageColumns + 32 * half;
            const bool present = (kWhole || column + 8 * (lane % 4) < columns) && (j == 0 || 8 * j < rows);
            if (!present) b[i][half][j] = make_uint4(0, 0, 0, 0);  // what lies beyond K must not count
            load_rows16(b[i][half][j], x + x_row[j] + column, present);
          }
        }
      }
      WeightStage<kKind, kSets> w[2];
      w[0].load_shared(at, lane);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if (kWhole || i < stages) {
          if (i + 1 < kUnit && (kWhole || i + 1 < stages)) w[(i + 1) % 2].load_shared(at + (i + 1) * kStage, lane);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            Bf16x2 a[2][4];
            w[i % 2].fragments(half, a);
#pragma unroll
            for (int j = 0; j < kRowTiles; ++j) {
              const uint4 v = b[i][half][j];
              mma_m16n8k16(acc[0][j], a[0], v.x, v.y);
              mma_m16n8k16(acc[0][j], a[1], v.z, v.w);
            }
          }
        }
      }
    };
#pragma unroll 1
    for (int left = segment.stages; left > 0;) {
      mbarrier_wait(full + 8 * slot, parity);
      uint32_t at = ring + slot * kSlotBytes;
      int in_slot = min(Shape::kSlotStages, left);
      left -= in_slot;
#pragma unroll 1
      for (; in_slot > 0; in_slot -= kUnit) {
        // The last unit of a segment may end inside its columns, or have fewer stages.
        if (in_slot >= kUnit && (left > 0 || in_slot > kUnit || columns >= kUnit * kStageColumns)) {
          multiply(at, std::true_type(), kUnit);
        } else {
          multiply(at, std::false_type(), in_slot);
        }
        at += kUnit * kStage;
        x += kUnit * kStageColumns;
        columns -= kUnit * kStageColumns;
      }
      __syncwarp();
      fill(slot);
      if (++slot == kSlots) slot = 0, parity ^= 1;
    }
    if constexpr (kSum) {
      if (lane % 4 == 0) {
        slot_out[s][lane / 4] = acc[0][0][0];
        slot_out[s][lane / 4 + 8] = acc[0][0][2];
      }
    } else {
      store_expert<Shape::kRows>(args, work, segment, tile, lane, acc);
    }
  }
  if constexpr (kSum) {
    __syncthreads();
    const int column = tile * kTileRows + static_cast<int>(threadIdx.x);
    if (threadIdx.x >= kTileRows || column >= args.partial_cols) return;
    float sum = 0.0f;
    for (int s = 0; s < count; ++s) {
      const float y = slot_out[s][threadIdx.x], weight = work.segments[s].weight;
      sum = s == 0 ? __fmul_rn(weight, y) : __fmaf_rn(weight, y, sum);
    }
    args.partial[blockIdx.y][blockIdx.z * args.out_stride + column] = sum;
  }
}

template <CudaWeightKind kKind, int kSets, typename Shape, bool kSum>
bool launch_expert_kernel(const ExpertProductArgs& args, const ExpertGrid& grid, cudaStream_t stream) {
  constexpr int kShared = Shape::shared_bytes(kKind, kSets);
  static_assert(kShared <= 90 * 1024, "a block has at most 99 KiB on the smallest GPUs, the list of its work included");
  const auto kernel = expert_product_kernel<kKind, kSets, Shape, kSum>;
  static std::atomic<uint64_t> allowed{0};  // a bit a device
  if (!allow_shared(kernel, kShared, allowed)) return false;
  constexpr int kBlockTiles = kSum ? 1 : kExpertWarps;
  const dim3 blocks(static_cast<unsigned>((args.tiles + kBlockTiles - 1) / kBlockTiles),
                    static_cast<unsigned>(kSum ? args.matrix_count : grid.pairs),
                    static_cast<unsigned>(kSum ? grid.rows : 1));
  return launch_kernel(kernel, blocks, dim3(32 * kExpertWarps), kShared, stream, "experts", args);
}

/// Few, Some: shapes for chunks of 8 and 16 rows; Many: of the other kernel, for 64.
template <CudaWeightKind kKind, int kSets, typename Few, typename Some, typename Many>
bool launch_expert_shapes(const ExpertProductArgs& args, const ExpertGrid& grid, bool rows_way, int chunk_rows,
                          cudaStream_t stream) {
  static_assert(Few::kRows == 8 && Some::kRows == 16);
  if (rows_way) return launch_expert_kernel<kKind, kSets, Few, true>(args, grid, stream);
  if (chunk_rows == 8) return launch_expert_kernel<kKind, kSets, Few, false>(args, grid, stream);
  if (chunk_rows == 16) return launch_expert_kernel<kKind, kSets, Some, false>(args, grid, stream);
  return launch_expert_tiles<kKind, kSets, Many>(args, grid, stream);
}

}  // namespace tensorfold
