// State of one sequence in one recurrent layer of the CUDA backend: one block of device memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

/// One block of device memory at data(), which stays where it is for life: S, the last inputs of the convolution, and
/// the inputs of the last window's tentative rows. No host-side state: kernels find all they need in it and in
/// DeviceGroup, and a copy of its bytes is a copy of the state. A reset state is all zeros. Used by the thread that
/// launches.
class CudaRecurrentState : public RecurrentState {
 public:
  /// Null with cuda_failure() set if the device has no memory left, or with a sentence in `error` (if given, else in
  /// cuda_failure()) if the kernels do not have the shape: delta_net_shape_error(), mamba2_shape_error(). `stream`
  /// orders reset().
  static std::unique_ptr<CudaRecurrentState> create(const DeltaNetShape& shape, cudaStream_t stream,
                                                    std::string* error = nullptr);
  static std::unique_ptr<CudaRecurrentState> create(const Mamba2Shape& shape, cudaStream_t stream,
                                                    std::string* error = nullptr);
  /// A dilated convolution's: short_conv_shape_error().
  static std::unique_ptr<CudaRecurrentState> create(const ShortConvShape& shape, cudaStream_t stream,
                                                    std::string* error = nullptr);
  virtual float* data() const = 0;
};

/// For create(): a state of `bytes`; `shape_error` is empty, or why there is none. `counters`: byte offsets of words
/// that are zero between passes, which load() insists on.
std::unique_ptr<CudaRecurrentState> make_device_state(int64_t bytes, std::vector<int64_t> counters, cudaStream_t stream,
                                                      const std::string& shape_error, std::string* error);

/// What is wrong with a shape, as a sentence, or empty. Delta nets: dk 32, 64 or 128 (with decays of channels a
/// multiple of 8 up to 128), dv a multiple of 8 up to 256, a convolution of 1 to 16 taps. Mamba2: states of 32, 64, 128
/// or 256, head dims that are multiples of 8 up to 1024, a convolution of 1 to 16 taps.
std::string delta_net_shape_error(const DeltaNetShape& shape);
std::string mamba2_shape_error(const Mamba2Shape& shape);

}  // namespace tensorfold
