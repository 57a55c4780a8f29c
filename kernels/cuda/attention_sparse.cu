// Attention over chosen keys. A row's keys are a list: the tokens of its windows, then those after its last whole
// window, ascending. The list takes the place of positions 0, 1, 2 … in attention_narrow.cuh, block by block and split
// by split, so all chains are attention.cu's over the list, and a row that chose everything has attention's bits. A row
// shares nothing with others: how rows are cut into pieces and blocks is in none of it.
#include <algorithm>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/attention_narrow.cuh"
#include "kernels/cuda/kv_cache.h"
#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int kListThreads = 256;

struct ListParams {
  const int32_t* group_of;
  const int64_t* positions;
  const DeviceGroup* groups;
  const int32_t* pages;
  const float* selected;
  int64_t selected_stride;
  int32_t* list;  // [rows][stride]
  int64_t* last;  // [rows]: the list's length - 1
  int64_t stride;
  int tokens, most;
};

// A block a row.
__global__ void __launch_bounds__(kListThreads) list_kernel(const __grid_constant__ ListParams p) {
  pdl_launch();
  pdl_wait();
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x;
  const int g = p.group_of[row];
  if (g < 0) {
    if (thread == 0) p.last[row] = 0;
    return;
  }
  const float* selected = p.selected + row * p.selected_stride;
  const int position = static_cast<int>(p.positions[row]), windows = (position + 1) / p.tokens;
  int count = 0;
  for (int first = 0; first < p.most; first += kListThreads) {
    const int i = first + thread;
    count += __syncthreads_count(i < p.most && selected[i] >= 0.0f ? 1 : 0);
  }
  count = min(count, windows);
  const int chosen = count * p.tokens, rest = windows * p.tokens;
  const int length = chosen + position + 1 - rest;
  const int32_t* pages = p.pages + p.groups[g].first_page;
  for (int i = thread; i < length; i += kListThreads) {
    int at = rest + i - chosen;
    if (i < chosen) at = min(static_cast<int>(selected[i / p.tokens]), windows - 1) * p.tokens + i % p.tokens;
    p.list[row * p.stride + i] = pages[at / kBlockKeys] * kBlockKeys + at % kBlockKeys;
  }
  if (thread == 0) p.last[row] = length - 1;
}

// Sizes of a launch; no bit of a result depends on them.
struct Cut {
  int64_t stride = 0;  // of a row's list
  int64_t splits = 1;
  int64_t row_floats = 0;  // workspace of a row
  int64_t piece = 1;       // rows at a time
};

Cut cut_of(const DeviceRows& rows, int64_t heads, int dim, int64_t most, int64_t tokens) {
  Cut cut;
  const int64_t keys = std::max<int64_t>(1, std::min(rows.max_keys, most * tokens + tokens - 1));
  cut.stride = (keys + 3) / 4 * 4;
  cut.splits = (keys + kKeySplit - 1) / kKeySplit;
  cut.row_floats = 4 + cut.stride + (cut.splits > 1 ? heads * cut.splits * (dim + 2) : 0);
  cut.piece = std::clamp<int64_t>(kPartFloats / cut.row_floats, 1, std::max<int64_t>(1, rows.rows));
  return cut;
}

}  // namespace

int64_t cuda_sparse_attention_workspace(const DeviceRows& rows, int64_t heads, int64_t head_dim, int64_t most,
                                        int64_t tokens) {
  const Cut cut = cut_of(rows, heads, padded_head_dim(head_dim), most, tokens);
  return cut.piece * cut.row_floats;
}

void cuda_sparse_attention(cudaStream_t stream, const CudaKvCache& kv_cache, int64_t layer, const DeviceRows& rows,
                           const CudaAttentionArgs& args, DeviceMatrix selected, int64_t tokens) {
  const PagedKvCache& cache = static_cast<const PagedKvCache&>(kv_cache);
  if (rows.rows <= 0) return;
  if (const char* wrong = attention_refusal(cache, layer, rows, args); wrong != nullptr) {
    cuda_ok(cudaErrorInvalidValue, wrong);
    return;
  }
  kernel_check(selected.rows == rows.rows && selected.cols >= 1 && tokens >= 1 && tokens <= kPageTokens &&
                   cache.pages() <= (int64_t{1} << 31) / kPageTokens - 1,
               "sparse_attention: shapes differ, or more pages than a list can tell apart");
  const int dim = cache.padded_dim();
  const AttentionLimits limits = attention_limits();
  const Cut cut = cut_of(rows, args.heads, dim, selected.cols, tokens);
  AttentionParams p = attention_params(cache, layer, rows, args);
  const int64_t tiles = (most_heads_per_kv(p) + kNarrowQueries - 1) / kNarrowQueries;
  for (int64_t first = 0; first < rows.rows; first += cut.piece) {
    const int64_t count = std::min<int64_t>(cut.piece, rows.rows - first);
    // The workspace: ends of lists, lists, states of splits. Each begins at a multiple of 16 bytes.
    auto* last = reinterpret_cast<int64_t*>(args.workspace);
    auto* list = reinterpret_cast<int32_t*>(args.workspace + 4 * count);
    const ListParams l = {rows.group_of + first,
                          rows.positions + first,
                          rows.groups,
                          rows.pages,
                          selected.data + first * selected.stride,
                          selected.stride,
                          list,
                          last,
                          cut.stride,
                          static_cast<int>(tokens),
                          static_cast<int>(selected.cols)};
    if (!launch_kernel(list_kernel, dim3(static_cast<unsigned>(count)), dim3(kListThreads), 0, stream,
                       "lists of chosen keys", l)) {
      return;
    }
    p.q = args.q.data + first * args.q.stride;
    if (args.gate.data != nullptr) p.gate = args.gate.data + first * args.gate.stride;
    p.out = args.out.data + first * args.out.stride;
    p.group_of = l.group_of;
    p.positions = last;
    p.chosen = list;
    p.chosen_stride = cut.stride;
    p.rows = static_cast<int>(count);
    p.slots = static_cast<int>(count * tiles);
    p.tile_queries = kNarrowQueries;
    p.works = p.slots * p.kv_heads;
    p.whole = cut.splits == 1;
    p.first_split = 0;
    p.split_count = static_cast<int>(cut.splits);
    p.last_splits = true;
    p.part_o = args.workspace + count * (4 + cut.stride);
    p.part_state = reinterpret_cast<SoftmaxState*>(p.part_o + count * args.heads * cut.splits * dim);
    const dim3 grid(static_cast<unsigned>(p.works), static_cast<unsigned>(cut.splits));
    constexpr const char* kWhat = "attention over chosen keys";
    const bool launched = cache.fp8()
                              ? launch_narrow_dim<true, true>(stream, dim, p, grid, limits.shared_bytes, kWhat)
                              : launch_narrow_dim<false, true>(stream, dim, p, grid, limits.shared_bytes, kWhat);
    if (!launched || (!p.whole && !launch_attention_fold(stream, dim, p))) return;
  }
}

}  // namespace tensorfold
