// Row-exact matrix products on `mma.sync.m16n8k16` (bf16 in, fp32 accumulator): weights are the 16-row side (M), the
// pass's rows the 8-column side (N), and each output is one chain of accumulations over K in ascending steps of 16, for
// one row and for thousands alike. Nothing about the order reads the number of rows.
//
// The order, which is part of the numerics version. K is walked in blocks of 64 columns, the last one filled up with
// zeros on both sides; a block is two halves of 32, a half two steps of 16, each step one mma onto the same
// accumulator, which begins at +0. Which columns a step takes: matmul_format.cuh. How a step adds its 16 products is
// the hardware's, and part of the architecture's name in the fingerprint. No K is split; what is added up are whole
// outputs, of slices, in the order of their tree.
//
// Why the number of rows changes no bit. Kernels differ in who owns which tile (a warp 16 or 32 weight rows and all
// rows of the pass up to 64, or 32 x 128 or 64 x 64 through shared memory), in how far ahead they read, and in the size
// of a launch. All of them feed an output's chain the same operands at the same places, and a column of mma does not
// depend on the other columns (checked with infinities and NaNs in them), so that columns of rows that are not there
// may hold anything.
//
// Weights are bf16 values by definition (contract, section 3); how each format gets its values and how they lie in
// memory: cuda_weight.h. A quantised weight gives the bytes of its dequantised bf16 copy.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

class CudaWeight;

/// How the rows of two stacked matrices are laid out for a product whose epilogue combines them.
enum class CudaPairing : uint8_t {
  kNone,    // rows in order
  kGateUp,  // blocks[0] is gate, blocks[1] is up, of equal rows: interleaved so that one thread holds both of a pair
};

/// Packs blocks (equal cols; formats may differ only in ways pack_cuda_weight documents) for the kernels, copying
/// through a bounded pinned buffer; waits until the copy is done. Null with cuda_failure() set if the device has no
/// memory left. `error` gets a sentence when a format or shape cannot be packed (then null too).
std::unique_ptr<CudaWeight> pack_cuda_weight(std::span<const MatrixSource> blocks, CudaPairing pairing,
                                             std::string* error);
/// Several weights that lie in one piece of memory, which lives as long as any of them; else as pack_cuda_weight. Empty
/// if anything went wrong.
struct CudaPackJob {
  std::vector<MatrixSource> blocks;
  CudaPairing pairing = CudaPairing::kNone;
};
std::vector<std::unique_ptr<CudaWeight>> pack_cuda_weights(std::span<const CudaPackJob> jobs, std::string* error);
/// Rows [first, first + count) sharing the memory; null if a view cannot begin there.
std::unique_ptr<CudaWeight> view_cuda_weight_rows(const CudaWeight& weight, int64_t first, int64_t count);

/// One product of a launch: out[r, n] = sum_k w[n, k] x[r, k].
struct CudaMatmulJob {
  const CudaWeight* weight = nullptr;
  DeviceInput x;
  DeviceMatrix out;
};
/// Up to 8 products, all with the same number of rows, as few launches. The same bits as one after another.
void cuda_matmul(cudaStream_t stream, std::span<const CudaMatmulJob> jobs);
/// 2, 4 or 8 products whose outputs are parts of a balanced sum (numerics/tree.h). Returns n, 1 or 2: with 2, out[2 i]
/// is out[2 i] + out[2 i + 1], and the latter is scratch. n depends on sizes, formats and the device; the sums have the
/// bits of additions one by one.
int cuda_matmul_sum(cudaStream_t stream, std::span<const CudaMatmulJob> jobs);
/// A kGateUp weight [2n, k]: out[r, i] = bf16(silu(gate_i . x_r) * (up_i . x_r)), silu in fp32.
void cuda_matmul_silu_mul(cudaStream_t stream, const CudaWeight& weight, DeviceInput x, DeviceInput out);
/// out[r, :] = table[tokens[r], :] as fp32 values of the bf16 weights (contract, section 3).
void cuda_embed(cudaStream_t stream, const CudaWeight& table, const int32_t* tokens, DeviceMatrix out);

}  // namespace tensorfold
