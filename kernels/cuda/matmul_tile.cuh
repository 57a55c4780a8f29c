// Products of more than 64 rows: blocks of 256 (or 128) weight rows by 128 rows of the pass, operands through shared
// memory. Of 33 to 64 rows and quantised weights: by 64 rows.
//
// A block stays on its multiprocessor and takes every gridDim-th piece of the work. Stages of 64 columns come by
// cp.async, kStages of them in a ring: activations as they are, weights as they are packed, which is fragment order.
// The copies do not stop at the end of a piece of work: the next one's first stages come while the last products and
// the stores are under way. Two barriers a place of the ring (full, empty) instead of one for the whole block each
// stage: warps may be most of a stage apart, so that one makes fragments while another multiplies.
//
// What the shapes are made for (H200, measured): an mma takes 6.03 cycles of a scheduler whatever the order, loads from
// shared memory are free beside it, and every arithmetic instruction costs 0.5 (shift) to 1 (fma) cycle more. So it
// counts that few instructions go into dequantising: a warp has 32 weight rows by all 128 rows of the block, and no two
// warps make the same fragments. bf16 weights need none, and 64 x 64 reads the least shared memory.
//
// Contract: the chain of an output is the skinny kernels': mma.m16n8k16 over K ascending from +0, the same operands at
// the same places. Columns beyond K are zeros in shared memory; rows that there are not are copies of the last row, and
// are not stored.
#pragma once

#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_format.cuh"
#include "kernels/cuda/matmul_store.cuh"
#include "kernels/cuda/mbarrier.cuh"

