// Products of more than 64 rows: blocks of 256 (or 128) weight rows by 128 rows of the pass, operands through shared
// memory. Of 33 to 64 rows and quantised weights: by 64 rows.
//
// A block stays on its multiprocessor and takes every gridDim-th piece of the work. Stages of 64 columns come by
// asynchronous copies (matmul_tile_copies.cuh), kStages of them in a ring: activations as they are, weights as they are
// packed, which is fragment order. The copies do not stop at the end of a piece of work: the next one's first stages
// come while the last products and the stores are under way. Two barriers a place of the ring (full, empty) instead of
// one for the whole block each stage: warps may be most of a stage apart, so that one makes fragments while another
// multiplies.
//
// What the shapes are made for (H200, measured): an mma takes 6.03 cycles of a scheduler whatever the order, loads from
// shared memory are free beside it, and every arithmetic instruction costs 0.5 (shift) to 1 (fma) cycle more. So it
// counts that few instructions go into dequantising: a warp has 32 weight rows by all 128 rows of the block, and no two
// warps make the same fragments. bf16 weights need none, and 64 x 64 reads the least shared memory.
//
// Products of slices, whose outputs are going to be added up two by two, can be: a block keeps the first one's in
// shared memory while it makes the second, where the ring of 4-bit weights leaves room for them.
//
// Contract: the chain of an output is the skinny kernels': mma.m16n8k16 over K ascending from +0, the same operands at
// the same places. Columns beyond K are zeros in shared memory; rows that there are not are not stored.
#pragma once

#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_format.cuh"
#include "kernels/cuda/matmul_store.cuh"
#include "kernels/cuda/matmul_tile_copies.cuh"
#include "kernels/cuda/mbarrier.cuh"
#include "kernels/cuda/warp.cuh"

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
    return (kBlockRows * 128 + kBlockTiles * stage_bytes(kind, sets) + 1023) / 1024 * 1024;
  }
  static constexpr int kSumBytes = kBlockTiles * 16 * kBlockRows * 4;  // accumulators of all threads
  __host__ __device__ static constexpr int shared_bytes(CudaWeightKind kind, int sets, bool adds = false) {
    return kStages * (slot_bytes(kind, sets) + 16) + (adds ? kSumBytes : 0);
  }
};

/// Which of 8 rows of the pass stands in column g of a product: rows of a quarter warp, whose lanes are columns 2 q and
/// 2 q + 1, then are 4 apart and lie in different banks.
__host__ __device__ constexpr int row_of_column(int g) { return g / 2 + g % 2 * 4; }

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
      AffineValues<kKind>(scale).of(word, row);
    } else {
      AffineValues<kKind>(scale).of(upper == 0 ? make_uint2(codes.x, codes.y) : make_uint2(codes.z, codes.w), row);
    }
    place_row(row, upper, a);
  }
};

/// A thread's accumulators in shared memory, where only this thread reads them.
template <int kTiles, int kRowTiles>
__device__ __forceinline__ void put_aside(uint32_t shared, const float (&acc)[kTiles][kRowTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles * kRowTiles; ++i) {
    const float(&v)[4] = acc[i / kRowTiles][i % kRowTiles];
    store_shared16(
        shared + (i * blockDim.x + threadIdx.x) * 16,
        make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])));
  }
}
template <int kTiles, int kRowTiles>
__device__ __forceinline__ void add_what_is_aside(uint32_t shared, float (&acc)[kTiles][kRowTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles * kRowTiles; ++i) {
    float(&v)[4] = acc[i / kRowTiles][i % kRowTiles];
    const uint4 before = load_shared16(shared + (i * blockDim.x + threadIdx.x) * 16);
    v[0] = __fadd_rn(__uint_as_float(before.x), v[0]);
    v[1] = __fadd_rn(__uint_as_float(before.y), v[1]);
    v[2] = __fadd_rn(__uint_as_float(before.z), v[2]);
    v[3] = __fadd_rn(__uint_as_float(before.w), v[3]);
  }
}

