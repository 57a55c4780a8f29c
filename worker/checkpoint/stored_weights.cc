#include "worker/checkpoint/stored_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "kernels/ops/dequantise.h"
#include "kernels/ops/small_floats.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/tensor_values.h"

namespace tensorfold {
namespace {

bool is_e8m0(Dtype dtype) { return dtype == Dtype::kF8E8m0 || dtype == Dtype::kU8; }

std::string shown(const TensorInfo& t) {
  return fmt::format("tensor {} is {} {}", quoted_name(t.name), dtype_name(t.dtype), shape_text(t.shape));
}

absl::Status must_be(const TensorInfo& t, const std::string& allowed) {
  return absl::InvalidArgumentError(fmt::format("{}; it must be {}", shown(t), allowed));
}

bool has_shape(const TensorInfo& t, int64_t rows, int64_t cols) {
  return t.shape.size() == 2 && t.shape[0] == rows && t.shape[1] == cols;
}

// Scales are few; one that is not a number makes every logit one.
absl::Status check_numbers(const TensorInfo& t, WeightFormat format) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(t.data.data());
  const int64_t count = t.elements();
  int64_t bad = -1;
  for (int64_t i = 0; i < count && bad < 0; ++i) {
    bool number = true;
    if (format == WeightFormat::kE4m3) {
      number = (bytes[i] & 0x7f) != 0x7f;
    } else if (format == WeightFormat::kE8m0) {
      number = bytes[i] != 0xff;
    } else if (format == WeightFormat::kF32) {
      float value;
      std::memcpy(&value, bytes + 4 * i, 4);
      number = std::isfinite(value);
    } else {
      uint16_t half;
      std::memcpy(&half, bytes + 2 * i, 2);
      number = std::isfinite(format == WeightFormat::kBf16 ? float_of_bf16(half) : float_of_f16(half));
    }
    if (!number) bad = i;
  }
  if (bad < 0) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format("{}, and value {} of it is not a finite number", shown(t), bad));
}

// The config must allow what the tensors are.
absl::Status check_allowed(const TensorSource& source, const std::string& module, const StoredModule& stored,
                           const TensorInfo& values) {
  const QuantizationConfig& config = source.config().quantization;
  const std::string what = stored_label(stored, values);
  if (stored.mlx) return absl::OkStatus();  // find_stored asked the config
  if (!config.kinds.contains(stored.kind)) {
    std::string kinds;
    for (const StoredKind kind : config.kinds)
      kinds += fmt::format("{}{}", kinds.empty() ? "" : ", ", stored_kind_name(kind));
    return absl::InvalidArgumentError(fmt::format("{}, so that module is {}; by config.json weights are {}",
                                                  shown(values), what,
                                                  kinds.empty() ? "not quantised" : kinds + " or not quantised"));
  }
  if (config.ignores(module)) {
    return absl::InvalidArgumentError(
        fmt::format("{}, so that module is {}; config.json says that it is not quantised", shown(values), what));
  }
  if (const auto named = config.stored_kind_of(module); named && *named != stored.kind) {
    return absl::InvalidArgumentError(
        fmt::format("{}, so that module is {}; config.json says {}", shown(values), what, stored_kind_name(*named)));
  }
  return absl::OkStatus();
}

struct ScaleBlock {
  int64_t rows, cols;
};

// What the shape of FP8 scales says that each of them stands for. Where two blocks would give one shape, both give one
// scale the same values.
std::optional<ScaleBlock> fp8_block(const TensorInfo& scales, int64_t rows, int64_t cols,
                                    const std::optional<std::pair<int64_t, int64_t>>& stated, bool only_stated) {
  if (scales.elements() == 1 && (scales.shape.size() < 2 || !stated)) {
    return ScaleBlock{MatrixSource::kWhole, MatrixSource::kWhole};
  }
  std::vector<ScaleBlock> tried = {{128, 128}, {32, 32}, {1, 128}};
  if (stated) tried = {{stated->first, stated->second}};
  for (const ScaleBlock& block : tried) {
    if (has_shape(scales, (rows + block.rows - 1) / block.rows, (cols + block.cols - 1) / block.cols)) return block;
  }
  if (!only_stated && (scales.shape == std::vector<int64_t>{rows} || has_shape(scales, rows, 1))) {
    return ScaleBlock{1, MatrixSource::kWhole};
  }
  return std::nullopt;
}