namespace tensorfold {

/// How a block is cut: kDown warps over the weights and kAcross over the rows of the pass, a warp's tile of 16 kTiles
/// weight rows by 8 kRowTiles rows of the pass.
template <int kDown_, int kAcross_, int kTiles_, int kRowTiles_, int kStages_, int kBlocksPerSm_>
struct TileShape {
  static constexpr int kDown = kDown_, kAcross = kAcross_, kTiles = kTiles_, kRowTiles = kRowTiles_;
  static constexpr int kStages = kStages_, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kWarps = kDown * kAcross, kThreads = 32 * kWarps;
  static constexpr int kBlockTiles = kDown * kTiles;          // of 16 weight rows
  static constexpr int kBlockRows = kAcross * kRowTiles * 8;  // rows of the pass
  __host__ __device__ static constexpr int slot_bytes(CudaWeightKind kind, int sets) {
    return kBlockRows * 128 + kBlockTiles * stage_bytes(kind, sets);
  }
  __host__ __device__ static constexpr int shared_bytes(CudaWeightKind kind, int sets) {
    return kStages * (slot_bytes(kind, sets) + 16);
  }
};

/// Byte, in a stage of activations in shared memory, of columns 8 chunk … + 7 of row `row`. Odd rows have their halves
/// swapped, so that the 8 lanes of a quarter warp (2 rows, 4 chunks) reach all banks.
__host__ __device__ constexpr int x_chunk_offset(int row, int chunk) {
  return row * 128 + (chunk ^ ((row & 1) << 2)) * 16;
}

/// Loads from shared memory that stay where they are written: volatile, or the assembler moves them down to their use.
__device__ __forceinline__ uint4 load_here16(uint32_t address) {
  uint4 v;
  asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_here8(uint32_t address) {
  uint2 v;
  asm volatile("ld.volatile.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_here4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

/// A lane's part of half a stage of a tile between shared memory and fragments. load() for half 0 comes before the one
/// for half 1; fragments() makes the places of row g (upper = 0) or g + 8 (upper = 1) of both steps.
template <CudaWeightKind kKind, int kSets>
struct TileWeights;

__device__ __forceinline__ void place_row(const Bf16x2 (&row)[4], int upper, Bf16x2 (&a)[2][4]) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    a[s][upper] = row[2 * s];
    a[s][2 + upper] = row[2 * s + 1];
  }
}

template <>
struct TileWeights<CudaWeightKind::kBf16, 0> {
  uint4 v[2];
  __device__ __forceinline__ void load(uint32_t stage, int half, int lane) {
    v[0] = load_here16(stage + bf16_offset(half, 0, lane));
    v[1] = load_here16(stage + bf16_offset(half, 1, lane));
  }
  __device__ __forceinline__ void fragments(int /*half*/, int upper, Bf16x2 (&a)[2][4]) const {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      a[s][upper] = upper == 0 ? v[s].x : v[s].y;
      a[s][2 + upper] = upper == 0 ? v[s].z : v[s].w;
    }
  }
};

template <int kSets>
struct TileWeights<CudaWeightKind::kFp4, kSets> {
  uint4 codes, factors;
  uint32_t scales;
  __device__ __forceinline__ void load(uint32_t stage, int half, int lane) {
    if (half != 0) return;
    codes = load_here16(stage + lane * 16);
    factors = load_here16(stage + fp4_factors_offset(kSets));
    scales = load_here4(stage + fp4_scale_offset(kSets, lane));
  }
  __device__ __forceinline__ void fragments(int half, int upper, Bf16x2 (&a)[2][4]) const {
    Bf16x2 row[4];
    Fp4Parts(scales, factors, half)
        .of(half == 0 ? (upper == 0 ? codes.x : codes.y) : (upper == 0 ? codes.z : codes.w), upper != 0, row);
    place_row(row, upper, a);
  }
};

/// A 4-bit code becomes q 2^-133 by way of 128 + q here, which is exact: two instructions a pair more than cutting it
/// out (AffineValues), and yet 5 % faster on an H200 (774 against 821 us for 16,480 x 5,120 by 2,048 rows), whose
/// assembler mixes them better with the products.
template <CudaWeightKind kKind, int kSets>
struct TileWeights {
  static constexpr bool kFour = kept_bits(kKind) == 4;
  uint4 codes;  // 4 bits: of both halves
  uint2 scales;
  __device__ __forceinline__ void load(uint32_t stage, int half, int lane) {
    if (!kFour || half == 0) codes = load_here16(stage + (kFour ? lane * 16 : affine8_offset(half, 0, lane)));
    scales = load_here8(stage + scale_offset(kKind, kSets, kSets == 2 ? half : 0, lane / 4, 0));
  }
  __device__ __forceinline__ void fragments(int half, int upper, Bf16x2 (&a)[2][4]) const {
    const uint32_t scale = upper == 0 ? scales.x : scales.y;
    Bf16x2 row[4];
    if constexpr (kFour) {
      const uint32_t word = half == 0 ? (upper == 0 ? codes.x : codes.y) : (upper == 0 ? codes.z : codes.w);
      if constexpr (kKind == CudaWeightKind::kAffine4) {
        constexpr Bf16x2 kUnit = 0x00010001, kMinus128Units = 0x80808080;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const Bf16x2 code = fma_bf16x2(and_or(word >> (4 * j), 0x000f000fu, 0x43004300u), kUnit, kMinus128Units);
          row[j] = fma_bf16x2(code, low_half(scale), high_half(scale));
        }
      } else {
        AffineValues<kKind>(scale).of(word, row);
      }
    } else {
      AffineValues<kKind>(scale).of(upper == 0 ? make_uint2(codes.x, codes.y) : make_uint2(codes.z, codes.w), row);
    }
    place_row(row, upper, a);
  }
};

