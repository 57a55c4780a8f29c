#include "worker/checkpoint/weights.h"

#include <fmt/format.h>

#include <cstring>
#include <optional>

#include "worker/checkpoint/tensor_values.h"

namespace tensorfold {
namespace {

std::optional<WeightFormat> float_format(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32:
      return WeightFormat::kF32;
    case Dtype::kF16:
      return WeightFormat::kF16;
    case Dtype::kBf16:
      return WeightFormat::kBf16;
    default:
      return std::nullopt;
  }
}

bool has_shape(const TensorInfo& tensor, int64_t rows, int64_t cols) {
  return tensor.shape.size() == 2 && tensor.shape[0] == rows && tensor.shape[1] == cols;
}

absl::Status wrong_shape(const TensorInfo& tensor, const std::string& expected) {
  return absl::InvalidArgumentError(fmt::format("tensor {} is {} {}; by config.json it must be {}",
                                                quoted_name(tensor.name), dtype_name(tensor.dtype),
                                                shape_text(tensor.shape), expected));
}

// What the tensors themselves say of bits and group, for the message of a contradiction.
std::string found_format(const TensorInfo& weight, const TensorInfo& scales, int64_t cols) {
  if (weight.shape.size() != 2 || scales.shape.size() != 2 || cols <= 0 || scales.shape[1] == 0)
    return "another layout";
  if (weight.shape[1] > (int64_t{1} << 40)) return "another layout";
  return fmt::format("{} bits in groups of {}", weight.shape[1] * 32 / cols, cols / scales.shape[1]);
}

}  // namespace

absl::StatusOr<WeightReader> WeightReader::open(const TensorSource& source) {
  absl::StatusOr<Layout> layout = Layout::detect(source);
  if (!layout.ok()) return layout.status();
  return WeightReader(source, std::move(*layout));
}

absl::StatusOr<const TensorInfo*> WeightReader::take(const std::string& full_name) {
  const TensorInfo* tensor = source_.find(full_name);
  if (tensor == nullptr) {
    return absl::NotFoundError(
        fmt::format("{}: no tensor {} in {}", source_.dir(), quoted_name(full_name), source_.file_list()));
  }
  used_.insert(full_name);
  return tensor;
}

// The format places tensors at any byte, but kernels read whole elements.
const std::byte* WeightReader::aligned(const TensorInfo& tensor) {
  const auto size = static_cast<uintptr_t>(dtype_bytes(tensor.dtype));
  if (reinterpret_cast<uintptr_t>(tensor.data.data()) % size == 0 || tensor.data.empty()) return tensor.data.data();
  copies_.push_back(std::make_unique<std::byte[]>(tensor.data.size()));
  std::memcpy(copies_.back().get(), tensor.data.data(), tensor.data.size());
  return copies_.back().get();
}

absl::StatusOr<MatrixSource> WeightReader::matrix(std::string_view module, int64_t rows, int64_t cols) {
  const std::string name = layout_.full_name(module);
  if (const std::optional<StoredModule> stored = find_stored(source_, name))
    return this->stored(name, *stored, rows, cols);
  absl::StatusOr<const TensorInfo*> weight = take(name + ".weight");
  if (!weight.ok()) return weight.status();
  const TensorInfo& tensor = **weight;
  if (tensor.dtype == Dtype::kU32 || source_.find(name + ".scales") != nullptr) {
    return affine(name, tensor, rows, cols);
  }
  const std::optional<WeightFormat> format = float_format(tensor.dtype);
  if (!format) {
    return absl::InvalidArgumentError(fmt::format("tensor {} is {}, which is not read as a weight. Read are: {}",
                                                  quoted_name(tensor.name), dtype_name(tensor.dtype), formats_read()));
  }
  const QuantizationConfig& quantization = config().quantization;
  if (quantization.names(name) && quantization.of(name)) {
    return absl::InvalidArgumentError(fmt::format(
        "config.json says that {} has {} bits in groups of {}, but tensor {} is {} without .scales", quoted_name(name),
        quantization.of(name)->bits, quantization.of(name)->group, quoted_name(tensor.name), dtype_name(tensor.dtype)));
  }
  if (const auto kind = quantization.stored_kind_of(name); kind && !quantization.ignores(name)) {
    return absl::InvalidArgumentError(fmt::format("config.json says that {} is {}, but tensor {} is {}",
                                                  quoted_name(name), stored_kind_name(*kind), quoted_name(tensor.name),
                                                  dtype_name(tensor.dtype)));
  }
  if (!has_shape(tensor, rows, cols)) return wrong_shape(tensor, fmt::format("[{}, {}]", rows, cols));
  MatrixSource source;
  source.format = *format;
  source.rows = rows;
  source.cols = cols;
  source.data = aligned(tensor);
  source.row_bytes = cols * dtype_bytes(tensor.dtype);
  return source;
}