absl::StatusOr<WeightFormat> scale_format(const StoredModule& stored, const TensorInfo& scales) {
  if (stored.kind == StoredKind::kNvfp4) {
    if (scales.dtype == Dtype::kF8E4m3 || (stored.mlx && scales.dtype == Dtype::kU8)) return WeightFormat::kE4m3;
    return must_be(scales, stored.mlx ? "U8 (e4m3)" : "F8_E4M3");
  }
  if (stored.kind != StoredKind::kFp8) {
    if (is_e8m0(scales.dtype)) return WeightFormat::kE8m0;
    return must_be(scales, "F8_E8M0 or U8 (e8m0)");
  }
  switch (scales.dtype) {
    case Dtype::kF32:
      return WeightFormat::kF32;
    case Dtype::kBf16:
      return WeightFormat::kBf16;
    case Dtype::kF16:
      return WeightFormat::kF16;
    case Dtype::kF8E8m0:
    case Dtype::kU8:
      return WeightFormat::kE8m0;
    default:
      return must_be(scales, "F32, BF16, F16 or F8_E8M0");
  }
}

// FP8 and FP4: values and their scales.
absl::StatusOr<MatrixSource> small_float_matrix(const TensorSource& source, const StoredModule& stored,
                                                const TensorInfo& values, const TensorInfo& scales, int64_t rows,
                                                int64_t cols, const StoredAccess& access) {
  const bool fp4 = stored.kind == StoredKind::kNvfp4 || stored.kind == StoredKind::kMxfp4;
  const int64_t row_bytes = fp4 ? cols / 2 : cols;
  const int64_t word = dtype_bytes(values.dtype);
  if (stored.block_cols > 0 && cols % stored.block_cols != 0) {
    return absl::InvalidArgumentError(fmt::format("{}: rows of {} values are no whole number of groups of {}",
                                                  shown(values), cols, stored.block_cols));
  }
  if (!has_shape(values, rows, row_bytes / word)) {
    return must_be(values, fmt::format("[{}, {}] for {} values a row", rows, row_bytes / word, cols));
  }
  MatrixSource m;
  m.format = fp4 ? WeightFormat::kE2m1 : WeightFormat::kE4m3;
  m.rows = rows;
  m.cols = cols;
  m.row_bytes = row_bytes;
  absl::StatusOr<WeightFormat> format = scale_format(stored, scales);
  if (!format.ok()) return format.status();
  m.scale_format = *format;
  if (stored.block_cols > 0) {
    m.block_cols = stored.block_cols;
    if (!has_shape(scales, rows, cols / stored.block_cols)) {
      return must_be(scales,
                     fmt::format("[{}, {}], one for {} values", rows, cols / stored.block_cols, stored.block_cols));
    }
  } else {
    const QuantizationConfig& config = source.config().quantization;
    const auto& stated = config.fp8_block;
    const std::optional<ScaleBlock> block = fp8_block(scales, rows, cols, stated, stated && config.method == "fp8");
    if (!block) {
      return must_be(scales, stated
                                 ? fmt::format("[{}, {}], one for a block of {} x {} of [{}, {}] values",
                                               (rows + stated->first - 1) / stated->first,
                                               (cols + stated->second - 1) / stated->second, stated->first,
                                               stated->second, rows, cols)
                                 : fmt::format("one scale for all of [{}, {}] values, for each row, or for blocks of "
                                               "128 x 128, 32 x 32 or 1 x 128",
                                               rows, cols));
    }
    m.block_rows = block->rows;
    m.block_cols = block->cols;
  }
  if (absl::Status s = check_numbers(scales, m.scale_format); !s.ok()) return s;
  m.data = access.aligned(values);
  m.scales = access.aligned(scales);
  const int64_t scale_columns = m.block_cols == MatrixSource::kWhole ? 1 : (cols + m.block_cols - 1) / m.block_cols;
  m.scale_row_bytes = scale_columns * dtype_bytes(scales.dtype);
  return m;
}

