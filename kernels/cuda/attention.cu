// Attention: the choice of kernels, and the fold of splits.
//
// The arithmetic, for every row of every pass (contract, sections 3 and 4). Keys are visited in blocks of 64 and splits
// of 512, both at absolute positions. Queries and keys are bf16 (queries rounded here, keys when they were written).
//   score   chain of m16n8k16 accumulations over dims in steps of 16, ascending; a masked one is -infinity
//   m       the largest score so far of the split
//   weight  exp2((score - m) * factor), factor = fp32(scale * log2 e), by the hardware's ex2; rounded to bf16
//   sum, o  first times exp2((m before - m) * factor), then a chain over the block's keys in steps of 16, ascending:
//   the
//           sum is the product with a column of ones, so that it is of the rounded weights, in the order of o
//   splits  folded in ascending order, beginning with split 0 itself:
//           next = max(M, m); keep = exp2((M - next) * factor), take = exp2((m - next) * factor);
//           Sum = fma(Sum, keep, sum * take), O = fma(O, keep, o * take)
//   out     O * (1 / Sum) + 0, then, with a gate, times 1 / (1 + exp2(-gate * log2 e)); rounded to bf16
// A wholly masked block multiplies by one and adds zeros; a split in which a row has no keys is not folded. Who
// computes what, and in which of 16 places of a tile a query stands, is in none of this.
//
// Three kernels compute splits (attention_tile.cu, attention_narrow.cu, attention_window.cuh, the last alone or in
// clusters); the first can also walk all splits of a tile and fold them itself. Which one runs depends on sizes and on
// the device; the tests show that it changes no bit.
#include <algorithm>
#include <string>

#include "kernels/cuda/attention_kernels.cuh"
#include "kernels/cuda/attention_window.cuh"
#include "kernels/cuda/kv_cache.h"

namespace tensorfold {
namespace {

// From this many queries a multiprocessor on, tiles alone fill the device.
constexpr int64_t kWholeQueries = 64;

/// How a launch is cut; sizes only, no bit of a result depends on it.
struct Cut {
  int splits = 1;
  bool whole = true;  // blocks walk all splits
  int wave = 1;       // splits a launch, if not whole
};

Cut cut_of(const DeviceRows& rows, int64_t heads, int dim, const AttentionLimits& limits) {
  Cut cut;
  cut.splits = static_cast<int>(std::max<int64_t>(1, (rows.max_keys + kKeySplit - 1) / kKeySplit));
  const int64_t queries = rows.rows * heads;
  cut.whole = cut.splits == 1 || queries >= kWholeQueries * limits.multiprocessors;
  cut.wave = splits_at_a_time(cut.splits, queries, dim);
  return cut;
}

int64_t scratch_floats(int dim, const AttentionLimits& limits) {
  return dim == 256 ? int64_t{limits.multiprocessors} * kMaxTileWarps * 32 * (dim / 2) : 0;
}

/// kAhead: splits whose states are read at a time.
template <int kDim, int kAhead>
__global__ void __launch_bounds__(64) fold_kernel(const __grid_constant__ AttentionParams p) {
  constexpr int kThreads = kDim < 64 ? kDim : 64;
  pdl_launch();
  const int64_t index = blockIdx.x;  // row and head
  const int dim = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
  const int64_t row = index / p.heads;
  const int head = static_cast<int>(index % p.heads);
  if (p.chosen != nullptr) pdl_wait();  // positions are then lengths of lists, which this pass makes
  const int group = p.group_of[row];
  const int64_t position = p.positions[row];
  if (p.chosen == nullptr) pdl_wait();
  const int64_t split_step = static_cast<int64_t>(p.rows) * p.heads;
  const float* part_o = p.part_o + index * kDim + dim;
  const SoftmaxState* part_state = p.part_state + index;
  // Every block of a row and head has a state of its own.
  SoftmaxState* run_state = p.run_state + index * 4 + blockIdx.y;
  float* run_o = p.run_o + index * kDim + dim;
  SoftmaxState next_state[kAhead];
  float next_o[kAhead];
  const auto read = [&](int first, int count) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t split = min(first + i, count - 1);
      next_state[i] = part_state[split * split_step];
      next_o[i] = part_o[split * split_step * kDim];
    }
  };
  read(0, p.split_count);
  const int64_t column = static_cast<int64_t>(head) * p.head_dim + dim;
  const bool gated = p.gate != nullptr && p.last_splits && group >= 0 && dim < p.head_dim;
  const float gate = gated ? p.gate[row * p.gate_stride + column] : 0.0f;
  SoftmaxState state = {kMinusInfinity, 0.0f};
  float o = 0.0f;
  if (p.first_split > 0) {
    state = *run_state;
    o = *run_o;
  }
  if (group < 0) return;                                          // zeros already
  const int splits = static_cast<int>(position / kKeySplit) + 1;  // of this row
  const int end = min(splits - p.first_split, p.split_count);     // of them here
  for (int first = 0; first < end; first += kAhead) {
    if (first > 0) read(first, end);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= end) break;
      if (p.first_split + first + i == 0) {
        state = next_state[i];
        o = next_o[i];
      } else {
        const FoldFactors f = fold_state(&state, next_state[i], p.factor);
        o = fold_value(o, next_o[i], f);
      }
    }
  }
  if (!p.last_splits) {
    __syncthreads();  // all have read the state
    if (threadIdx.x == 0) *run_state = state;
    *run_o = o;
    return;
  }
  if (dim >= p.head_dim) return;
  float value = finished_value(o, __fdiv_rn(1.0f, state.sum));
  if (gated) value = gated_value(value, gate);
  p.out[row * p.out_stride + column] = __float2bfloat16_rn(value);
}

}  // namespace

