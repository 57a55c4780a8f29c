// Attention for few queries, where waiting is what costs: a block takes one tile of 16 queries and one split. Its eight
// warps share the keys of each block for the scores, keep the scores of the whole split in registers, and then share
// the dimensions for the values. Every number is what attention_tile.cu computes, in the same chains; only who computes
// it differs: running maxima over blocks are the same whether taken one by one or as prefixes afterwards.
#include "kernels/cuda/attention_kernels.cuh"

namespace tensorfold {
namespace {

constexpr int kWarps = 8;
constexpr int kQueries = 16;
constexpr int kWeightRow = kSplitBlocks * kBlockKeys * 2;  // bytes of a query's weights in shared memory, bf16
constexpr int kMaxRow = kSplitBlocks * kWarps + 4;         // floats of a query's maxima; + 4: no bank conflicts
static_assert(kBlockKeys == kWarps * 8, "a warp has one tile of 8 keys of each block");

template <int kDim, bool kFp8, int kRing>
struct NarrowShape {
  static constexpr int kStage = kStageBytes<kDim, kFp8, 1>;
  static constexpr int kWide = kFp8 ? kBlockKeys * kDim * 2 : 0;
  // Queries (until they are in registers) and weights share their place.
  static constexpr int kWeights = kQueries * kWeightRow;
  static constexpr int kMaxima = kQueries * kMaxRow * 4;
  static constexpr int kRescales = kQueries * kSplitBlocks * 4;
  static constexpr int kShared = kWeights + kMaxima + kRescales + kWide + kRing * kStage;
  static_assert(kQueries * kDim * 2 <= kWeights && (kWeights + kMaxima + kRescales) % 128 == 0);
  // Value dimensions: tiles of 8 a warp, and the warps that have any.
  static constexpr int kTiles = kDim >= 64 ? kDim / 64 : 1;
  static constexpr int kValueWarps = kDim / 8 / kTiles;
};

/// Running maxima of a query over the split's blocks; lane's query is lane % 16, lanes 16-31 repeat 0-15.
struct Maxima {
  float base[kSplitBlocks];     // what weights of a block are relative to
  float rescale[kSplitBlocks];  // of the sums before a block
  float last;
  __device__ __forceinline__ Maxima(const float* maxima, int blocks, float factor) {
    last = kMinusInfinity;
#pragma unroll
    for (int j = 0; j < kSplitBlocks; ++j) {
      base[j] = 0.0f;
      rescale[j] = 1.0f;
      if (j >= blocks) continue;
      const float4* of_warps = reinterpret_cast<const float4*>(maxima + j * kWarps);
      const float4 a = of_warps[0];
      const float4 b = of_warps[1];
      const float block_max = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
      base[j] = next_max(&last, block_max, factor, &rescale[j]);
    }
  }
};

template <int kDim, bool kFp8, int kRing>
__global__ void __launch_bounds__(kWarps * 32, kDim == 256 ? 1 : 2)
    narrow_kernel(const __grid_constant__ AttentionParams p) {
  using Shape = NarrowShape<kDim, kFp8, kRing>;
  extern __shared__ __align__(128) char shared[];
  pdl_launch();
  pdl_wait();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int warp = static_cast<int>(threadIdx.x >> 5);
  const int g = lane >> 2;
  const int t = lane & 3;
  float* maxima = reinterpret_cast<float*>(shared + Shape::kWeights);
  const uint32_t weights = shared_address(shared);  // and queries
  float* rescales = maxima + Shape::kMaxima / 4;
  const uint32_t wide = weights + Shape::kWeights + Shape::kMaxima + Shape::kRescales;
  const uint32_t ring = wide + Shape::kWide;

  const int kv_head = static_cast<int>(blockIdx.x) % p.kv_heads;
  const int slot = static_cast<int>(blockIdx.x) / p.kv_heads;
  const int split = p.first_split + static_cast<int>(blockIdx.y);
  TileWork work;
  if (!find_tile(p, kv_head, slot, &work)) {
    if (split == 0) zero_padding(p, kv_head, slot);
    return;
  }
  const int first_block = split * kSplitBlocks;
  const int blocks =
      min(work.position(work.first + kQueries - 1) / kBlockKeys + 1 - first_block, static_cast<int>(kSplitBlocks));
  if (blocks <= 0) return;

  // Stages: the key blocks, then the value blocks. Loops over blocks are not unrolled: a block of this kernel runs each
  // instruction a few times only, and would wait for the instructions.
  const int own_page = lane < blocks ? p.pages[work.first_page + first_block + lane] : 0;
  int issued = 0;
  int issue_slot = 0;
  const auto issue = [&] {
    if (issued < 2 * blocks) {
      const int part = issued < blocks ? 0 : 1;
      const int page = __shfl_sync(0xffffffffu, own_page, issued - part * blocks);
      load_blocks<kDim, kFp8, 1, kWarps * 32>(p, cache_block(page, p.kv_heads, kv_head) + part,
                                              ring + issue_slot * Shape::kStage);
    }
    ++issued;
    issue_slot = issue_slot + 1 == kRing ? 0 : issue_slot + 1;
    copy_async_commit();
  };
  int slot_here = 0;
  const auto acquire = [&]() -> uint32_t {
    copy_async_wait<kRing - 2>();
    __syncthreads();
    issue();
    const uint32_t here = ring + slot_here * Shape::kStage;
    slot_here = slot_here + 1 == kRing ? 0 : slot_here + 1;
    if constexpr (kFp8) {
      widen_blocks<kDim, 1>(here, wide);
      __syncthreads();
      return wide;
    }
    return here;
  };
#pragma unroll 1
  for (int i = 0; i < kRing - 1; ++i) issue();
  if (split == 0) zero_padding(p, kv_head, slot);  // while the copies are under way

  load_queries<kDim>(p, work, kQueries, weights);
  __syncthreads();
  // Lane's row of matrices (rows 0-7, 8-15; units 0, 1).
  const int row_of_lane = (lane & 7) + ((lane >> 3) & 1) * 8;
  const int unit_of_lane = lane >> 4;
  uint32_t queries[kDim / 16][4];
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const int unit = swizzled_unit<kDim>(row_of_lane, 2 * k + unit_of_lane);
    load_matrices(queries[k], weights + (row_of_lane * (kDim / 8) + unit) * 16);
  }