absl::Status read_global(const StoredModule& stored, const TensorInfo& global, MatrixSource& m) {
  if (global.dtype != Dtype::kF32 || global.elements() != 1) return must_be(global, "one F32");
  if (absl::Status s = check_numbers(global, WeightFormat::kF32); !s.ok()) return s;
  std::memcpy(&m.global_scale, global.data.data(), 4);
  m.divide_by_global = stored.divide;
  if (stored.divide && m.global_scale == 0) {
    return absl::InvalidArgumentError(fmt::format("{}, and it is 0, by which weights are divided", shown(global)));
  }
  return absl::OkStatus();
}

// f16 factors: X.suh and X.svh, or signs, a bit each, in the older X.su and X.sv.
absl::StatusOr<const std::byte*> exl3_side(const TensorSource& source, const std::string& module,
                                           std::string_view halves, std::string_view signs, int64_t size,
                                           const StoredAccess& access) {
  const bool old = source.find(module + std::string(halves)) == nullptr && source.find(module + std::string(signs));
  absl::StatusOr<const TensorInfo*> tensor = access.take(module + std::string(old ? signs : halves));
  if (!tensor.ok()) return tensor.status();
  const TensorInfo& t = **tensor;
  if (!old) {
    if (t.dtype != Dtype::kF16 || t.shape != std::vector<int64_t>{size})
      return must_be(t, fmt::format("F16 [{}]", size));
    if (absl::Status s = check_numbers(t, WeightFormat::kF16); !s.ok()) return s;
    return access.aligned(t);
  }
  if (t.dtype != Dtype::kI16 || t.shape != std::vector<int64_t>{size / 16}) {
    return must_be(t, fmt::format("I16 [{}]", size / 16));
  }
  std::byte* out = access.allocate(static_cast<size_t>(2 * size));
  for (int64_t i = 0; i < size; ++i) {
    const bool minus = (std::to_integer<int>(t.data[static_cast<size_t>(i / 8)]) >> (i % 8) & 1) != 0;
    const uint16_t half = minus ? 0xBC00 : 0x3C00;
    std::memcpy(out + 2 * i, &half, 2);
  }
  return out;
}

// The tensor that chooses a codebook holds its multiplier.
absl::StatusOr<bool> exl3_flag(const TensorSource& source, const std::string& name, uint32_t multiplier,
                               const StoredAccess& access) {
  if (source.find(name) == nullptr) return false;
  absl::StatusOr<const TensorInfo*> tensor = access.take(name);
  if (!tensor.ok()) return tensor.status();
  const TensorInfo& t = **tensor;
  uint32_t value = 0;
  if ((t.dtype == Dtype::kI32 || t.dtype == Dtype::kU32) && t.elements() == 1) {
    std::memcpy(&value, t.data.data(), 4);
  }
  if (value != multiplier) return must_be(t, fmt::format("one I32, the multiplier 0x{:08X}", multiplier));
  return true;
}

