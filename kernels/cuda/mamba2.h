// Mamba2: convolution, time steps, and the selective state space one step a token in position order, state in
// registers.
#pragma once

#include "kernels/cuda/recurrent_state.h"

namespace tensorfold {

/// Mamba2 of a pass. Per group of rows, in this order: the `accepted` replayed rows of the last window and the
/// `certain` rows advance the committed state; the others (at most max_window) run on a copy and leave their inputs in
/// the state. One launch for few rows, three for many, with the same bits. Row starts of z, xbc and out must be 16-byte
/// aligned (strides multiples of 4, of out 8).
struct CudaMamba2Args {
  const Mamba2Shape* shape = nullptr;
  int64_t layer = 0;                 // index into DeviceRows::states
  DeviceMatrix z;                    // [rows, width]
  DeviceMatrix xbc;                  // [rows, channels] before the convolution: x heads | B groups | C groups
  DeviceMatrix dt;                   // [rows, heads]
  const float* conv = nullptr;       // [channels * conv_kernel], a channel's taps together, oldest first
  const float* conv_bias = nullptr;  // [channels], or null
  const float* a_log = nullptr;      // [heads]
  const float* dt_bias = nullptr;    // [heads]
  const float* d = nullptr;          // [heads]
  const float* norm = nullptr;       // [width]
  float eps = 1e-5f;
  float least_step = 0.0f;  // bounds of the time step
  float most_step = 0.0f;
  DeviceInput out;             // bf16 [rows, width]: rms(y * silu(z)) of each group of heads, times norm
  float* workspace = nullptr;  // at least cuda_mamba2_workspace() floats
};
int64_t cuda_mamba2_workspace(const DeviceRows& rows, const Mamba2Shape& shape);
void cuda_mamba2(cudaStream_t stream, const DeviceRows& rows, const CudaMamba2Args& args);

}  // namespace tensorfold
