// Residuals of several streams: gated ones (stream_ops.h) and those of manifold-constrained hyper-connections
// (latent_ops.h). Arithmetic and shapes are said there.
//
// How the contract is kept: every result is a fixed expression of its own row. Sums over streams ascend; the sum over
// a stream's width in cuda_gate_streams has an order that only the width decides.
#pragma once

#include "kernels/cuda/device.h"

namespace tensorfold {

/// Ops::mix_streams. Exactly one of x_f and x_b, and one of out_f and out_b, has data.
struct CudaMixStreams {
  DeviceMatrix x_f;
  DeviceInput x_b;
  DeviceMatrix gate;
  int64_t count = 0;
  DeviceMatrix out_f;
  DeviceInput out_b;
};
void cuda_mix_streams(cudaStream_t stream, const CudaMixStreams& args);
void cuda_inject_streams(cudaStream_t stream, DeviceMatrix x, DeviceMatrix inject, int64_t count, DeviceMatrix y);
void cuda_gate_streams(cudaStream_t stream, DeviceMatrix key, DeviceMatrix query, DeviceMatrix value, int64_t count,
                       DeviceMatrix out);

/// Ops::hyper_collapse and hyper_expand; no data where HyperArgs has none.
struct CudaHyper {
  DeviceMatrix streams;
  int64_t count = 0;
  DeviceMatrix mix;
  const float* scale = nullptr;
  const float* base = nullptr;
  float eps = 0.0f;
  int64_t iterations = 1;
  DeviceMatrix weights;
  DeviceMatrix out_f;  // exactly one of out_f and out_b in collapse
  DeviceInput out_b;
  DeviceMatrix zero;
  DeviceMatrix y;
  DeviceMatrix carried;
};
void cuda_hyper_collapse(cudaStream_t stream, const CudaHyper& args);
void cuda_hyper_expand(cudaStream_t stream, const CudaHyper& args);

}  // namespace tensorfold