/// kAdds: a block takes two views after each other and stores the sum of their outputs.
template <CudaWeightKind kKind, int kSets, typename Shape, bool kAdds>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    tile_matmul_kernel(const __grid_constant__ MatmulArgs args, const __grid_constant__ TileMaps maps) {
  constexpr int kStages = Shape::kStages, kTiles = Shape::kTiles, kRowTiles = Shape::kRowTiles;
  static_assert(kStages >= 3, "a stage is filled while the one before it and the one after it are in use");
  static_assert(kTiles >= 2 && kRowTiles % 4 == 0);
  constexpr int kStage = stage_bytes(kKind, kSets);
  constexpr int kBlockRows = Shape::kBlockRows;
  constexpr int kXBytes = kBlockRows * 128;
  constexpr int kSlot = Shape::slot_bytes(kKind, kSets);
  constexpr int kViews = kAdds ? 2 : 1;  // a piece of work
  using Copies = TileCopies<kKind, kSets, Shape, kAdds>;
  // How many stages before the one at hand is the one whose place is filled again: with two, hardly anybody waits for
  // the slowest warp.
  constexpr int kLag = kStages > 3 ? 2 : 1;
  extern __shared__ __align__(1024) uint8_t ring_memory[];

  pdl_launch();
  const int lane = threadIdx.x % 32, warp = uniform_warp();
  const int row_blocks = (args.rows + kBlockRows - 1) / kBlockRows;
  const uint32_t ring = shared_address(ring_memory);
  const uint32_t full = ring + kStages * kSlot, empty = full + 8 * kStages;  // barriers, one a place
  [[maybe_unused]] const uint32_t aside = empty + 8 * kStages;

  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(full + 8 * s, Copies::kArrivals);
      mbarrier_init(empty + 8 * s, Shape::kWarps);
    }
    mbarrier_init_done();
  }
  __syncthreads();  // the barriers are there
  // The first weights depend on no earlier kernel. A piece of work shorter than the ring fills what it has.
  Copies copies(args, maps, ring, full, empty, row_blocks, warp);
  const int at_once = min(kStages - kLag, copies.left());
  copies.first_weights(at_once);
  pdl_wait();
  copies.first_x(at_once);
  // A place that was never used is free: its barrier passes for the phase before the first.
  for (int s = at_once; s < kStages - kLag; ++s) copies.next(s, 1);

  const int warp_down = warp % Shape::kDown, warp_across = warp / Shape::kDown;
  const uint32_t my_tiles = kXBytes + warp_down * kTiles * kStage;
  const int my_row = warp_across * kRowTiles * 8 + row_of_column(lane / 4);
  const uint32_t my_x[2] = {static_cast<uint32_t>(x_piece_offset(my_row, lane % 4)),
                            static_cast<uint32_t>(x_piece_offset(my_row, 4 + lane % 4))};
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
    const int first_view = view_of_block(args, work);
#pragma unroll 1
    for (int part = 0; part < kViews; ++part) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[m][j][i] = 0.0f;
        }
      }
      const bool more = part + 1 < kViews || work + gridDim.x < args.blocks;
      for (int left = args.views[first_view + part * args.view_count].stages; left > 0; --left) {
        const uint32_t slot = ring + place * kSlot;
        turns(integral_constant<int, 0>(), integral_constant<int, kTiles>(), slot, slot);
        // The place of a stage before this one takes the stage after those in the ring, once all warps have read it.
        const bool around = place < kLag, last_place = place == kStages - 1;
        copies.next(around ? place + kStages - kLag : place - kLag, around ? phase ^ 1 : phase);
        const int next_place = last_place ? 0 : place + 1;
        const int next_phase = last_place ? phase ^ 1 : phase;
        const uint32_t next_slot = ring + next_place * kSlot;
        if (left > 1 || more) mbarrier_wait(full + 8 * next_place, next_phase);
        // After the very last stage this makes fragments of what is left in the ring; nothing uses them.
        turns(integral_constant<int, kTiles>(), integral_constant<int, 2 * kTiles - 2>(), slot, next_slot);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(empty + 8 * place);
        turns(integral_constant<int, 2 * kTiles - 2>(), integral_constant<int, 2 * kTiles>(), slot, next_slot);
        place = next_place;
        phase = next_phase;
      }
      if (kAdds && part == 0) put_aside(aside, acc);
    }
    if constexpr (kAdds) add_what_is_aside(aside, acc);
    const MatmulView& view = args.views[first_view];
    const int local = work - view.first_block;
    store_accumulators<true>(view, args.epilogue, args.rows,
                             local / row_blocks * Shape::kBlockTiles + warp_down * kTiles,
                             local % row_blocks * kBlockRows + warp_across * kRowTiles * 8, lane, acc);
  }
}

}  // namespace tensorfold
