// A pass's rows on their way to the device, and kept launches: CUDA graphs for powers of two of rows and for contexts.
#include "kernels/cuda/cuda_ops_impl.h"

namespace tensorfold {
namespace {

int64_t row_bucket(int64_t rows) {
  int64_t bucket = 1;
  while (bucket < rows) bucket *= 2;
  return bucket;
}

int64_t context_bucket(int64_t keys) {
  int64_t bucket = Ops::kKeptContext;
  while (bucket < keys) bucket *= 4;
  return bucket;
}

int64_t pages_of(RunKind kind, const RowGroup& group) {
  const int64_t tokens = group.first_position + (kind == RunKind::kBlock ? 0 : group.rows);
  return (tokens + kPageTokens - 1) / kPageTokens;
}

}  // namespace

// Copies the batch to `memory` and says where its parts lie.
DeviceRows CudaOps::place_batch(RunKind kind, const RowBatch& rows, int64_t padded, int64_t max_groups,
                                int64_t max_keys, std::byte* memory, const BatchLayout& layout) {
  DeviceRows out;
  out.rows = static_cast<int32_t>(padded);
  out.max_groups = static_cast<int32_t>(max_groups);
  out.max_keys = max_keys;
  out.group_count = reinterpret_cast<int32_t*>(memory + layout.group_count);
  out.tokens = reinterpret_cast<int32_t*>(memory + layout.tokens);
  out.positions = reinterpret_cast<int64_t*>(memory + layout.positions);
  out.group_of = reinterpret_cast<int32_t*>(memory + layout.group_of);
  out.groups = reinterpret_cast<DeviceGroup*>(memory + layout.groups);
  out.states = reinterpret_cast<float**>(memory + layout.states);
  out.pages = reinterpret_cast<int32_t*>(memory + layout.pages);

  auto* staged = static_cast<std::byte*>(staging_.take(layout.bytes));
  if (staged == nullptr) return out;
  std::memset(staged, 0, static_cast<size_t>(layout.bytes));
  *reinterpret_cast<int32_t*>(staged + layout.group_count) = static_cast<int32_t>(rows.groups.size());
  std::copy(rows.tokens.begin(), rows.tokens.end(), reinterpret_cast<int32_t*>(staged + layout.tokens));
  std::copy(rows.positions.begin(), rows.positions.end(), reinterpret_cast<int64_t*>(staged + layout.positions));
  auto* group_of = reinterpret_cast<int32_t*>(staged + layout.group_of);
  std::fill_n(group_of, padded, -1);
  auto* groups = reinterpret_cast<DeviceGroup*>(staged + layout.groups);
  auto* pages = reinterpret_cast<int32_t*>(staged + layout.pages);
  int32_t page = 0;
  for (size_t i = 0; i < rows.groups.size(); ++i) {
    const RowGroup& group = rows.groups[i];
    const int64_t needed = pages_of(kind, group);
    kernel_check(group.first_row >= 0 && group.rows >= 0 && group.first_row + group.rows <= padded,
                 "row group outside the pass");
    kernel_check(static_cast<int64_t>(group.pages.size()) >= needed, "row group: page table too short");
    groups[i].first_position = group.first_position;
    groups[i].first_row = static_cast<int32_t>(group.first_row);
    groups[i].rows = static_cast<int32_t>(group.rows);
    groups[i].accepted = static_cast<int32_t>(group.accepted);
    groups[i].certain = static_cast<int32_t>(group.certain);
    groups[i].first_page = page;
    groups[i].page_count = static_cast<int32_t>(needed);
    std::copy_n(group.pages.begin(), needed, pages + page);
    page += static_cast<int32_t>(needed);
    std::fill_n(group_of + group.first_row, group.rows, static_cast<int32_t>(i));
  }
  auto* states = reinterpret_cast<float**>(staged + layout.states);
  for (size_t layer = 0; layer < rows.recurrent.size(); ++layer) {
    for (size_t i = 0; i < rows.recurrent[layer].size(); ++i) {
      states[layer * static_cast<size_t>(max_groups) + i] =
          static_cast<CudaRecurrentState*>(rows.recurrent[layer][i])->data();
    }
  }
  cuda_ok(cudaMemcpyAsync(memory, staged, static_cast<size_t>(layout.bytes), cudaMemcpyHostToDevice, stream_),
          "rows of a pass");
  return out;
}

Tensor CudaOps::run(RunKind kind, const RowBatch& rows, Tensor input, bool keep, const RunBody& body) {
  flush();
  const int64_t count = rows.rows(), layers = static_cast<int64_t>(rows.recurrent.size());
  int64_t keys = std::max<int64_t>(rows.least_keys, 1), page_count = 0;
  for (const RowGroup& group : rows.groups) {
    // A block's own rows are no keys of the cache.
    keys = std::max(keys, group.first_position + (kind == RunKind::kBlock ? 0 : group.rows));
    page_count += pages_of(kind, group);
  }
  const int64_t padded = row_bucket(count);
  const bool of_one = kind == RunKind::kForward && padded > 1 && padded <= kMostRowsOfOne &&
                      (rows.groups.size() == 1 || (rows.groups.empty() && rows.of_one));
  const int64_t most_groups = of_one ? 1 : padded;
  const BatchLayout kept_layout(padded, most_groups, layers, page_count);
  RowBatch batch = rows;
  if (!options_.graphs || !keep || count == 0 || count > kMostGraphRows || kept_layout.bytes > kBatchBytes) {
    const int64_t groups = static_cast<int64_t>(rows.groups.size());
    const BatchLayout layout(count, groups, layers, page_count);
    auto* memory = static_cast<std::byte*>(take(layout.bytes));
    const DeviceRows device = place_batch(kind, rows, count, groups, keys, memory, layout);
    batch.device = &device;
    const Tensor result = body(batch, input);
    flush();
    return result;
  }

  if (kept_batch_ == nullptr) {
    kept_batch_ = static_cast<std::byte*>(device_allocate(kBatchBytes, "rows of kept launches"));
    kernel_check(kept_batch_ != nullptr, "the GPU has no memory left for the rows of kept launches");
  }
  const int64_t context = context_bucket(keys);
  const DeviceRows device = place_batch(kind, rows, padded, most_groups, context, kept_batch_, kept_layout);
  std::vector<int32_t> tokens(rows.tokens.begin(), rows.tokens.end());
  std::vector<int64_t> positions(rows.positions.begin(), rows.positions.end());
  tokens.resize(static_cast<size_t>(padded));
  positions.resize(static_cast<size_t>(padded));
  batch.tokens = tokens;
  batch.positions = positions;
  batch.device = &device;

  arena_ = &run_arenas_[static_cast<size_t>(kind)];
  arena_->release({});
  Tensor padded_input;
  if (input.data != nullptr) {
    padded_input = scratch(padded, input.cols);
    const size_t width = static_cast<size_t>(input.cols) * 4;
    cuda_ok(cudaMemcpy2DAsync(padded_input.data, static_cast<size_t>(padded_input.stride) * 4, input.data,
                              static_cast<size_t>(input.stride) * 4, width, static_cast<size_t>(count),
                              cudaMemcpyDeviceToDevice, stream_),
            "input rows");
  }
  const ScratchMark begin = arena_->mark();
  const RunKey key{kind, padded, most_groups, context};
  Tensor result;
  if (const auto kept = kept_.find(key); kept != kept_.end()) {
    for (const Segment& segment : kept->second.segments) {
      cuda_ok(cudaGraphLaunch(segment.graph, stream_), "launching a kept pass");
      if (!segment.step) continue;
      cuda_ok(cudaStreamSynchronize(stream_), "the GPU");
      segment.step();
    }
    result = kept->second.result;
  } else {
    // Once as it is: this pass needs the result, and every kernel is loaded afterwards. Then for the graph.
    result = body(batch, padded_input);
    flush();
    arena_->release(begin);
    KeptRun run;
    run.result = result;
    if (cuda_ok(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "capturing a pass")) {
      capturing_ = &run;
      body(batch, padded_input);
      flush();
      end_segment();
      capturing_ = nullptr;
      if (run.complete) {
        kept_[key] = std::move(run);
      } else {
        destroy(run);
      }
    }
  }
  arena_ = &pass_arena_;
  return result.data == nullptr ? result : result.row_range(0, count);
}

}  // namespace tensorfold