absl::StatusOr<MatrixSource> exl3_matrix(const TensorSource& source, const std::string& module,
                                         const TensorInfo& trellis, int64_t rows, int64_t cols,
                                         const StoredAccess& access) {
  const absl::StatusOr<bool> mcg = exl3_flag(source, module + ".mcg", 0xCBAC1FEDu, access);
  if (!mcg.ok()) return mcg.status();
  const absl::StatusOr<bool> mul1 = exl3_flag(source, module + ".mul1", 0x83DCD12Du, access);
  if (!mul1.ok()) return mul1.status();
  if (*mcg && *mul1) {
    return absl::InvalidArgumentError(
        fmt::format("module {} has both .mcg and .mul1: one codebook", quoted_name(module)));
  }
  MatrixSource m;
  m.format = WeightFormat::kExl3;
  m.rows = rows;
  m.cols = cols;
  m.codebook = *mcg ? Exl3Codebook::kMcg : *mul1 ? Exl3Codebook::kMul1 : Exl3Codebook::k3Inst;
  m.whole_rows = (rows + 127) / 128 * 128;
  m.whole_cols = (cols + 127) / 128 * 128;
  const bool shaped = trellis.shape.size() == 3 && trellis.shape[0] == m.whole_cols / 16 &&
                      trellis.shape[1] == m.whole_rows / 16 && trellis.shape[2] <= 128;
  m.tile_bytes = shaped ? 2 * trellis.shape[2] : 0;
  if (trellis.dtype != Dtype::kI16 || exl3_half_bits(m.tile_bytes, m.codebook) == 0) {
    return must_be(trellis, fmt::format("I16 [{}, {}, 16 * bits] of 1 to 8 bits{}", m.whole_cols / 16,
                                        m.whole_rows / 16, *mul1 ? ", or 1.5, 2.5, 3.5" : ""));
  }
  const auto column_side = exl3_side(source, module, ".suh", ".su", m.whole_cols, access);
  if (!column_side.ok()) return column_side.status();
  const auto row_side = exl3_side(source, module, ".svh", ".sv", m.whole_rows, access);
  if (!row_side.ok()) return row_side.status();
  m.data = access.aligned(trellis);
  m.column_side = *column_side;
  m.row_side = *row_side;
  return m;
}

// The first of these that exists, or the first.
std::string_view first_of(const TensorSource& source, const std::string& module,
                          std::initializer_list<std::string_view> suffixes) {
  for (const std::string_view suffix : suffixes) {
    if (source.find(module + std::string(suffix)) != nullptr) return suffix;
  }
  return *suffixes.begin();
}

StoredModule fp4_of(const TensorSource& source, const std::string& module, std::string_view values,
                    std::string_view scales, std::string_view global, bool divide) {
  const TensorInfo* t = source.find(module + std::string(scales));
  const bool mx = t != nullptr && is_e8m0(t->dtype) && source.find(module + std::string(global)) == nullptr;
  if (mx) return {.kind = StoredKind::kMxfp4, .values = values, .scales = scales, .block_cols = 32};
  return {.kind = StoredKind::kNvfp4,
          .values = values,
          .scales = scales,
          .global_scale = global,
          .divide = divide,
          .block_cols = 16};
}

}  // namespace

std::optional<StoredModule> find_stored(const TensorSource& source, const std::string& module) {
  if (source.find(module + ".trellis") != nullptr) {
    return StoredModule{.kind = StoredKind::kExl3, .values = ".trellis"};
  }
  if (source.find(module + ".weight_packed") != nullptr) {
    return fp4_of(source, module, ".weight_packed", ".weight_scale", ".weight_global_scale", true);
  }
  const TensorInfo* weight = source.find(module + ".weight");
  if (weight == nullptr) return std::nullopt;
  if (weight->dtype == Dtype::kU32) {
    const std::optional<AffineFormat> format = source.config().quantization.of(module);
    if (!format || format->mode == MlxMode::kAffine) return std::nullopt;
    const StoredKind kind = format->mode == MlxMode::kMxfp4   ? StoredKind::kMxfp4
                            : format->mode == MlxMode::kMxfp8 ? StoredKind::kMxfp8
                                                              : StoredKind::kNvfp4;
    return StoredModule{
        .kind = kind, .values = ".weight", .scales = ".scales", .mlx = true, .block_cols = format->group};
  }
  if (weight->dtype == Dtype::kF8E4m3) {
    const std::string_view name = first_of(source, module, {".weight_scale", ".weight_scale_inv", ".scale"});
    const TensorInfo* scales = source.find(module + std::string(name));
    // MX: a scale of 8 bits for 32 values of a row.
    const bool mx = scales != nullptr && is_e8m0(scales->dtype) && scales->shape.size() == 2 &&
                    weight->shape.size() == 2 && scales->shape[0] == weight->shape[0] && weight->shape[1] % 32 == 0 &&
                    scales->shape[1] == weight->shape[1] / 32;
    if (mx) return StoredModule{.kind = StoredKind::kMxfp8, .values = ".weight", .scales = name, .block_cols = 32};
    return StoredModule{.kind = StoredKind::kFp8, .values = ".weight", .scales = name};
  }
  if (weight->dtype == Dtype::kU8 || weight->dtype == Dtype::kI8) {
    return fp4_of(source, module, ".weight", first_of(source, module, {".weight_scale", ".scale"}), ".weight_scale_2",
                  false);
  }
  return std::nullopt;
}

