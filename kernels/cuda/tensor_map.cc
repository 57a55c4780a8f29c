#include "kernels/cuda/tensor_map.h"

#include <cuda_runtime.h>

#include "kernels/cuda/device.h"

namespace tensorfold {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, without linking against the driver, which machines without a GPU do not have.
Encode encode_function() {
  static const Encode function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    constexpr unsigned kVersion = 12000;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kVersion, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
  }();
  return function;
}

}  // namespace

bool make_tensor_map(const TensorMapShape& shape, const char* what, CUtensorMap* map) {
  const Encode encode = encode_function();
  if (encode == nullptr) return cuda_ok(cudaErrorNotSupported, what);
  const cuuint64_t sizes[2] = {shape.cols, shape.rows};
  const cuuint64_t strides[1] = {shape.stride};
  const cuuint32_t box[2] = {shape.box_cols, shape.box_rows}, steps[2] = {1, 1};
  const CUresult result =
      encode(map, shape.type, 2, const_cast<void*>(shape.data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, shape.swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS || cuda_ok(cudaErrorInvalidValue, what);
}

}  // namespace tensorfold
