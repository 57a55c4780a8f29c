// Activations as every kernel of the backend computes them, so that a fused epilogue has the bits of the plain
// operation. All are functions of their argument alone: the hardware's approximations (ex2, rcp) in a fixed order of
// operations.
#pragma once

#include <cuda_runtime.h>

namespace tensorfold {

/// 1 / (1 + exp(-x)), within a few ulp; 0 and 1 at the infinities.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, __fadd_rn(1.0f, __expf(-x))); }

/// x / (1 + exp(-x)), within a few ulp; a zero where exp(-x) overflows (the limit is below 1e-36 there).
__device__ inline float silu(float x) { return __fdividef(x, __fadd_rn(1.0f, __expf(-x))); }

/// log(1 + exp(x)); x itself where they agree in fp32.
__device__ inline float softplus(float x) { return x > 20.0f ? x : log1pf(__expf(x)); }

}  // namespace tensorfold
