// What the kernels of one gated delta net launch are given, by value.
#pragma once

#include "kernels/cuda/delta_net_layout.h"
#include "kernels/cuda/device.h"

namespace tensorfold {

/// A head's decay and write strength at one row.
struct alignas(16) DeltaGate {
  unsigned long long octaves = 0;  // -log2 of the decay, 40 fraction bits
  float beta = 0.0f;
  float unused = 0.0f;
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
  int32_t channels = 0;
  float eps = 0.0f;
  float q_scale = 0.0f;
  int32_t rows_a_warp = 1;  // that the first kernel's warps take one after another
  int32_t poll = 0;         // the last kernel may start on rows before the recurrence has ended
  DeviceMatrix qkv, z, b, a;
  DeviceInput out;
  const float* conv = nullptr;
  const float* a_log = nullptr;
  const float* dt_bias = nullptr;
  const float* norm = nullptr;
  const int32_t* k_head_of = nullptr;
  DeltaStateLayout state;
  DeltaSplit split;
  // Workspace. A slot is a row that steps: rows of the pass, then `window` a group for replayed ones.
  float* qk = nullptr;          // [slots, 2 * k_heads * dk], after convolution, silu and normalisation
  DeltaGate* gates = nullptr;   // [slots, v_heads]
  float* y = nullptr;           // [rows, v_heads * dv]
  int32_t* progress = nullptr;  // [max_groups, split.blocks]: steps whose y is written
};

#ifdef __CUDACC__
/// Slot of step `i` of a group: replayed rows come first.
__device__ __forceinline__ int64_t delta_slot(const DeltaParams& p, const DeviceGroup& group, int g, int i) {
  return i < group.accepted ? p.rows + static_cast<int64_t>(p.window) * g + i
                            : static_cast<int64_t>(group.first_row) + i - group.accepted;
}

/// Inputs [channels] of step `i` before the convolution; negative steps are the committed history.
__device__ __forceinline__ const float* delta_raw_row(const DeltaParams& p, const DeviceGroup& group,
                                                      const float* state, int i) {
  if (i < 0) return state + p.state.history + static_cast<int64_t>(i + p.taps - 1) * p.channels;
  if (i < group.accepted) return state + p.state.kept_qkv + static_cast<int64_t>(i) * p.channels;
  return p.qkv.data + (static_cast<int64_t>(group.first_row) + i - group.accepted) * p.qkv.stride;
}
#endif

/// Blocks of the recurrence for these bounds, and how they cut the columns.
struct DeltaPlan {
  int32_t units_per_warp = 1;
  int32_t chunk = 8;  // steps between two barriers of a block
  DeltaSplit split;
};
/// Enqueues the recurrence (delta_net_steps.cu).
void cuda_delta_steps(cudaStream_t stream, const DeltaParams& params, const DeltaPlan& plan);
/// Dynamic shared memory of the recurrence.
int64_t delta_steps_shared(int64_t dk, const DeltaPlan& plan, int64_t taps);

}  // namespace tensorfold