  // Scores of this warp's 8 keys of every block. ldmatrix brings two steps of 16 dims.
  float scores[kSplitBlocks][4];
#pragma unroll
  for (int j = 0; j < kSplitBlocks; ++j) scores[j][0] = scores[j][1] = scores[j][2] = scores[j][3] = 0.0f;
  const int own_key = warp * 8 + (lane & 7);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    const uint32_t keys = acquire() + own_key * (kDim * 2);
    float here[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < kDim / 32; ++k) {
      uint32_t b[4];
      load_matrices(b, keys + swizzled_unit<kDim>(own_key, 4 * k + (lane >> 3)) * 16);
      mma_m16n8k16(here, queries[2 * k], b[0], b[1]);
      mma_m16n8k16(here, queries[2 * k + 1], b[2], b[3]);
    }
#pragma unroll
    for (int j = 0; j < kSplitBlocks; ++j) {  // registers have no index
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[j][i] = j == block ? here[i] : scores[j][i];
    }
  }

  const int position[2] = {work.position(work.first + g), work.position(work.first + g + 8)};
#pragma unroll
  for (int j = 0; j < kSplitBlocks; ++j) {
    if (j >= blocks) continue;
    const int key = (first_block + j) * kBlockKeys + warp * 8 + 2 * t;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (key + (i & 1) > position[i >> 1]) scores[j][i] = kMinusInfinity;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = fmaxf(scores[j][2 * half], scores[j][2 * half + 1]);
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      if (t == 0) maxima[(g + 8 * half) * kMaxRow + j * kWarps + warp] = largest;
    }
  }
  __syncthreads();  // also: all warps have their queries in registers, weights may take the place
  const Maxima of_lane(maxima + (lane & 15) * kMaxRow, blocks, p.factor);
#pragma unroll
  for (int j = 0; j < kSplitBlocks; ++j) {
    if (warp == 0 && lane < kQueries) rescales[j * kQueries + lane] = of_lane.rescale[j];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = g + 8 * half;
      const float base = __shfl_sync(0xffffffffu, of_lane.base[j], query);
      if (j >= blocks) continue;
      const float low = weight(scores[j][2 * half], base, p.factor);
      const float high = weight(scores[j][2 * half + 1], base, p.factor);
      store_shared4(weights + query * kWeightRow + swizzled_unit<64>(query, j * kWarps + warp) * 16 + t * 4,
                    pack_bf16(low, high));
    }
  }

  // Values: this warp's dimensions, all keys. acquire() begins with the barrier that the weights need.
  SoftmaxState state[2] = {{__shfl_sync(0xffffffffu, of_lane.last, g), 0.0f},
                           {__shfl_sync(0xffffffffu, of_lane.last, g + 8), 0.0f}};
  float o[Shape::kTiles][4];