/// One of the barrier's arrivals.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(barrier) : "memory");
}
template <CudaWeightKind kKind, int kSets, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    tile_matmul_kernel(const __grid_constant__ MatmulArgs args) {
  constexpr int kStages = Shape::kStages, kTiles = Shape::kTiles, kRowTiles = Shape::kRowTiles;
  static_assert(kStages >= 3, "a stage is filled while the one before it and the one after it are in use");
  static_assert(kTiles >= 2 && kRowTiles % 4 == 0);
  constexpr int kStage = stage_bytes(kKind, kSets);
  constexpr int kBlockRows = Shape::kBlockRows;
  constexpr int kCopyTiles = Shape::kBlockTiles / Shape::kWarps;  // weight tiles that a warp copies
  static_assert(kCopyTiles * Shape::kWarps == Shape::kBlockTiles);
  constexpr int kXBytes = kBlockRows * 128;
  constexpr int kSlot = Shape::slot_bytes(kKind, kSets);
  constexpr int kPieces = kStage / 16;
  static_assert(kStage % 16 == 0);
  extern __shared__ __align__(128) uint8_t ring_memory[];

  pdl_launch();
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int row_blocks = (args.rows + kBlockRows - 1) / kBlockRows;
  const uint32_t ring = shared_address(ring_memory);
  const uint32_t full = ring + kStages * kSlot, empty = full + 8 * kStages;  // barriers, one a place

  if (tid == 0) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(full + 8 * s, Shape::kThreads);
      mbarrier_init(empty + 8 * s, Shape::kWarps);
    }
  }

  // Copies into the ring, which run ahead of the products, also into the block's next piece of work. Weights: a warp
  // kCopyTiles tiles, 16 bytes a lane. Activations: a thread chunk tid % 8 of every kXStep-th row; rows that there are
  // not are the last one again. Pointers move before a copy: right after it they would wait for it to read them.
  constexpr int kXStep = Shape::kThreads / 8;
  static_assert(kBlockRows % kXStep == 0 && kXStep % 2 == 0);
  int copy_work = blockIdx.x, copy_left = 0, x_left = 0;
  const uint8_t* w_from[kCopyTiles];
  const __nv_bfloat16* x_from[kBlockRows / kXStep];
  const auto begin_copies = [&] {
    const MatmulView& view = args.views[view_of_block(args, copy_work)];
    const int local = copy_work - view.first_block;
    const int first_row = local % row_blocks * kBlockRows, first_tile = local / row_blocks * Shape::kBlockTiles;
    copy_left = view.stages;
    x_left = view.cols - tid % 8 * 8;
#pragma unroll
    for (int c = 0; c < kCopyTiles; ++c) {
      const int tile = min(first_tile + warp * kCopyTiles + c, view.tiles - 1);
      w_from[c] = view.weight + tile * view.tile_bytes + lane * 16 - kStage;
    }
#pragma unroll
    for (int i = 0; i < kBlockRows / kXStep; ++i) {
      x_from[i] =
          view.x + min(first_row + tid / 8 + i * kXStep, args.rows - 1) * view.x_stride + tid % 8 * 8 - kStageColumns;
    }
  };
  const uint32_t w_to = kXBytes + warp * kCopyTiles * kStage + lane * 16;
  const auto copy_weights = [&](uint32_t slot) {
#pragma unroll
    for (int c = 0; c < kCopyTiles; ++c) {
      w_from[c] += kStage;
#pragma unroll
      for (int i = 0; i < kPieces; i += 32) {
        copy_async16_if(slot + w_to + c * kStage + i * 16, w_from[c] + i * 16, lane < kPieces - i);
      }
    }
  };
  const uint32_t x_to = x_chunk_offset(tid / 8, tid % 8);
  const auto copy_x = [&](uint32_t slot) {
#pragma unroll
    for (int i = 0; i < kBlockRows / kXStep; ++i) {
      x_from[i] += kStageColumns;
      copy_async16(slot + x_to + i * kXStep * 128, x_from[i], x_left > 0);
    }
    x_left -= kStageColumns;
    --copy_left;
  };

  // The first weights depend on no earlier kernel. A piece of work shorter than the ring fills what it has.
  begin_copies();
  const int at_once = min(kStages - 1, copy_left);
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < at_once) copy_weights(ring + s * kSlot);
  }
  pdl_wait();
  __syncthreads();  // the barriers are there
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < at_once) {
      copy_x(ring + s * kSlot);
      mbarrier_arrive_after_copies(full + 8 * s);
    }
  }
  // Copies the next stage to `place`, if there is one.
  const auto copy_next = [&](int place, uint32_t free_phase) {
    if (copy_left == 0) {
      copy_work += gridDim.x;
      if (copy_work >= args.blocks) {
        copy_work -= gridDim.x;  // stays where it is
        return;
      }
      begin_copies();
    }
    mbarrier_wait(empty + 8 * place, free_phase);
    copy_weights(ring + place * kSlot);
    copy_x(ring + place * kSlot);
    mbarrier_arrive_after_copies(full + 8 * place);
  };
  // A place that was never used is free: its barrier passes for the phase before the first.
  for (int s = at_once; s < kStages - 1; ++s) copy_next(s, 1);

  const int warp_down = warp % Shape::kDown, warp_across = warp / Shape::kDown;
  const int g = lane / 4;
  const uint32_t my_tiles = kXBytes + warp_down * kTiles * kStage;
  const uint32_t my_x[2] = {static_cast<uint32_t>(x_chunk_offset(warp_across * kRowTiles * 8 + g, lane % 4)),
                            static_cast<uint32_t>(x_chunk_offset(warp_across * kRowTiles * 8 + g, 4 + lane % 4))};
  Bf16x2 a[2][2][4];  // [this and the next tile][step]
  uint4 b[kRowTiles];
  TileWeights<kKind, kSets> w[kTiles];
  float acc[kTiles][kRowTiles][4];

  mbarrier_wait(full, 0);
  w[0].load(ring + my_tiles, 0, lane);
  w[1].load(ring + my_tiles + kStage, 0, lane);
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) b[j] = load_here16(ring + my_x[0] + j * 1024);
  w[0].fragments(0, 0, a[0]);
  w[0].fragments(0, 1, a[0]);

  // A turn is a tile times half a stage. Meanwhile the fragments of the turn after it are made from codes that came
  // from shared memory the turn before. The last tile of a half leaves activations of the next half behind.
  const auto turns = [&]([[maybe_unused]] auto first, [[maybe_unused]] auto end, uint32_t slot, uint32_t next_slot) {
#pragma unroll
    for (int turn = decltype(first)::value; turn < decltype(end)::value; ++turn) {
      const int half = turn / kTiles, m = turn % kTiles;
      const int make = (turn + 1) % (2 * kTiles), read = (turn + 2) % (2 * kTiles);
      w[read % kTiles].load((turn + 2 < 2 * kTiles ? slot : next_slot) + my_tiles + read % kTiles * kStage,
                            read / kTiles, lane);
#pragma unroll
      for (int q = 0; q < kRowTiles / 4; ++q) {
#pragma unroll
        for (int k16 = 0; k16 < 2; ++k16) {
#pragma unroll
          for (int j = 4 * q; j < 4 * q + 4; ++j) {
            mma_m16n8k16(acc[m][j], a[turn % 2][k16], k16 == 0 ? b[j].x : b[j].z, k16 == 0 ? b[j].y : b[j].w);
          }
        }
        if (m == kTiles - 1) {
#pragma unroll
          for (int j = 4 * q; j < 4 * q + 4; ++j) {
            b[j] = load_here16((half == 0 ? slot : next_slot) + my_x[1 - half] + j * 1024);
          }
        }
        if (q < 2) w[make % kTiles].fragments(make / kTiles, q, a[1 - turn % 2]);
      }
    }
  };
  using std::integral_constant;

  int place = 0, phase = 0;  // of the stage at hand
  for (int work = blockIdx.x; work < args.blocks; work += gridDim.x) {
    const MatmulView& view = args.views[view_of_block(args, work)];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][j][i] = 0.0f;
      }
    }
    for (int left = view.stages; left > 0; --left) {
      const uint32_t slot = ring + place * kSlot;
      turns(integral_constant<int, 0>(), integral_constant<int, kTiles>(), slot, slot);
      // The place of the stage before this one takes the stage after those in the ring, once all warps have read it.
      const bool first_place = place == 0, last_place = place == kStages - 1;
      copy_next(first_place ? kStages - 1 : place - 1, first_place ? phase ^ 1 : phase);
      const int next_place = last_place ? 0 : place + 1;
      const int next_phase = last_place ? phase ^ 1 : phase;
      const uint32_t next_slot = ring + next_place * kSlot;
      if (left > 1 || work + gridDim.x < args.blocks) mbarrier_wait(full + 8 * next_place, next_phase);
      // After the very last stage this makes fragments of what is left in the ring; nothing uses them.
      turns(integral_constant<int, kTiles>(), integral_constant<int, 2 * kTiles - 2>(), slot, next_slot);
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + 8 * place);
      turns(integral_constant<int, 2 * kTiles - 2>(), integral_constant<int, 2 * kTiles>(), slot, next_slot);
      place = next_place;
      phase = next_phase;
    }
    const int local = work - view.first_block;
    store_accumulators(view, args.epilogue, args.rows, local / row_blocks * Shape::kBlockTiles + warp_down * kTiles,
                       local % row_blocks * kBlockRows + warp_across * kRowTiles * 8, lane, acc);
  }
}

}  // namespace tensorfold
