// Matrices of many experts stored as one tensor of three dimensions.
#include <fmt/format.h>

#include <optional>
#include <vector>

#include "worker/checkpoint/tensor_values.h"
#include "worker/checkpoint/weights.h"

namespace tensorfold {
namespace {

std::optional<WeightFormat> plain_format(Dtype dtype) {
  if (dtype == Dtype::kF32) return WeightFormat::kF32;
  if (dtype == Dtype::kF16) return WeightFormat::kF16;
  if (dtype == Dtype::kBf16) return WeightFormat::kBf16;
  return std::nullopt;
}

absl::Status check_shape(const TensorInfo& tensor, const std::vector<int64_t>& wanted) {
  if (tensor.shape == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format("tensor {} is {} {}; by config.json it must be {}",
                                                quoted_name(tensor.name), dtype_name(tensor.dtype),
                                                shape_text(tensor.shape), shape_text(wanted)));
}

}  // namespace

absl::StatusOr<MatrixSource> WeightReader::stacked(std::string_view module, int64_t count, int64_t rows, int64_t cols) {
  const std::string name = layout_.full_name(module);
  const bool bare = source_.find(name) != nullptr;
  absl::StatusOr<const TensorInfo*> tensor = take(bare ? name : name + ".weight");
  if (!tensor.ok()) return tensor.status();
  const TensorInfo& found = **tensor;
  if (source_.find(name + ".scales") != nullptr) return stacked_affine(name, found, {count, rows, cols});
  const std::optional<WeightFormat> format = plain_format(found.dtype);
  if (!format) {
    return absl::UnimplementedError(
        fmt::format("tensor {} stacks experts as {}; read are stacked experts in BF16, F16, F32 and MLX affine, and "
                    "any format that "
                    "is read where each expert has its own tensors",
                    quoted_name(found.name), dtype_name(found.dtype)));
  }
  if (absl::Status s = check_shape(found, {count, rows, cols}); !s.ok()) return s;
  MatrixSource source;
  source.format = *format;
  source.rows = count * rows;
  source.cols = cols;
  source.data = aligned(found);
  source.row_bytes = cols * dtype_bytes(found.dtype);
  return source;
}

absl::StatusOr<MatrixSource> WeightReader::stacked_affine(const std::string& module, const TensorInfo& weight,
                                                          const std::vector<int64_t>& shape) {
  const std::optional<AffineFormat> format = config().quantization.of(module);
  const TensorInfo* biases = source_.find(module + ".biases");
  if (!format || biases == nullptr || weight.dtype != Dtype::kU32) {
    return absl::UnimplementedError(
        fmt::format("tensor {} stacks experts as {} with .scales; read are those of MLX affine: U32 with .scales and "
                    ".biases, and bits and group in config.json",
                    quoted_name(weight.name), dtype_name(weight.dtype)));
  }
  absl::StatusOr<const TensorInfo*> scales = take(module + ".scales");
  if (!scales.ok()) return scales.status();
  if (absl::StatusOr<const TensorInfo*> used = take(module + ".biases"); !used.ok()) return used.status();
  const std::optional<WeightFormat> scale_format = plain_format((*scales)->dtype);
  if (!scale_format || biases->dtype != (*scales)->dtype) {
    return absl::InvalidArgumentError(
        fmt::format("module {} holds scales {} and biases {}; allowed: BF16, F16 or F32 "
                    "for both",
                    quoted_name(module), dtype_name((*scales)->dtype), dtype_name(biases->dtype)));
  }
  const int64_t cols = shape[2], group = format->group;
  if (cols % group != 0) {
    return absl::InvalidArgumentError(fmt::format("module {}: rows of {} values are no whole number of groups of {}",
                                                  quoted_name(module), cols, group));
  }
  const int64_t words = cols * format->bits / 32;
  const std::vector<int64_t> groups = {shape[0], shape[1], cols / group};
  for (const absl::Status& status : {check_shape(weight, {shape[0], shape[1], words}), check_shape(**scales, groups),
                                     check_shape(*biases, groups)}) {
    if (!status.ok()) return status;
  }
  MatrixSource source;
  source.format = WeightFormat::kMlxAffine;
  source.rows = shape[0] * shape[1];
  source.cols = cols;
  source.data = aligned(weight);
  source.row_bytes = words * 4;
  source.bits = format->bits;
  source.group = format->group;
  source.scale_format = *scale_format;
  source.scales = aligned(**scales);
  source.biases = aligned(*biases);
  source.scale_row_bytes = cols / group * dtype_bytes((*scales)->dtype);
  return source;
}

}  // namespace tensorfold