#pragma unroll
  for (int n = 0; n < Shape::kTiles; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const int first_unit = warp * Shape::kTiles;
  const bool has_dims = warp < Shape::kValueWarps;
#pragma unroll 1
  for (int j = 0; j < blocks; ++j) {
    const uint32_t values = acquire();
    if (!has_dims) continue;
    const float rescale[2] = {rescales[j * kQueries + g], rescales[j * kQueries + g + 8]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] = __fmul_rn(sums[i], rescale[i >> 1]);
#pragma unroll
      for (int n = 0; n < Shape::kTiles; ++n) o[n][i] = __fmul_rn(o[n][i], rescale[i >> 1]);
    }
    uint32_t pair[4];  // kTiles == 1: of two steps
#pragma unroll
    for (int k = 0; k < kBlockKeys / 16; ++k) {
      uint32_t a[4];
      load_matrices(a, weights + row_of_lane * kWeightRow +
                           swizzled_unit<64>(row_of_lane, j * kWarps + 2 * k + unit_of_lane) * 16);
      mma_m16n8k16(sums, a, kBf16One, kBf16One);
      if constexpr (Shape::kTiles == 1) {
        if (k % 2 == 0) {
          const int key = k * 16 + lane;  // four matrices of 8 keys
          load_matrices_transposed(pair, values + (key * (kDim / 8) + swizzled_unit<kDim>(key, first_unit)) * 16);
        }
        mma_m16n8k16(o[0], a, pair[k % 2 * 2], pair[k % 2 * 2 + 1]);
      } else {
        const int key = k * 16 + row_of_lane;
#pragma unroll
        for (int n = 0; n < Shape::kTiles; n += 2) {
          uint32_t b[4];
          const int unit = swizzled_unit<kDim>(key, first_unit + n + unit_of_lane);
          load_matrices_transposed(b, values + (key * (kDim / 8) + unit) * 16);
          mma_m16n8k16(o[n], a, b[0], b[1]);
          mma_m16n8k16(o[n + 1], a, b[2], b[3]);
        }
      }
    }
  }
  if (!has_dims) return;
  state[0].sum = sums[0];
  state[1].sum = sums[2];
  write_queries<kDim, Shape::kTiles>(p, work, work.first, split, first_unit, o, state, warp == 0);
}

template <int kDim, bool kFp8, int kRing>
bool launch(cudaStream_t stream, const AttentionParams& p, dim3 grid) {
  constexpr int kBytes = NarrowShape<kDim, kFp8, kRing>::kShared;
  auto kernel = narrow_kernel<kDim, kFp8, kRing>;
  return cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
                 "attention of few rows") &&
         launch_kernel(kernel, grid, dim3(kWarps * 32), static_cast<size_t>(kBytes), stream, "attention of few rows",
                       p);
}

template <bool kFp8>
bool launch_dim(cudaStream_t stream, int dim, const AttentionParams& p, dim3 grid, int shared_limit) {
  switch (dim) {
    case 32:
      return launch<32, kFp8, 4>(stream, p, grid);
    case 64:
      return launch<64, kFp8, 4>(stream, p, grid);
    case 128:
      return launch<128, kFp8, 4>(stream, p, grid);
    default:
      // Deep where there is the memory: at short contexts a block's time is that of its copies.
      return NarrowShape<256, kFp8, 6>::kShared <= shared_limit ? launch<256, kFp8, 6>(stream, p, grid)
                                                                : launch<256, kFp8, 2>(stream, p, grid);
  }
}

static_assert(NarrowShape<128, false, 4>::kShared <= 99 * 1024 && NarrowShape<128, true, 4>::kShared <= 99 * 1024);
static_assert(NarrowShape<256, false, 2>::kShared <= 99 * 1024 && NarrowShape<256, true, 2>::kShared <= 99 * 1024);

}  // namespace

bool launch_attention_narrow(cudaStream_t stream, int dim, bool fp8, const AttentionParams& p, dim3 grid,
                             int shared_limit) {
  return fp8 ? launch_dim<true>(stream, dim, p, grid, shared_limit)
             : launch_dim<false>(stream, dim, p, grid, shared_limit);
}

}  // namespace tensorfold
