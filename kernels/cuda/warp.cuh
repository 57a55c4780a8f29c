// What all lanes of a warp have in common.
#pragma once

#include <cuda_runtime.h>

namespace tensorfold {

/// A value that is the same in all lanes, made known as such to the compiler. Behind a branch on one that is not known
/// to be, each shuffle gets a second form for lanes that are apart, and the assembler then neither overlaps shuffles
/// nor moves other instructions between them. All 32 lanes call it together.
__device__ __forceinline__ int uniform(int same) { return __shfl_sync(0xffffffffu, same, 0); }

/// The warp's number, uniform.
__device__ __forceinline__ int uniform_warp() { return uniform(static_cast<int>(threadIdx.x) / 32); }

}  // namespace tensorfold
