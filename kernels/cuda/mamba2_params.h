// What the kernels of one Mamba2 launch are given, by value.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/cuda/mamba2_layout.h"

namespace tensorfold {

/// A head's time step and decay at one row.
struct alignas(8) Mamba2Gate {
  float step;
  float decay;
};

/// `groups` are the pass's groups of rows; groups of heads are said so.
struct Mamba2Params {
  const int32_t* group_count = nullptr;
  const DeviceGroup* groups = nullptr;
  const int32_t* group_of = nullptr;
  float* const* states = nullptr;  // [max_groups], this layer's
  int32_t rows = 0;
  int32_t max_groups = 0;
  int32_t window = 0;
  int32_t taps = 0;
  int32_t heads = 0;
  int32_t head_groups = 0;
  int32_t together = 0;  // heads of a group of heads
  int32_t head_dim = 0;
  int32_t state = 0;
  int32_t width = 0;     // heads * head_dim
  int32_t wide = 0;      // together * head_dim: what is normed together
  int32_t channels = 0;  // x | B | C of a row
  int32_t parts = 1;     // blocks that share a head's columns
  float eps = 0.0f;
  float least_step = 0.0f;
  float most_step = 0.0f;
  DeviceMatrix z, xbc, dt;
  DeviceInput out;
  const float* conv = nullptr;
  const float* conv_bias = nullptr;  // or null
  const float* a_log = nullptr;
  const float* dt_bias = nullptr;
  const float* d = nullptr;
  const float* norm = nullptr;
  Mamba2StateLayout at;
  // Workspace. A slot is a row that steps: rows of the pass, then `window` a group for replayed ones.
  float* mixed = nullptr;       // [slots, channels], after convolution and silu; many rows only
  Mamba2Gate* gates = nullptr;  // [slots, heads]; many rows only
  float* y = nullptr;           // [rows, width], y_stride apart; with many rows in the place of x in mixed
  int64_t y_stride = 0;
};

/// Enqueue the recurrence (mamba2_steps.cu): all of the operation for few rows, or between inputs and outputs.
void cuda_mamba2_few(cudaStream_t stream, Mamba2Params params);
void cuda_mamba2_steps(cudaStream_t stream, Mamba2Params params);

}  // namespace tensorfold
