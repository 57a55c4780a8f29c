// Descriptions of matrices in memory for the copy engine of compute capability 9 and up (cp.async.bulk.tensor), which
// brings a box of one with a single instruction and fills up with zeros what lies outside.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace tensorfold {

/// A matrix of `rows` rows, `stride` bytes apart, of `cols` elements each, and the box that a copy brings.
struct TensorMapShape {
  const void* data = nullptr;  // a multiple of 16, as `stride` is
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  uint64_t cols = 0, rows = 0, stride = 0;
  uint32_t box_cols = 0, box_rows = 0;  // at most 256 each
  // 16-byte pieces of a row of 128 bytes lie in shared memory at piece ^ (row & 7); places there are multiples of 1024.
  bool swizzled = false;
};

/// False with cuda_failure() set where the driver refuses it. `what` names the launch.
bool make_tensor_map(const TensorMapShape& shape, const char* what, CUtensorMap* map);

}  // namespace tensorfold
