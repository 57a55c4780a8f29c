// The dilated convolution with its state, and the numbers of the table rows that n-grams pick, which need the tokens
// that the state keeps.
#pragma once

#include <string>

#include "kernels/cuda/delta_net.h"
#include "kernels/cuda/device.h"
#include "kernels/numerics/ngram_hash.h"
#include "kernels/ops/stream_ops.h"

namespace tensorfold {

/// Offsets in a state's block, in 4-byte words. All zeros before any token; a token is kept as its number + 1.
struct ShortConvLayout {
  int64_t history = 0;      // [history, channels], oldest first
  int64_t kept = 0;         // [max_window, channels]: inputs of the last window's tentative rows
  int64_t tokens = 0;       // [context], int32, oldest first
  int64_t kept_tokens = 0;  // [max_window]
  int64_t words = 0;
};
ShortConvLayout short_conv_layout(const ShortConvShape& shape);
/// What is wrong with a shape, as a sentence, or empty.
std::string short_conv_shape_error(const ShortConvShape& shape);

/// One step a row in position order, as stream_ops.h says; then the committed rows move the state on, and the tentative
/// ones are kept. Rows of no group get zeros. Rows must begin at multiples of 16 bytes.
struct CudaShortConv {
  const ShortConvShape* shape = nullptr;
  int64_t layer = 0;  // of DeviceRows::states
  DeviceMatrix x;     // [rows, channels]
  const float* conv = nullptr;
  DeviceMatrix out;  // the same shape; not x
};
void cuda_short_conv(cudaStream_t stream, const DeviceRows& rows, const CudaShortConv& args);

/// numbers[i * rows.rows + r]: the row of head first_head + i for row r. To be launched before the pass's convolution.
struct CudaNgramRows {
  const NgramHeads* heads = nullptr;
  int64_t first_head = 0;
  int64_t count = 0;
  int64_t layer = 0;
  const ShortConvShape* shape = nullptr;  // of the layer's states
  int32_t* numbers = nullptr;             // [count, rows.rows] in device memory
};
void cuda_ngram_rows(cudaStream_t stream, const DeviceRows& rows, const CudaNgramRows& args);

}  // namespace tensorfold