bool launch_attention_fold(cudaStream_t stream, int dim, const AttentionParams& p) {
  const unsigned threads = dim < 64 ? static_cast<unsigned>(dim) : 64;
  const dim3 grid(static_cast<unsigned>(p.rows) * static_cast<unsigned>(p.heads), static_cast<unsigned>(dim) / threads);
  const bool few = p.split_count <= 8;
  auto kernel = dim == 32    ? (few ? fold_kernel<32, 4> : fold_kernel<32, 32>)
                : dim == 64  ? (few ? fold_kernel<64, 4> : fold_kernel<64, 32>)
                : dim == 128 ? (few ? fold_kernel<128, 4> : fold_kernel<128, 32>)
                             : (few ? fold_kernel<256, 4> : fold_kernel<256, 32>);
  return launch_kernel(kernel, grid, dim3(threads), 0, stream, "fold of attention splits", p);
}

namespace {

/// Cuts the queries into tiles of this many.
void set_tiles(AttentionParams* p, int64_t heads_per_kv, int queries) {
  p->tile_queries = queries;
  p->slots = static_cast<int>(tile_slots(p->rows, p->max_groups, heads_per_kv, queries));
  p->works = p->slots * p->kv_heads;
}

/// Whether attention_window.cuh computes the splits, and how.
struct WindowChoice {
  int tiles = 0;  // of 16 queries a block; 0: another kernel
  bool cluster = false;
};

/// The bounds are where it was measured to be faster than the other kernels on an H200 (24 q and 4 kv heads of 256;
/// more than 16 queries in clusters: there and with 32 and 8 of 128, at 1,024 tokens).
WindowChoice choose_window(const AttentionParams& p, const Cut& cut, int64_t heads_per_kv, int64_t queries, int dim,
                           bool fp8, const AttentionLimits& limits) {
  const bool walks = cut.whole && cut.splits > 1;
  if (fp8 || dim < 128 || walks) return {};
  // A cluster a tile of 16 queries.
  const int64_t blocks_of_clusters =
      tile_slots(p.rows, p.max_groups, heads_per_kv, 16) * p.kv_heads * cut.splits * (dim / 64);
  if (limits.clusters && (queries <= 16 ? 2 : 1) * blocks_of_clusters <= limits.multiprocessors &&
      window_shared_bytes(dim, 1, true) <= limits.shared_bytes) {
    return {1, true};
  }
  const int tiles = queries <= 16 ? 1 : queries <= 48 ? 3 : 6;
  const int64_t works = tile_slots(p.rows, p.max_groups, heads_per_kv, tiles * 16) * p.kv_heads;
  const int64_t blocks = works * cut.splits;
  if (cut.splits == 1 || window_shared_bytes(dim, tiles, false) > limits.shared_bytes) return {};
  const bool enough = tiles == 6   ? 3 * blocks >= limits.multiprocessors
                      : tiles == 3 ? blocks >= limits.multiprocessors
                                   : blocks >= int64_t{8} * limits.multiprocessors;
  return {enough ? tiles : 0, false};
}

}  // namespace

