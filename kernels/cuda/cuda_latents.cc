// Ops' operations on latents.
#include "kernels/cuda/cuda_ops_impl.h"
#include "kernels/cuda/latents.h"
#include "kernels/cuda/select_windows.h"
#include "kernels/ops/block_ops.h"
#include "kernels/ops/latent_ops.h"

namespace tensorfold {
namespace {

CudaRowCache& cuda_rows(RowCache& cache) { return static_cast<CudaRowCache&>(cache); }
const CudaRowCache& cuda_rows(const RowCache& cache) { return static_cast<const CudaRowCache&>(cache); }

DeviceOutput output_of(Tensor t) {
  DeviceOutput out;
  if (t.rounded) {
    out.b = input_of(t);
  } else {
    out.f = matrix_of(t);
  }
  return out;
}

DeviceMatrix optional_matrix(Tensor t) { return t.data == nullptr ? DeviceMatrix{} : matrix_of(t); }

}  // namespace

Ops::Limits CudaOps::limits() const {
  Limits limits;
  limits.norm_columns = kMostNormColumns;
  limits.norm_unit = 4;
  limits.latent_columns = kMostLatentWidth;
  limits.latent_unit = 8;
  limits.index_columns = kMostIndexWidth;
  limits.index_unit = 2;
  limits.index_heads = kMostIndexHeads;
  limits.chosen_windows = kMostChosen;
  return limits;
}

void CudaOps::layer_norm(Tensor x, const Vector& weight, const Vector& bias, float eps, Tensor out) {
  flush();
  kernel_check(weight.size() == x.cols && bias.size() == x.cols, "layer_norm: shapes differ");
  cuda_layer_norm(stream_, matrix_of(x), vector_data(&weight), vector_data(&bias), eps, output_of(out));
}

void CudaOps::silu_mul_limited(Tensor gate_up, float limit, Tensor out) {
  flush();
  cuda_silu_mul_limited(stream_, matrix_of(gate_up), limit, output_of(out));
}

void CudaOps::rope_pairs(Tensor x, int64_t heads, int64_t head_dim, const RopeTable& table, bool back) {
  flush();
  kernel_check(table.cos.rows == x.rows, "rope_pairs: shapes differ");
  cuda_rope_pairs(stream_, matrix_of(x), heads, head_dim, table.cos.data, table.sin.data, table.cos.cols,
                  table.cos.stride, back);
}

void CudaOps::pool_rows(RowCache& cache, const PoolArgs& in) {
  flush();
  CudaPoolArgs args;
  args.from = cuda_rows(cache).layer(in.from);
  args.into = cuda_rows(cache).layer(in.into);
  args.tokens = in.tokens;
  args.overlap = in.overlap;
  kernel_check(in.bias->size() == in.tokens * (args.from.width / 2) &&
                   (in.norm == nullptr || in.norm->size() == args.into.width),
               "pool_rows: shapes differ");
  args.bias = vector_data(in.bias);
  args.norm = vector_data(in.norm);
  args.eps = in.eps;
  args.inv_freq = vector_data(in.inv_freq);
  args.pairs = in.inv_freq == nullptr ? 0 : in.inv_freq->size();
  cuda_pool_rows(stream_, device_rows(in.rows), args);
}

void CudaOps::select_rows(const RowCache& cache, const SelectArgs& in) {
  flush();
  kernel_check(in.candidates.data == nullptr && in.blocks_out.data == nullptr,
               "select_rows: candidates (supports_shared_latents)");
  const ScratchScope scope(*this);
  const DeviceRows& rows = device_rows(in.rows);
  CudaSelectArgs args;
  args.keys = cuda_rows(cache).layer(in.layer);
  args.tokens = in.tokens;
  args.heads = in.heads;
  args.q = matrix_of(in.q);
  args.weights = matrix_of(in.weights);
  args.scale = in.scale;
  args.weight_scale = in.weight_scale;
  args.out = matrix_of(in.out);
  args.workspace = take_workspace(cuda_select_workspace(rows, in.tokens, in.out.cols));
  cuda_select_rows(stream_, rows, args);
}

void CudaOps::latent_attention(const RowCache& cache, const LatentAttentionArgs& in) {
  flush();
  const ScratchScope scope(*this);
  const DeviceRows& rows = device_rows(in.rows);
  kernel_check(in.heads >= 1 && (in.sinks == nullptr || in.sinks->size() == in.heads),
               "latent_attention: shapes differ");
  if (in.block.data != nullptr) {
    kernel_check(in.block.data != in.out.data && in.pooled < 0 && in.selected.data == nullptr,
                 "latent_attention: a block has its own rows and those before it, nothing pooled or selected");
    for (const RowGroup& group : in.rows.groups) {
      kernel_check(group.rows <= kMostBlockRows, "latent_attention: a block of too many rows");
    }
  }
  CudaLatentAttentionArgs args;
  args.q = matrix_of(in.q);
  args.out = output_of(in.out);
  args.heads = in.heads;
  args.scale = in.scale;
  args.sinks = vector_data(in.sinks);
  args.latents = cuda_rows(cache).layer(in.layer);
  args.window = in.window;
  if (in.pooled >= 0) args.pooled = cuda_rows(cache).layer(in.pooled);
  args.tokens = in.tokens;
  args.selected = optional_matrix(in.selected);
  args.block = optional_matrix(in.block);
  args.workspace = static_cast<float*>(take_workspace(4 * cuda_latent_attention_workspace(rows, args)));
  cuda_latent_attention(stream_, rows, args);
}

}  // namespace tensorfold
