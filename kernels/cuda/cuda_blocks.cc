// Blocks of drafted rows (kernels/ops/block_ops.h) on the GPU: shapes, and memory of their launches.
#include "kernels/cuda/cuda_ops_impl.h"
#include "kernels/ops/block_ops.h"

namespace tensorfold {

void CudaOps::clear(Tensor x) {
  flush();
  cuda_clear(stream_, matrix_of(x));
}

void CudaOps::mean_streams(Tensor x, int64_t streams, Tensor out) {
  flush();
  cuda_mean_streams(stream_, matrix_of(x), streams, matrix_of(out));
}

void CudaOps::block_conv(const BlockConvArgs& in) {
  flush();
  CudaBlockConv conv;
  conv.x = matrix_of(in.x);
  conv.dynamic = matrix_of(in.dynamic);
  conv.base = vector_data(in.base);
  conv.taps = in.taps;
  conv.group = in.group;
  if (in.out.rounded) {
    conv.out_b = input_of(in.out);
  } else {
    conv.out_f = matrix_of(in.out);
  }
  kernel_check(in.base != nullptr && in.base->size() == in.taps * in.x.cols, "block_conv: shapes differ");
  cuda_block_conv(stream_, device_rows(in.rows), conv);
}

void CudaOps::block_attention(const KvCache& cache, int64_t layer, const BlockAttentionArgs& in) {
  flush();
  for (const RowGroup& group : in.rows.groups) {
    kernel_check(group.rows <= kMostBlockRows, "block_attention: a block of too many rows");
  }
  const ScratchScope scope(*this);
  const DeviceRows& rows = device_rows(in.rows);
  CudaBlockAttentionArgs args;
  args.common.q = matrix_of(in.q);
  args.common.out = input_of(in.out);
  args.common.heads = in.heads;
  args.common.head_dim = in.head_dim;
  args.common.kv_head_of = in.kv_head_of;
  args.common.scale = in.scale;
  args.k = matrix_of(in.k);
  args.v = matrix_of(in.v);
  args.window = in.window;
  const int64_t floats = cuda_block_attention_workspace(rows, in.heads, in.head_dim, in.window);
  args.common.workspace = static_cast<float*>(take(4 * floats));
  cuda_block_attention(stream_, static_cast<const CudaKvCache&>(cache), layer, rows, args);
}

}  // namespace tensorfold
