// What the kernels of one gated delta net launch are given, by value.
#pragma once

#include "kernels/cuda/delta_net_layout.h"
#include "kernels/cuda/device.h"

namespace tensorfold {

/// A head's decay and write strength at one row.
struct alignas(8) DeltaGate {
  float decay;
  float beta;
};

struct DeltaParams {
  const int32_t* group_count = nullptr;
  const DeviceGroup* groups = nullptr;
  const int32_t* group_of = nullptr;
  float* const* states = nullptr;  // [max_groups], this layer's
  int32_t rows = 0;
  int32_t max_groups = 0;
  int32_t window = 0;
  int32_t taps = 0;
  int32_t k_heads = 0;
  int32_t v_heads = 0;
  int32_t dk = 0;
  int32_t dv = 0;
  int32_t parts = 1;          // blocks that share a value head's columns
  bool sigmoid_gate = false;  // of the output, else silu
  float eps = 0.0f;
  float q_scale = 0.0f;
  DeviceMatrix qkv, z, b, a;
  DeviceInput out;
  const float* conv = nullptr;
  const float* a_log = nullptr;
  const float* dt_bias = nullptr;
  const float* norm = nullptr;
  const int32_t* k_head_of = nullptr;
  DeltaStateLayout state;
  // Workspace. A slot is a row that steps: rows of the pass, then `window` a group for replayed ones.
  float* y = nullptr;          // [rows, v_heads * dv]
  float* qk = nullptr;         // [slots, k_heads, {q, k}, dk], after convolution, silu and normalisation
  DeltaGate* gates = nullptr;  // [slots, v_heads]
};

/// Enqueue the recurrence (delta_net_steps.cu): all of the operation for few rows, or between inputs and outputs.
void cuda_delta_few(cudaStream_t stream, DeltaParams params);
void cuda_delta_steps(cudaStream_t stream, DeltaParams params);

}  // namespace tensorfold