int64_t stored_elements(const StoredModule& stored, const TensorInfo& values) {
  const auto bytes = static_cast<int64_t>(values.data.size());
  if (stored.kind == StoredKind::kExl3) {
    return values.shape.size() == 3 && values.shape[2] > 0 ? values.elements() / values.shape[2] * 256 : 0;
  }
  return stored.kind == StoredKind::kNvfp4 || stored.kind == StoredKind::kMxfp4 ? 2 * bytes : bytes;
}

namespace {

// FP8 and FP4 as they are stored, each row with its own scales: bytes for FP4 and where they are e8m0, else fp32. (The
// table that comes with a global scale: stored_table_bytes().) EXL3 as fp32.
int64_t cpu_bytes(const TensorSource& source, const std::string& module, const StoredModule& stored,
                  const TensorInfo& values) {
  const int64_t count = stored_elements(stored, values);
  const TensorInfo* scales = source.find(module + std::string(stored.scales));
  if (stored.kind == StoredKind::kExl3) return 4 * count;
  if (stored.kind == StoredKind::kNvfp4 || stored.kind == StoredKind::kMxfp4) {
    return count / 2 + (scales == nullptr ? 0 : scales->elements());
  }
  const int64_t rows = values.shape.empty() ? 1 : values.elements() / std::max<int64_t>(values.shape.back(), 1);
  // No more groups than columns, whatever a header says.
  const int64_t columns = rows > 0 ? count / rows : 0;
  const int64_t groups =
      scales == nullptr || scales->shape.size() < 2 ? 1 : std::min(scales->shape.back(), std::max<int64_t>(columns, 1));
  return count + rows * groups * (scales != nullptr && is_e8m0(scales->dtype) ? 1 : 4);
}

// A product's sum over columns is cut into at most so many slices (contract, section 3).
constexpr int64_t kMostSlices = 8;

// Columns at which a slice of this matrix may begin, as far as its name and width tell: those that are cut by columns
// are the ones whose products are summed over slices.
int64_t slice_columns(std::string_view module, int64_t columns) {
  for (const std::string_view name : {"down_proj", "o_proj", "out_proj", "wo_b", "w2", "fc2"}) {
    if (module.ends_with(name) && columns % kMostSlices == 0) return columns / kMostSlices;
  }
  return columns;
}

// What CUDA packs (kernels/cuda/cuda_weight.h): 64 columns of 16 rows are a stage, FP8 with four bytes a row and 64
// columns (32 where blocks or slices are as short), FP4 with a byte a row and 16 columns (8 where slices are as short)
// and 16 bytes besides. bf16 where slices begin elsewhere inside blocks. EXL3 as bf16.
int64_t cuda_bytes(const TensorSource& source, const std::string& module, const StoredModule& stored,
                   const TensorInfo& values) {
  constexpr int64_t kStage = 64 * 16;
  const int64_t count = stored_elements(stored, values);
  if (stored.kind == StoredKind::kExl3 || values.shape.size() < 2) return 2 * count;
  const bool fp4 = stored.kind == StoredKind::kNvfp4 || stored.kind == StoredKind::kMxfp4;
  const int64_t rows = values.elements() / std::max<int64_t>(values.shape.back(), 1);  // of all experts, if stacked
  const int64_t columns = rows > 0 ? count / rows : 0, slice = slice_columns(module, columns);
  const auto stages = [count](int64_t bytes) { return count / kStage * bytes + count % kStage * bytes / kStage; };
  if (fp4) {
    if (slice % 8 != 0 && slice != columns) return 2 * count;
    return stages(512 + (slice % 16 == 0 || slice == columns ? 64 : 128) + 16);
  }
  const TensorInfo* scales = source.find(module + std::string(stored.scales));
  const int64_t groups = scales != nullptr && scales->shape.size() == values.shape.size() ? scales->shape.back() : 1;
  if (groups <= 1) return stages(1024 + 64);  // a scale a row, or one
  const int64_t block = (columns + groups - 1) / groups;
  for (const int64_t run : {64, 32}) {
    if (block % run == 0 && (slice == columns || slice % run == 0)) return stages(1024 + 64 * 64 / run);
  }
  return 2 * count;
}

}  // namespace

