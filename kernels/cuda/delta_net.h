// The gated delta net: convolution, gates, and the recurrence one step a token in position order, state in registers.
#pragma once

#include "kernels/cuda/recurrent_state.h"

namespace tensorfold {

/// The gated delta net of a pass. Per group, in this order: the `accepted` replayed rows of the last window and the
/// `certain` rows advance the committed state; the others (at most max_window) run on a copy and leave their inputs in
/// the state. One launch for few rows, three for many (with channel_decay always three), with the same bits. Row starts
/// of qkv and z must be 16-byte aligned (strides multiples of 4).
struct CudaDeltaNetArgs {
  const DeltaNetShape* shape = nullptr;
  int64_t layer = 0;                   // index into DeviceRows::states
  DeviceMatrix qkv;                    // [rows, channels]
  DeviceMatrix z;                      // [rows, v_heads * dv]
  DeviceMatrix b;                      // [rows, v_heads]
  DeviceMatrix a;                      // [rows, v_heads], or [rows, v_heads * dk] with channel_decay
  const float* conv = nullptr;         // [channels * conv_kernel], a channel's taps together, oldest first
  const float* a_log = nullptr;        // [v_heads]
  const float* dt_bias = nullptr;      // as wide as a row of `a`
  const float* norm = nullptr;         // [dv]
  const int32_t* k_head_of = nullptr;  // [v_heads], device memory
  float eps = 1e-6f;
  float decay_floor = 0.0f;    // with channel_decay
  bool sigmoid_gate = false;   // always with channel_decay
  DeviceInput out;             // bf16 [rows, v_heads * dv]: rms(y, norm) * silu(z), or * sigmoid(z)
  float* workspace = nullptr;  // at least cuda_delta_net_workspace() floats
};
/// Empty, or what the kernels do not have of a shape.
std::string delta_net_shape_error(const DeltaNetShape& shape);
int64_t cuda_delta_net_workspace(const DeviceRows& rows, const DeltaNetShape& shape);
void cuda_delta_net(cudaStream_t stream, const DeviceRows& rows, const CudaDeltaNetArgs& args);

}  // namespace tensorfold
