// Ops' paged rows, residuals of several streams, and attention over chosen keys.
#include "kernels/cuda/cuda_ops_impl.h"
#include "kernels/cuda/row_cache.h"
#include "kernels/cuda/select_windows.h"
#include "kernels/cuda/short_conv.h"
#include "kernels/cuda/streams.h"
#include "kernels/ops/latent_ops.h"
#include "kernels/ops/stream_ops.h"

namespace tensorfold {
namespace {

const CudaRowCache& row_cache_of(const RowCache& cache) { return static_cast<const CudaRowCache&>(cache); }

DeviceMatrix matrix_or_none(Tensor t) { return t.data == nullptr ? DeviceMatrix{} : matrix_of(t); }

// One of a pair of outputs or inputs, as the tensor is.
DeviceMatrix wide_of(Tensor t) { return t.rounded ? DeviceMatrix{} : matrix_of(t); }
DeviceInput rounded_of(Tensor t) { return t.rounded ? input_of(t) : DeviceInput{}; }

CudaHyper hyper_of(const HyperArgs& in) {
  CudaHyper args;
  args.streams = matrix_of(in.streams);
  args.count = in.count;
  args.mix = matrix_or_none(in.mix);
  args.scale = vector_data(in.scale);
  args.base = vector_data(in.base);
  args.eps = in.eps;
  args.iterations = in.iterations;
  args.weights = matrix_or_none(in.weights);
  if (in.out.data != nullptr) {
    args.out_f = wide_of(in.out);
    args.out_b = rounded_of(in.out);
  }
  args.zero = matrix_or_none(in.zero);
  args.y = matrix_or_none(in.y);
  args.carried = matrix_or_none(in.carried);
  return args;
}

}  // namespace

std::unique_ptr<RowCache> CudaOps::make_row_cache(std::span<const RowCacheLayer> layers, int64_t pages) {
  use_device();
  return CudaRowCache::create(layers, pages, stream_);
}

void CudaOps::row_write(RowCache& cache, int64_t layer, Tensor values, const RowBatch& rows) {
  flush();
  cuda_row_write(stream_, row_cache_of(cache).layer(layer), device_rows(rows), matrix_of(values));
}

void CudaOps::scaled_silu(Tensor x, float scale) {
  flush();
  cuda_scaled_silu(stream_, matrix_of(x), scale);
}

void CudaOps::mix_streams(const MixStreamsArgs& in) {
  flush();
  CudaMixStreams args;
  args.x_f = wide_of(in.x);
  args.x_b = rounded_of(in.x);
  args.gate = matrix_of(in.gate);
  args.count = in.count;
  args.out_f = wide_of(in.out);
  args.out_b = rounded_of(in.out);
  cuda_mix_streams(stream_, args);
}

void CudaOps::inject_streams(const InjectStreamsArgs& in) {
  flush();
  cuda_inject_streams(stream_, matrix_of(in.x), matrix_of(in.inject), in.count, matrix_of(in.y));
}

void CudaOps::gate_streams(const GateStreamsArgs& in) {
  flush();
  cuda_gate_streams(stream_, matrix_of(in.key), matrix_of(in.query), matrix_of(in.value), in.count, matrix_of(in.out));
}

void CudaOps::short_conv(const ShortConvArgs& in) {
  flush();
  kernel_check(in.conv->size() == in.shape->channels * in.shape->taps, "short_conv: shapes differ");
  cuda_short_conv(stream_, device_rows(in.rows),
                  {in.shape, in.layer, matrix_of(in.x), vector_data(in.conv), matrix_of(in.out)});
}

void CudaOps::embed_ngrams(const EmbedNgramsArgs& in) {
  flush();
  const ScratchScope scope(*this);
  const DeviceRows& rows = device_rows(in.rows);
  const int64_t count = static_cast<int64_t>(in.tables.size());
  kernel_check(count >= 1 && in.out.rows == rows.rows, "embed_ngrams: shapes differ");
  const int64_t cols = in.tables[0]->in_features();
  kernel_check(in.out.cols == count * cols && cols % 8 == 0,
               "embed_ngrams: shapes differ, or tables whose columns are no multiple of 8");
  CudaNgramRows args;
  args.heads = in.heads;
  args.first_head = in.first_head;
  args.count = count;
  args.layer = in.layer;
  args.shape = in.shape;
  args.numbers = static_cast<int32_t*>(take(4 * count * rows.rows));
  cuda_ngram_rows(stream_, rows, args);
  // Values of tables are bf16 already: rounding changes none.
  const Tensor whole = in.out.rounded ? scratch(rows.rows, in.out.cols) : in.out;
  for (int64_t i = 0; i < count; ++i) {
    cuda_embed(stream_, cuda_weight(*in.tables[static_cast<size_t>(i)]), args.numbers + i * rows.rows,
               matrix_of(whole.columns(i * cols, cols)));
  }
  if (in.out.rounded) cuda_to_input(stream_, matrix_of(whole), input_of(in.out));
}

void CudaOps::pool_means(RowCache& cache, const PoolMeansArgs& in) {
  flush();
  CudaPoolMeans args;
  args.from = row_cache_of(cache).layer(in.from);
  args.into = row_cache_of(cache).layer(in.into);
  kernel_check(args.into.tokens == in.tokens && in.norm->size() == args.into.width, "pool_means: shapes differ");
  args.norm = vector_data(in.norm);
  args.eps = in.eps;
  args.inv_freq = vector_data(in.inv_freq);
  args.pairs = in.inv_freq->size();
  cuda_pool_means(stream_, device_rows(in.rows), args);
}

void CudaOps::select_windows(const RowCache& cache, const SelectWindowsArgs& in) {
  flush();
  const ScratchScope scope(*this);
  const DeviceRows& rows = device_rows(in.rows);
  CudaSelectWindows args;
  args.layer = row_cache_of(cache).layer(in.layer);
  kernel_check(args.layer.tokens == in.tokens, "select_windows: shapes differ");
  args.heads = in.heads;
  args.q = matrix_of(in.q);
  args.scale = in.scale;
  args.out = matrix_of(in.out);
  args.workspace = take_workspace(cuda_select_workspace(rows, in.tokens, in.out.cols));
  cuda_select_windows(stream_, rows, args);
}

void CudaOps::sparse_attention(const KvCache& cache, int64_t layer, const AttentionArgs& in, Tensor selected,
                               int64_t tokens) {
  flush();
  const ScratchScope scope(*this);
  const DeviceRows& rows = device_rows(in.rows);
  CudaAttentionArgs args;
  args.q = matrix_of(in.q);
  args.gate = matrix_or_none(in.gate);
  args.out = input_of(in.out);
  args.heads = in.heads;
  args.head_dim = in.head_dim;
  args.kv_head_of = in.kv_head_of;
  args.scale = in.scale;
  args.workspace = static_cast<float*>(
      take_workspace(4 * cuda_sparse_attention_workspace(rows, in.heads, in.head_dim, selected.cols, tokens)));
  cuda_sparse_attention(stream_, static_cast<const CudaKvCache&>(cache), layer, rows, args, matrix_of(selected),
                        tokens);
}

void CudaOps::hyper_collapse(const HyperArgs& in) {
  flush();
  const int64_t n = in.count;
  const bool whole = in.mix.cols == n * (2 + n);
  kernel_check(in.mix.data == nullptr || (in.base->size() == in.mix.cols && in.scale->size() == (whole ? 3 : 1)),
               "hyper_collapse: shapes differ");
  cuda_hyper_collapse(stream_, hyper_of(in));
}

void CudaOps::hyper_expand(const HyperArgs& in) {
  flush();
  cuda_hyper_expand(stream_, hyper_of(in));
}

}  // namespace tensorfold