int64_t stored_table_bytes(const StoredModule& stored) { return stored.global_scale.empty() ? 0 : 8192; }

int64_t affine_device_bytes(const AffineFormat& format, Dtype scales, int64_t elements) {
  if (scales != Dtype::kBf16) return 2 * elements;
  const int64_t stage = 128 * (format.bits == 4 ? 4 : 8) + 64 * (format.group == 32 ? 2 : 1);
  return elements / 1024 * stage + elements % 1024 * stage / 1024;
}

int64_t stored_memory_bytes(const TensorSource& source, const std::string& module, const StoredModule& stored,
                            const TensorInfo& values, MemoryOf memory) {
  return memory == MemoryOf::kCuda ? cuda_bytes(source, module, stored, values)
                                   : cpu_bytes(source, module, stored, values);
}

std::string stored_label(const StoredModule& stored, const TensorInfo& values) {
  std::string label = (stored.mlx ? "mlx " : "") + std::string(stored_kind_name(stored.kind));
  if (stored.block_cols > 0) label += fmt::format(" g{}", stored.block_cols);
  if (stored.kind == StoredKind::kExl3 && values.shape.size() == 3) {
    label += fmt::format(" {:g}-bit", static_cast<double>(values.shape[2]) / 16.0);
  }
  return label;
}

bool is_activation_scale(std::string_view name) {
  static constexpr std::array<std::string_view, 6> kSuffixes = {".input_scale", ".input_global_scale", ".k_scale",
                                                                ".v_scale",     ".output_scale",       ".q_scale"};
  return std::any_of(kSuffixes.begin(), kSuffixes.end(), [&](std::string_view s) { return name.ends_with(s); });
}

absl::StatusOr<MatrixSource> stored_matrix(const TensorSource& source, const std::string& module,
                                           const StoredModule& stored, int64_t rows, int64_t cols,
                                           const StoredAccess& access) {
  absl::StatusOr<const TensorInfo*> values = access.take(module + std::string(stored.values));
  if (!values.ok()) return values.status();
  if (absl::Status s = check_allowed(source, module, stored, **values); !s.ok()) return s;
  if (stored.kind == StoredKind::kExl3) return exl3_matrix(source, module, **values, rows, cols, access);
  absl::StatusOr<const TensorInfo*> scales = access.take(module + std::string(stored.scales));
  if (!scales.ok()) return scales.status();
  absl::StatusOr<MatrixSource> m = small_float_matrix(source, stored, **values, **scales, rows, cols, access);
  if (!m.ok() || stored.global_scale.empty()) return m;
  absl::StatusOr<const TensorInfo*> global = access.take(module + std::string(stored.global_scale));
  if (!global.ok()) return global.status();
  if (absl::Status s = read_global(stored, **global, *m); !s.ok()) return s;
  return m;
}

}  // namespace tensorfold