absl::StatusOr<MatrixSource> WeightReader::bare_matrix(std::string_view tensor, int64_t rows, int64_t cols) {
  absl::StatusOr<const TensorInfo*> found = take(layout_.full_name(tensor));
  if (!found.ok()) return found.status();
  const std::optional<WeightFormat> format = float_format((*found)->dtype);
  if (!format || !has_shape(**found, rows, cols)) {
    return wrong_shape(**found, fmt::format("BF16, F16 or F32 [{}, {}]", rows, cols));
  }
  MatrixSource source;
  source.format = *format;
  source.rows = rows;
  source.cols = cols;
  source.data = aligned(**found);
  source.row_bytes = cols * dtype_bytes((*found)->dtype);
  return source;
}

absl::StatusOr<std::vector<float>> WeightReader::table(std::string_view tensor, int64_t rows, int64_t cols) {
  absl::StatusOr<const TensorInfo*> found = take(layout_.full_name(tensor));
  if (!found.ok()) return found.status();
  if (!has_shape(**found, rows, cols)) return wrong_shape(**found, fmt::format("[{}, {}]", rows, cols));
  return read_floats(**found);
}

absl::StatusOr<std::vector<float>> WeightReader::cube(std::string_view tensor, int64_t planes, int64_t rows,
                                                      int64_t cols) {
  absl::StatusOr<const TensorInfo*> found = take(layout_.full_name(tensor));
  if (!found.ok()) return found.status();
  const std::vector<int64_t> wanted = {planes, rows, cols};
  if ((*found)->shape != wanted) return wrong_shape(**found, shape_text(wanted));
  return read_floats(**found);
}

absl::StatusOr<std::vector<int64_t>> WeightReader::integers(std::string_view tensor, int64_t rows, int64_t cols,
                                                            int64_t limit) {
  absl::StatusOr<const TensorInfo*> found = take(layout_.full_name(tensor));
  if (!found.ok()) return found.status();
  if (!has_shape(**found, rows, cols)) return wrong_shape(**found, fmt::format("[{}, {}]", rows, cols));
  absl::StatusOr<std::vector<int64_t>> numbers = read_integers(**found);
  if (!numbers.ok()) return numbers.status();
  for (const int64_t number : *numbers) {
    if (number >= 0 && number < limit) continue;
    return absl::InvalidArgumentError(
        fmt::format("tensor {} holds {}; allowed: 0 to {}", quoted_name((*found)->name), number, limit - 1));
  }
  return numbers;
}

absl::StatusOr<MatrixSource> WeightReader::stored(const std::string& module, const StoredModule& stored, int64_t rows,
                                                  int64_t cols) {
  StoredAccess access;
  access.take = [this](const std::string& name) { return take(name); };
  access.aligned = [this](const TensorInfo& tensor) { return aligned(tensor); };
  access.allocate = [this](size_t bytes) {
    copies_.push_back(std::make_unique<std::byte[]>(bytes));
    return copies_.back().get();
  };
  return stored_matrix(source_, module, stored, rows, cols, access);
}

