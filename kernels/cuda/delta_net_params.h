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
  int32_t taps = 0;
  int32_t k_heads = 0;
  int32_t v_heads = 0;
  int32_t dk = 0;
  int32_t dv = 0;
  int32_t channels = 0;
  int32_t slices = 1;  // blocks that share a value head's columns
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
  // Workspace of prompts. A slot is a row that steps: rows of the pass, then state.kept a group for replayed ones.
  __nv_bfloat16* kq = nullptr;  // [slots, k_heads, 4, dk]: high and low halves of k, then of q
  float* v = nullptr;           // [slots, v_heads * dv]
  DeltaGate* gates = nullptr;   // [slots, v_heads]
  float* y = nullptr;           // [rows, v_heads * dv]
};

/// Enqueue the recurrence (delta_net_chunks.cu): all of the operation for few rows, or between inputs and outputs.
void cuda_delta_whole(cudaStream_t stream, const DeltaParams& params);
void cuda_delta_chunks(cudaStream_t stream, const DeltaParams& params);
/// Columns of a block of cuda_delta_chunks, and the widest head of cuda_delta_whole.
inline constexpr int kDeltaSliceColumns = 64;
inline constexpr int kDeltaWholeColumns = 128;

}  // namespace tensorfold
