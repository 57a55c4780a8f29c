// The host's half of packing: rows of a checkpoint as the pack kernel wants them.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/matmul_pack_scales.h"
#include "kernels/ops/dequantise.h"

namespace tensorfold {

/// How blocks are stored.
struct PackFormat {
  CudaWeightKind kind = CudaWeightKind::kBf16;
  int sets = 0;
  Fp4Factors factors[2];  // kFp4: of rows g and g + 8 of a tile
  bool operator==(const PackFormat&) const = default;
};

/// What is wrong with a source, as a sentence, or empty.
std::string pack_source_error(const MatrixSource& source);
/// Reads all of a matrix's scales, and of FP8 the codes. FP8 and FP4 whose blocks, scales or codes (NaN) the kernels
/// have no way for are kBf16.
PackFormat pack_format(const MatrixSource& source);

/// Rows of the staging buffers: codes or values in column order, padded with zeros to whole stages …
__host__ __device__ constexpr int64_t staged_row_bytes(CudaWeightKind kind, int64_t stages) {
  return stages * 8 * kept_bits(kind);
}
/// … and, after all rows' codes, of each row the scale and bias of each set, 4 bytes (kFp8: hi and lo; kFp4: a byte for
/// each 16 columns, with two sets for each 8).
__host__ __device__ constexpr int64_t staged_scale_bytes(int sets, int64_t stages) { return stages * sets * 4; }

/// One row. `codes` (at an even address) and `scales` have the sizes above; `view` is the thread's, for a run of rows.
void stage_row(const MatrixSource& source, int64_t row, PackFormat format, int64_t stages, uint8_t* codes,
               uint8_t* scales, WeightView& view);

}  // namespace tensorfold
