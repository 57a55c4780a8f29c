// What the kernels of one gated delta net launch are given, by value.
#pragma once

#include "kernels/cuda/delta_net_layout.h"
#include "kernels/cuda/device.h"
#include "kernels/ops/states.h"

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
  int32_t decays = 1;        // of a value head: 1, or dk (then the steps are kimi_delta.cu's)
  float decay_floor = 0.0f;  // of decays of channels
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
  // Of decays of channels, in the place of gates.
  float* v = nullptr;      // [slots, v_heads, dv], after convolution and silu
  float* decay = nullptr;  // [slots, v_heads, dk]
  float* beta = nullptr;   // [slots, v_heads]
};

/// Enqueue the recurrence (delta_net_steps.cu): all of the operation for few rows, or between inputs and outputs.
void cuda_delta_few(cudaStream_t stream, DeltaParams params);
void cuda_delta_steps(cudaStream_t stream, DeltaParams params);
/// Norms, gates, and the state's history and kept rows (delta_net.cu); the last of several launches.
void cuda_delta_outputs(cudaStream_t stream, const DeltaParams& params);

/// All of the operation with decays of channels (kimi_delta.cu); `workspace` has as many floats as the first says.
int64_t cuda_kimi_delta_workspace(int64_t rows, int64_t max_groups, const DeltaNetShape& shape);
void cuda_kimi_delta(cudaStream_t stream, DeltaParams params, float* workspace);

}  // namespace tensorfold