AttentionLimits attention_limits() {
  AttentionLimits limits;
  int device = 0;
  cuda_ok(cudaGetDevice(&device), "device of this thread");
  cuda_ok(cudaDeviceGetAttribute(&limits.multiprocessors, cudaDevAttrMultiProcessorCount, device), "device properties");
  cuda_ok(cudaDeviceGetAttribute(&limits.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          "device properties");
  limits.clusters = pdl_supported();  // both came with compute capability 9
  return limits;
}

int splits_at_a_time(int64_t splits, int64_t queries, int dim) {
  const int64_t fit = kPartFloats / std::max<int64_t>(1, queries * (dim + 2));
  return static_cast<int>(std::min({splits, std::max(fit, kFewestSplits), kMostSplits}));
}

const char* attention_refusal(const PagedKvCache& cache, int64_t layer, const DeviceRows& rows,
                              const CudaAttentionArgs& args) {
  if (layer < 0 || layer >= cache.layers()) return "attention: no such layer in the cache";
  if (args.head_dim != cache.head_dim()) return "attention: head dimension differs from the cache's";
  if (args.heads < 1 || args.heads > 65535 || static_cast<int64_t>(args.kv_head_of.size()) != args.heads) {
    return "attention: not one key/value head for each head";
  }
  for (int64_t h = 0; h < args.heads; ++h) {
    const int32_t kv = args.kv_head_of[static_cast<size_t>(h)];
    if (kv < 0 || kv >= cache.kv_heads() || (h > 0 && kv < args.kv_head_of[static_cast<size_t>(h - 1)])) {
      return "attention: key/value heads of the heads must ascend and be in the cache";
    }
  }
  if (!attention_aligned(args.q.data, args.q.stride, 4) || !attention_aligned(args.gate.data, args.gate.stride, 4) ||
      !attention_aligned(args.out.data, args.out.stride, 8) || !attention_aligned(args.workspace, 0, 4)) {
    return "attention: rows must begin at multiples of 16 bytes";
  }
  if (rows.max_groups < 1 || rows.max_keys > (int64_t{1} << 30)) return "attention: groups or keys out of range";
  return nullptr;
}

AttentionParams attention_params(const PagedKvCache& cache, int64_t layer, const DeviceRows& rows,
                                 const CudaAttentionArgs& args) {
  AttentionParams p = {};
  p.q = args.q.data;
  p.q_stride = args.q.stride;
  p.gate = args.gate.data;
  p.gate_stride = args.gate.stride;
  p.out = args.out.data;
  p.out_stride = args.out.stride;
  p.blocks = cache.layer_data(layer);
  p.scales = cache.layer_scales(layer);
  p.group_count = rows.group_count;
  p.group_of = rows.group_of;
  p.positions = rows.positions;
  p.groups = rows.groups;
  p.pages = rows.pages;
  p.factor = static_cast<float>(static_cast<double>(args.scale) * 1.4426950408889634);
  p.rows = rows.rows;
  p.max_groups = rows.max_groups;
  p.heads = static_cast<int>(args.heads);
  p.head_dim = static_cast<int>(args.head_dim);
  p.kv_heads = static_cast<int>(cache.kv_heads());
  int head = 0;
  for (int kv = 0; kv < p.kv_heads; ++kv) {
    p.first_head[kv] = static_cast<uint16_t>(head);
    while (head < p.heads && args.kv_head_of[static_cast<size_t>(head)] == kv) ++head;
    p.first_head[kv + 1] = static_cast<uint16_t>(head);
  }
  return p;
}

int64_t most_heads_per_kv(const AttentionParams& p) {
  int64_t most = 1;
  for (int kv = 0; kv < p.kv_heads; ++kv) most = std::max<int64_t>(most, p.first_head[kv + 1] - p.first_head[kv]);
  return most;
}

int64_t cuda_attention_workspace(const DeviceRows& rows, int64_t heads, int64_t head_dim) {
  const int dim = padded_head_dim(head_dim);
  const AttentionLimits limits = attention_limits();
  const Cut cut = cut_of(rows, heads, dim, limits);
  if (cut.splits == 1) return 0;
  // Enough for launches with fewer rows or keys too, which may be cut in another way.
  const int64_t queries = std::min(rows.rows * heads, kWholeQueries * limits.multiprocessors);
  const int64_t split = queries * (dim + 2);
  const int64_t parts = std::min(split * cut.splits, std::max(split * kFewestSplits, kPartFloats));
  const int64_t needed = parts + queries * (dim + 8);
  return cut.whole ? std::max(needed, scratch_floats(dim, limits)) : needed;
}

void cuda_attention(cudaStream_t stream, const CudaKvCache& kv_cache, int64_t layer, const DeviceRows& rows,
                    const CudaAttentionArgs& args) {
  const PagedKvCache& cache = static_cast<const PagedKvCache&>(kv_cache);
  if (rows.rows <= 0) return;
  if (const char* wrong = attention_refusal(cache, layer, rows, args); wrong != nullptr) {
    cuda_ok(cudaErrorInvalidValue, wrong);
    return;
  }
  const int dim = cache.padded_dim();
  const AttentionLimits limits = attention_limits();
  const Cut cut = cut_of(rows, args.heads, dim, limits);
  AttentionParams p = attention_params(cache, layer, rows, args);
  const int64_t heads_per_kv = most_heads_per_kv(p);
  // Queries of a group and kv head, on average; tiles of that many read each key once.
  const int64_t groups = std::min(rows.max_groups, rows.rows);
  const int64_t queries = (rows.rows * heads_per_kv + groups - 1) / groups;
  const int warps =
      static_cast<int>(std::clamp<int64_t>((queries + 15) / 16, 1, attention_tile_max_warps(dim, limits.shared_bytes)));
  p.whole = cut.whole;
  set_tiles(&p, heads_per_kv, 16);
  const bool walks = cut.whole && cut.splits > 1;
  // Few tiles leave most of the device idle: then more blocks are worth reading keys several times (from L2).
  const bool narrow = !walks && (queries <= 16 || int64_t{p.works} * cut.splits <= int64_t{2} * limits.multiprocessors);
  if (!narrow) set_tiles(&p, heads_per_kv, warps * 16);
  const WindowChoice window = choose_window(p, cut, heads_per_kv, queries, dim, cache.fp8(), limits);
  if (window.tiles > 0) set_tiles(&p, heads_per_kv, window.tiles * 16);

  const int64_t states = static_cast<int64_t>(p.rows) * p.heads;
  if (cut.whole) {
    p.scratch = args.workspace;
  } else {
    p.part_o = args.workspace;
    p.run_o = p.part_o + states * dim * cut.wave;
    p.part_state = reinterpret_cast<SoftmaxState*>(p.run_o + states * dim);
    p.run_state = p.part_state + states * cut.wave;
  }
  const int wave = cut.whole ? cut.splits : cut.wave;
  for (p.first_split = 0; p.first_split < cut.splits; p.first_split += wave) {
    p.split_count = std::min(wave, cut.splits - p.first_split);
    p.last_splits = p.first_split + p.split_count == cut.splits;
    // Blocks that keep folded accumulators in scratch are no more than there is scratch for: they take several tiles.
    const int blocks = walks && scratch_floats(dim, limits) > 0 ? std::min(p.works, limits.multiprocessors) : p.works;
    const dim3 grid(static_cast<unsigned>(blocks), cut.whole ? 1 : static_cast<unsigned>(p.split_count));
    bool launched = false;
    if (window.tiles > 0) {
      launched = launch_attention_window(stream, dim, p, grid, window.tiles, window.cluster);
    } else if (narrow) {
      launched = launch_attention_narrow(stream, dim, cache.fp8(), p, grid, limits.shared_bytes);
    } else {
      launched = launch_attention_tile(stream, dim, cache.fp8(), p, grid, warps, limits.shared_bytes);
    }
    if (!launched) return;
    if (!cut.whole && !launch_attention_fold(stream, dim, p)) return;
  }
}

}  // namespace tensorfold
