// Weights in formats other than plain numbers and MLX affine: which tensors make one up, and the matrix that they are.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "kernels/ops/ops.h"
#include "worker/checkpoint/quantization.h"
#include "worker/checkpoint/tensor_source.h"

namespace tensorfold {

/// What a module's tensors are. Suffixes follow the module's full name; an empty one is not there.
struct StoredModule {
  StoredKind kind = StoredKind::kFp8;
  std::string_view values = {};  // ".weight", ".weight_packed", ".trellis"
  std::string_view scales = {};
  std::string_view global_scale = {};
  bool divide = false;     // by the global scale
  bool mlx = false;        // stated by MLX's config
  int64_t block_cols = 0;  // of NVFP4, MXFP4 and MXFP8
};

/// By names and number formats only; null for plain weights and MLX affine.
std::optional<StoredModule> find_stored(const TensorSource& source, const std::string& module);

/// Its numbers, from the shape of its values.
int64_t stored_elements(const StoredModule& stored, const TensorInfo& values);

/// Whose memory a plan is about.
enum class MemoryOf : uint8_t { kCpu, kCuda };

/// Bytes of a module, values and scales, in the memory of a backend, all ranks together: what each backend keeps of
/// these formats (docs/formats/weights.md) is stated here for plans, and only here. `values`: the tensor of its values.
/// From headers alone, so that matrices which a backend keeps as their values for what they hold (kernels/cpu:
/// kept_as_stored; kernels/cuda: pack_format) count as stored.
int64_t stored_memory_bytes(const TensorSource& source, const std::string& module, const StoredModule& stored,
                            const TensorInfo& values, MemoryOf memory);

/// What every rank keeps whole besides on the CPU, at most: the table of a global scale.
int64_t stored_table_bytes(const StoredModule& stored);

/// Bytes of MLX affine weights on CUDA, scales and biases included: 4 bits as 4 and others as 8, or as bf16 where
/// scales are not bf16.
int64_t affine_device_bytes(const AffineFormat& format, Dtype scales, int64_t elements);

/// "nvfp4 g16", "fp8", "exl3 4-bit".
std::string stored_label(const StoredModule& stored, const TensorInfo& values);

/// True for tensors beside a weight that describe activations or the KV cache ("x.input_scale"): those are computed
/// unquantised here, so the tensors are left unread.
bool is_activation_scale(std::string_view tensor_name);

/// How a matrix gets at tensors and memory.
struct StoredAccess {
  std::function<absl::StatusOr<const TensorInfo*>(const std::string& full_name)> take;
  std::function<const std::byte*(const TensorInfo&)> aligned;
  std::function<std::byte*(size_t bytes)> allocate;  // lives as long as what `aligned` gives
};

/// The [rows, cols] matrix. Reads scales to the end: one that is no number is refused by its name. Errors: NotFound for
/// a missing tensor; InvalidArgument for wrong number formats or shapes, or where config.json says something else.
absl::StatusOr<MatrixSource> stored_matrix(const TensorSource& source, const std::string& module,
                                           const StoredModule& stored, int64_t rows, int64_t cols,
                                           const StoredAccess& access);

}  // namespace tensorfold
