// The CUDA backend: Ops on one GPU, in the order of one stream, with CUDA graphs for passes of few rows.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "kernels/ops/ops.h"

namespace tensorfold {

struct CudaOptions {
  int device = 0;
  /// Passes of up to 64 rows are captured once per (kind, row bucket, context bucket) and replayed; false launches
  /// every kernel each time. The bits are the same.
  bool graphs = true;
  /// "bf16" or "fp8".
  std::string kv_format = "bf16";
  /// How nodes travel between ranks: handed on to who connects them, see transport/device.
  std::string exchange = "auto";
};

/// Null with a sentence in `error` when there is no such device, or it is older than sm_80 (no bf16 mma).
std::unique_ptr<Ops> make_cuda_ops(const CudaOptions& options, std::string* error);
/// GPUs of this machine; 0 also without a driver.
int cuda_device_count();

/// How many CUDA backends this process has on `device`: more than one means ranks that share a GPU.
int cuda_backends_on(int device);

/// What the exchange between ranks needs of the backend; null if `ops` is another backend's.
class CudaStreamOps {
 public:
  virtual ~CudaStreamOps() = default;
  virtual cudaStream_t stream() = 0;
  virtual int device() const = 0;
  virtual const std::string& exchange() const = 0;
  /// out[i] = the tree's value at part roots[i] after all steps. The parts are used as scratch.
  virtual void fold(std::span<const Tensor> parts, std::span<const AddStep> steps, std::span<const int> roots,
                    std::span<const Tensor> out) = 0;
  /// Launches anything held back; before kernels that are not the backend's own are put on the stream.
  virtual void flush() = 0;
  /// Waits for the stream, then calls `step`, which may wait for other ranks and enqueue copies. A kept run is cut
  /// there and calls it again at each repetition.
  virtual void host_step(std::function<void()> step) = 0;
};
CudaStreamOps* cuda_stream_ops(Ops& ops);

}  // namespace tensorfold
