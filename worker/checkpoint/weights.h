// Weights by meaning: the checkpoint's bytes as matrices to pack and small vectors to compute with, each checked
// against the size that the family expects.
//
// Thread-safety: none; one loader uses a WeightReader. MatrixSources stay valid as long as both the reader and the
// checkpoint live.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/ops/ops.h"
#include "worker/checkpoint/names.h"
#include "worker/checkpoint/stored_weights.h"
#include "worker/checkpoint/tensor_source.h"

namespace tensorfold {

class WeightReader {
 public:
  /// Keeps a reference to the source, which is a Checkpoint everywhere but in benchmarks.
  WeightReader(const TensorSource& source, Layout layout) : source_(source), layout_(std::move(layout)) {}
  /// Detects the layout.
  static absl::StatusOr<WeightReader> open(const TensorSource& source);

  const TensorSource& source() const { return source_; }
  const ModelConfig& config() const { return source_.config(); }
  const Layout& layout() const { return layout_; }

  /// The [rows, cols] matrix of a module by its path without prefixes: "layers.3.mlp.down_proj". Takes `.weight` in
  /// BF16, F16 or F32, or MLX's `.weight` (U32), `.scales` and `.biases`, whose bits and group must be those that
  /// config.json states; or FP8, NVFP4, MXFP4, MXFP8 or EXL3 with its companions (stored_weights.h), which config.json
  /// must allow. Scales that describe activations are left unread. "lm_head" gives the embedding where the head is
  /// tied. Errors: NotFound naming tensor and files; InvalidArgument for other dtypes, shapes, or a contradiction, with
  /// both sides. Reads no weight bytes, except the scales of FP8, FP4 and EXL3, which must be numbers, and those of a
  /// tensor that the file placed at an odd address, which is copied.
  absl::StatusOr<MatrixSource> matrix(std::string_view module, int64_t rows, int64_t cols);

  /// The matrices [rows, cols] of `count` experts, one after another as one [count * rows, cols] matrix, from a tensor
  /// [count, rows, cols] named `module` itself or `module.weight`: "layers.3.mlp.experts.gate_up_proj",
  /// "layers.3.mlp.switch_mlp.gate_proj". BF16, F16 or F32, or MLX affine. Errors as of matrix().
  absl::StatusOr<MatrixSource> stacked(std::string_view module, int64_t count, int64_t rows, int64_t cols);

  /// A [rows, cols] matrix stored as a tensor of its own, without `.weight`: "layers.0.hc_attn_fn". BF16, F16 or F32.
  absl::StatusOr<MatrixSource> bare_matrix(std::string_view tensor, int64_t rows, int64_t cols);
  /// The numbers of such a tensor, row after row.
  absl::StatusOr<std::vector<float>> table(std::string_view tensor, int64_t rows, int64_t cols);

  /// The same of a [planes, rows, cols] tensor.
  absl::StatusOr<std::vector<float>> cube(std::string_view tensor, int64_t planes, int64_t rows, int64_t cols);

  /// A [rows, cols] tensor of whole numbers, row after row, each in [0, limit).
  absl::StatusOr<std::vector<int64_t>> integers(std::string_view tensor, int64_t rows, int64_t cols, int64_t limit);

  /// A tensor of `size` values, by its path without prefixes: "layers.0.linear_attn.A_log", fp32, as stored.
  absl::StatusOr<std::vector<float>> vector(std::string_view tensor, int64_t size);

  /// A tensor of `size` whole numbers, by its path without prefixes, or none if it is not there.
  absl::StatusOr<std::vector<int64_t>> integers(std::string_view tensor, int64_t size);

  /// gamma [size] of a norm module: "layers.0.input_layernorm", "mtp.norm", "layers.0.linear_attn.norm". Adds the 1
  /// where the checkpoint stores gamma - 1, in fp32.
  absl::StatusOr<std::vector<float>> norm(std::string_view module, int64_t size);

  /// The taps [channels * kernel] of a depthwise convolution module, a channel's taps together, oldest first, from
  /// either conversion: [channels, 1, kernel] or [channels, kernel, 1].
  absl::StatusOr<std::vector<float>> convolution(std::string_view module, int64_t channels, int64_t kernel);

  /// Whether a tensor of this path without prefixes is there.
  bool has(std::string_view tensor) const { return source_.find(layout_.full_name(tensor)) != nullptr; }

  /// Counts all tensors under a path ("mtp.") as used: the caller chose not to load them.
  void leave(std::string_view path);

  /// Full names of the tensors that nobody asked for and that are not known to be skippable, sorted. A loader refuses a
  /// checkpoint with any: a bias that is not added would give wrong numbers silently.
  std::vector<std::string> unused() const;
  /// OK, or InvalidArgument naming them.
  absl::Status check_all_used() const;

 private:
  absl::StatusOr<const TensorInfo*> take(const std::string& full_name);
  absl::StatusOr<MatrixSource> stored(const std::string& module, const StoredModule& stored, int64_t rows,
                                      int64_t cols);
  absl::StatusOr<MatrixSource> stacked_affine(const std::string& module, const TensorInfo& weight,
                                              const std::vector<int64_t>& shape);
  absl::StatusOr<MatrixSource> affine(const std::string& module, const TensorInfo& weight, int64_t rows, int64_t cols);
  absl::StatusOr<std::vector<float>> values(const std::string& full_name, int64_t size);
  const std::byte* aligned(const TensorInfo& tensor);

  const TensorSource& source_;
  Layout layout_;
  std::set<std::string, std::less<>> used_;
  std::vector<std::unique_ptr<std::byte[]>> copies_;  // of tensors at odd addresses
};

}  // namespace tensorfold
