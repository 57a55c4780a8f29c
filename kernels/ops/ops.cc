#include "kernels/ops/ops.h"

#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

int64_t scalar_bytes(WeightFormat format) {
  kernel_check(format != WeightFormat::kMlxAffine, "a quantised value has no byte size of its own");
  return format == WeightFormat::kF32 ? 4 : 2;
}

}  // namespace

MatrixSource MatrixSource::slice_rows(int64_t first, int64_t count) const {
  kernel_check(first >= 0 && count >= 0 && first <= rows - count, "slice_rows: outside the matrix");
  MatrixSource part = *this;
  part.rows = count;
  part.data += first * row_bytes;
  if (format == WeightFormat::kMlxAffine) {
    part.scales += first * scale_row_bytes;
    part.biases += first * scale_row_bytes;
  }
  return part;
}

MatrixSource MatrixSource::slice_cols(int64_t first, int64_t count) const {
  kernel_check(first >= 0 && count >= 0 && first <= cols - count, "slice_cols: outside the matrix");
  MatrixSource part = *this;
  part.cols = count;
  if (format != WeightFormat::kMlxAffine) {
    part.data += first * scalar_bytes(format);
    return part;
  }
  kernel_check(first % group == 0 && count % group == 0, "slice_cols: not at a quantisation group");
  part.data += first * bits / 8;  // a group of 32 or more values is a whole number of 32-bit words
  part.scales += first / group * scalar_bytes(scale_format);
  part.biases += first / group * scalar_bytes(scale_format);
  return part;
}

}  // namespace tensorfold