absl::StatusOr<MatrixSource> WeightReader::affine(const std::string& module, const TensorInfo& weight, int64_t rows,
                                                  int64_t cols) {
  absl::StatusOr<const TensorInfo*> scales = take(module + ".scales");
  if (!scales.ok()) return scales.status();
  const std::optional<AffineFormat> format = config().quantization.of(module);
  if (!format) {
    return absl::InvalidArgumentError(
        fmt::format("tensor {} has .scales, but config.json says that {} is not quantised", quoted_name(weight.name),
                    quoted_name(module)));
  }
  absl::StatusOr<const TensorInfo*> biases = take(module + ".biases");
  if (!biases.ok()) return biases.status();
  const std::optional<WeightFormat> scale_format = float_format((*scales)->dtype);
  if (weight.dtype != Dtype::kU32 || !scale_format || (*biases)->dtype != (*scales)->dtype) {
    return absl::InvalidArgumentError(fmt::format(
        "module {} holds weight {}, scales {}, biases {}; allowed: U32, and BF16, F16 or F32 for both others",
        quoted_name(module), dtype_name(weight.dtype), dtype_name((*scales)->dtype), dtype_name((*biases)->dtype)));
  }
  if (cols % format->group != 0 || cols * format->bits % 32 != 0) {
    return absl::InvalidArgumentError(fmt::format("module {}: rows of {} values are no whole number of groups of {}",
                                                  quoted_name(module), cols, format->group));
  }
  const int64_t words = cols * format->bits / 32;
  const int64_t groups = cols / format->group;
  if (!has_shape(weight, rows, words) || !has_shape(**scales, rows, groups) || !has_shape(**biases, rows, groups)) {
    return absl::InvalidArgumentError(fmt::format(
        "module {}: config.json says {} bits in groups of {}, so weight [{}, {}], scales and biases [{}, {}]; found "
        "are "
        "weight {}, scales {}, biases {} ({})",
        quoted_name(module), format->bits, format->group, rows, words, rows, groups, shape_text(weight.shape),
        shape_text((*scales)->shape), shape_text((*biases)->shape), found_format(weight, **scales, cols)));
  }
  MatrixSource source;
  source.format = WeightFormat::kMlxAffine;
  source.rows = rows;
  source.cols = cols;
  source.data = aligned(weight);
  source.row_bytes = words * 4;
  source.bits = format->bits;
  source.group = format->group;
  source.scale_format = *scale_format;
  source.scales = aligned(**scales);
  source.biases = aligned(**biases);
  source.scale_row_bytes = groups * dtype_bytes((*scales)->dtype);
  return source;
}

absl::StatusOr<std::vector<float>> WeightReader::values(const std::string& full_name, int64_t size) {
  absl::StatusOr<const TensorInfo*> tensor = take(full_name);
  if (!tensor.ok()) return tensor.status();
  if ((*tensor)->shape.size() != 1 || (*tensor)->shape[0] != size)
    return wrong_shape(**tensor, fmt::format("[{}]", size));
  return read_floats(**tensor);
}

absl::StatusOr<std::vector<float>> WeightReader::vector(std::string_view tensor, int64_t size) {
  return values(layout_.full_name(tensor), size);
}

absl::StatusOr<std::vector<int64_t>> WeightReader::integers(std::string_view tensor, int64_t size) {
  const std::string name = layout_.full_name(tensor);
  if (source_.find(name) == nullptr) return std::vector<int64_t>{};
  absl::StatusOr<const TensorInfo*> found = take(name);
  if (!found.ok()) return found.status();
  if ((*found)->shape.size() != 1 || (*found)->shape[0] != size) return wrong_shape(**found, fmt::format("[{}]", size));
  return read_integers(**found);
}

absl::StatusOr<std::vector<float>> WeightReader::norm(std::string_view module, int64_t size) {
  absl::StatusOr<std::vector<float>> gamma = values(layout_.full_name(module) + ".weight", size);
  if (gamma.ok() && layout_.zero_centred(module)) {
    for (float& value : *gamma) value += 1.0f;
  }
  return gamma;
}

absl::StatusOr<std::vector<float>> WeightReader::convolution(std::string_view module, int64_t channels,
                                                             int64_t kernel) {
  absl::StatusOr<const TensorInfo*> tensor = take(layout_.full_name(module) + ".weight");
  if (!tensor.ok()) return tensor.status();
  // A dimension of 1 does not move any byte: both layouts are the same numbers in the same order.
  const std::vector<int64_t> hf = {channels, 1, kernel}, mlx = {channels, kernel, 1};
  if ((*tensor)->shape != hf && (*tensor)->shape != mlx) {
    return wrong_shape(**tensor, fmt::format("{} or {}", shape_text(hf), shape_text(mlx)));
  }
  return read_floats(**tensor);
}

void WeightReader::leave(std::string_view path) {
  const std::string full = layout_.full_name(path);
  for (const std::string& name : source_.names()) {
    if (name.starts_with(full)) used_.insert(name);
  }
}

std::vector<std::string> WeightReader::unused() const {
  std::vector<std::string> out;
  for (const std::string& name : source_.names()) {
    if (!used_.contains(name) && layout_.skip(name) == Skip::kNo && !is_activation_scale(name)) out.push_back(name);
  }
  return out;
}

absl::Status WeightReader::check_all_used() const {
  const std::vector<std::string> left = unused();
  if (left.empty()) return absl::OkStatus();
  std::string names;
  for (size_t i = 0; i < std::min<size_t>(left.size(), 8); ++i) names += (i > 0 ? ", " : "") + quoted_name(left[i]);
  return absl::InvalidArgumentError(fmt::format("{}: {} tensors that family {} does not know: {}{}", source_.dir(),
                                                left.size(), family_name(config().family), names,
                                                left.size() > 8 ? ", ..." : ""));
}

}  // namespace tensorfold
