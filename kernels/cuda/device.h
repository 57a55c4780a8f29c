// What all kernels of the CUDA backend share: how a pass's rows look in device memory, and how errors are told.
//
// Launch functions only enqueue on the given stream and never wait, allocate or read host state that a graph would not
// repeat: captured into a CUDA graph and run again after the arrays behind DeviceRows changed, they do the new pass.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

namespace tensorfold {

/// Consecutive rows of one sequence, as RowGroup of kernels/ops/ops.h says.
struct DeviceGroup {
  int64_t first_position = 0;
  int32_t first_row = 0;
  int32_t rows = 0;
  int32_t accepted = 0;
  int32_t certain = 0;
  int32_t first_page = 0;  // index into DeviceRows::pages of its page table
  int32_t page_count = 0;
};

/// A pass's rows in device memory. The pointers stay the same for all runs of a graph; what they point to changes.
/// Rows beyond the last group's (padding up to a graph's row count) belong to no group: position 0, token 0, and no
/// kernel may write anything that lasts (keys, values, states) for them.
struct DeviceRows {
  int32_t rows = 0;                      // rows of the tensors, padding included; a bound for grids
  int32_t max_groups = 0;                // bound on the groups
  int64_t max_keys = 0;                  // bound on any row's position + 1 in this launch
  const int32_t* group_count = nullptr;  // [1]: groups that there really are
  const int32_t* tokens = nullptr;       // [rows]
  const int64_t* positions = nullptr;    // [rows]
  const int32_t* group_of = nullptr;     // [rows], -1 for padding
  const DeviceGroup* groups = nullptr;   // [max_groups]
  const int32_t* pages = nullptr;        // page tables of all groups, one after another
  float* const* states = nullptr;        // [recurrent layers][max_groups]
};

/// Fp32 rows in device memory, `stride` floats apart.
struct DeviceMatrix {
  float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
};

/// Rows of matmul inputs, bf16, `stride` values apart; row starts are 16-byte aligned, stride is a multiple of 8.
struct DeviceInput {
  __nv_bfloat16* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;
};

/// Remembers the first CUDA error of this thread's backend calls with what was being done. Nothing is thrown: the
/// owner of the stream asks cuda_failure() when it waits for results, and the pass then ends with that message.
bool cuda_ok(cudaError_t error, const char* what);
/// The first error since the last call on this thread, or empty; forgets it.
std::string cuda_failure();

/// Device memory of the current device that no other GPU sees, or null (and cuda_failure() set, naming `what`). Memory
/// from cudaMalloc is mapped into all GPUs that have peer access, and for that their work has to end: a rank that
/// allocated in the middle of a pass would wait for one that waits for it.
void* device_allocate(int64_t bytes, const char* what);
/// Waits for the device.
void device_free(void* memory);

/// After a kernel launch: cuda_ok(cudaGetLastError(), what).
inline bool cuda_launched(const char* what) { return cuda_ok(cudaGetLastError(), what); }

}  // namespace tensorfold
