#include "worker/checkpoint/quantization.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "worker/checkpoint/foreign_quantization.h"
#include "worker/checkpoint/json_fields.h"
#include "worker/checkpoint/safetensors.h"

namespace tensorfold {
namespace {

constexpr std::array<int64_t, 6> kBits = {2, 3, 4, 5, 6, 8};
constexpr std::array<int64_t, 3> kGroups = {32, 64, 128};

template <typename Range>
bool contains(const Range& range, int64_t value) {
  return std::find(range.begin(), range.end(), value) != range.end();
}

struct ModeRow {
  std::string_view name;
  MlxMode mode;
  int64_t bits, group;  // of all but affine
};
constexpr std::array<ModeRow, 4> kMlxModes = {{{"affine", MlxMode::kAffine, 0, 0},
                                               {"mxfp4", MlxMode::kMxfp4, 4, 32},
                                               {"mxfp8", MlxMode::kMxfp8, 8, 32},
                                               {"nvfp4", MlxMode::kNvfp4, 4, 16}}};

absl::Status refused(const std::string& label, const std::string& where, const std::string& found) {
  return refused_quantization(label, where, found);
}

// An absent key takes `fallback`; 0 stands for a value that is no whole number and so is never allowed.
int64_t integer_or(const boost::json::object& object, const char* key, int64_t fallback) {
  const boost::json::value* value = object.if_contains(key);
  return value == nullptr || value->is_null() ? fallback : json_integer(*value).value_or(0);
}

std::string shown(const boost::json::object& object, const char* key) {
  const boost::json::value* value = object.if_contains(key);
  return value == nullptr ? "absent" : json_text(*value);
}

// One {group_size, bits, mode}; a module's entry inherits bits and group when it leaves them out, and is affine when it
// names no mode.
absl::StatusOr<AffineFormat> parse_affine(const boost::json::object& object,
                                          const std::optional<AffineFormat>& standard, const std::string& label,
                                          const std::string& where) {
  AffineFormat format;
  if (const boost::json::value* mode = object.if_contains("mode"); mode != nullptr && !mode->is_null()) {
    const auto* name = mode->if_string();
    const auto at = std::find_if(kMlxModes.begin(), kMlxModes.end(), [&](const ModeRow& row) {
      return name != nullptr && row.name == std::string_view(name->data(), name->size());
    });
    if (at == kMlxModes.end()) return refused(label, where, fmt::format("MLX mode {}", json_text(*mode)));
    format.mode = at->mode;
    if (at->mode != MlxMode::kAffine) {  // of one width and one group each
      const int64_t bits = integer_or(object, "bits", at->bits), group = integer_or(object, "group_size", at->group);
      if (bits != at->bits || group != at->group) {
        return refused(label, where,
                       fmt::format("MLX mode {} with bits {} and group_size {} (it has {} and {})", at->name,
                                   shown(object, "bits"), shown(object, "group_size"), at->bits, at->group));
      }
      format.bits = static_cast<int>(bits);
      format.group = static_cast<int>(group);
      return format;
    }
  }
  const int64_t bits = integer_or(object, "bits", standard ? standard->bits : 0);
  const int64_t group = integer_or(object, "group_size", standard ? standard->group : 0);
  if (!contains(kBits, bits))
    return refused(label, where, fmt::format("MLX affine with bits {}", shown(object, "bits")));
  if (!contains(kGroups, group)) {
    return refused(label, where, fmt::format("MLX affine with group_size {}", shown(object, "group_size")));
  }
  format.bits = static_cast<int>(bits);
  format.group = static_cast<int>(group);
  return format;
}

// Methods other than MLX's announce themselves by a key of their own.
bool is_mlx(const boost::json::object& object) {
  for (const char* key : {"quant_method", "quant_algo", "format", "load_in_4bit", "load_in_8bit", "config_groups"}) {
    const boost::json::value* value = object.if_contains(key);
    if (value != nullptr && !value->is_null()) return false;
  }
  return true;
}

absl::StatusOr<QuantizationConfig> parse_one(const boost::json::object& object, const std::string& label,
                                             const std::string& where) {
  if (!is_mlx(object)) return parse_foreign_quantization(object, label, where);
  QuantizationConfig out;
  absl::StatusOr<AffineFormat> standard = parse_affine(object, std::nullopt, label, where);
  if (!standard.ok()) return standard.status();
  out.standard = *standard;
  for (const auto& entry : object) {
    const std::string_view key(entry.key().data(), entry.key().size());
    const boost::json::value& value = entry.value();
    if (!value.is_object() && !value.is_bool()) continue;  // bits, group_size, mode; notes of the converter
    std::optional<AffineFormat> format;
    if (const boost::json::object* own = value.if_object()) {
      absl::StatusOr<AffineFormat> parsed =
          parse_affine(*own, out.standard, label, fmt::format("{} {}", where, quoted_name(key)));
      if (!parsed.ok()) return parsed.status();
      format = *parsed;
    } else if (value.get_bool()) {
      continue;  // true: like the others
    }
    const auto [at, added] = out.modules.emplace(std::string(strip_prefixes(key)), format);
    if (!added && at->second != format) {
      return absl::InvalidArgumentError(
          fmt::format("{}: {} names module {} twice, with different formats", label, where, quoted_name(at->first)));
    }
  }
  return out;
}

}  // namespace

std::string formats_read() {
  return "safetensors in bf16, f16, f32; MLX affine 2, 3, 4, 5, 6, 8 bits in groups of 32, 64, 128; MLX mxfp4, mxfp8, "
         "nvfp4; FP8 (e4m3) a tensor, channel or block; NVFP4, MXFP4, MXFP8 of modelopt and compressed-tensors; EXL3";
}

std::string_view mlx_mode_name(MlxMode mode) {
  return std::find_if(kMlxModes.begin(), kMlxModes.end(), [&](const ModeRow& row) { return row.mode == mode; })->name;
}

std::string_view stored_kind_name(StoredKind kind) {
  switch (kind) {
    case StoredKind::kFp8:
      return "fp8";
    case StoredKind::kMxfp8:
      return "mxfp8";
    case StoredKind::kNvfp4:
      return "nvfp4";
    case StoredKind::kMxfp4:
      return "mxfp4";
    case StoredKind::kExl3:
      return "exl3";
  }
  return "unknown";
}

std::string canonical_text(const QuantizationConfig& c) {
  const auto one = [](const AffineFormat& f) {
    const std::string width = fmt::format("{}x{}", f.bits, f.group);
    return f.mode == MlxMode::kAffine ? width : fmt::format("{}:{}", mlx_mode_name(f.mode), width);
  };
  std::string text = c.standard ? one(*c.standard) : "none";
  for (const auto& [path, format] : c.modules) text += fmt::format(",{}={}", path, format ? one(*format) : "none");
  if (!c.method.empty()) text = c.method;
  for (const StoredKind kind : c.kinds) text += fmt::format(",{}", stored_kind_name(kind));
  for (const auto& [path, kind] : c.stored_modules) text += fmt::format(",{}={}", path, stored_kind_name(kind));
  for (const std::string& pattern : c.ignored) text += fmt::format(",!{}", pattern);
  if (c.fp8_block) text += fmt::format(",block={}x{}", c.fp8_block->first, c.fp8_block->second);
  return text;
}

std::string_view strip_prefixes(std::string_view path) {
  for (bool again = true; again;) {
    again = false;
    for (std::string_view prefix :
         {std::string_view("model."), std::string_view("language_model."), std::string_view("backbone.")}) {
      if (path.size() > prefix.size() && path.substr(0, prefix.size()) == prefix) {
        path.remove_prefix(prefix.size());
        again = true;
      }
    }
  }
  return path;
}

std::optional<AffineFormat> QuantizationConfig::of(std::string_view module_path) const {
  const auto at = modules.find(strip_prefixes(module_path));
  return at != modules.end() ? at->second : standard;
}

bool QuantizationConfig::names(std::string_view module_path) const {
  return modules.find(strip_prefixes(module_path)) != modules.end();
}

std::optional<StoredKind> QuantizationConfig::stored_kind_of(std::string_view module_path) const {
  const auto at = stored_modules.find(strip_prefixes(module_path));
  return at == stored_modules.end() ? std::nullopt : std::optional(at->second);
}

bool QuantizationConfig::ignores(std::string_view module_path) const {
  const std::string_view path = strip_prefixes(module_path);
  return std::any_of(ignored.begin(), ignored.end(),
                     [&](const std::string& pattern) { return glob_matches(pattern, path); });
}

absl::StatusOr<QuantizationConfig> parse_quantization(const boost::json::object& config,
                                                      const boost::json::object* text_config,
                                                      const std::string& label) {
  std::optional<QuantizationConfig> found;
  std::string found_at;
  for (const boost::json::object* level : {&config, text_config}) {
    if (level == nullptr) continue;
    // quantization_config first: a foreign method names itself there.
    for (const char* key : {"quantization_config", "quantization", "compression_config"}) {
      const boost::json::value* value = level->if_contains(key);
      if (value == nullptr || value->is_null()) continue;
      const std::string where = std::string(level == &config ? "" : "text_config.") + key;
      const boost::json::object* object = value->if_object();
      if (object == nullptr) {
        return absl::InvalidArgumentError(
            fmt::format("{}: {} is {}; allowed: an object", label, where, json_text(*value)));
      }
      if (object->empty()) continue;
      absl::StatusOr<QuantizationConfig> parsed = parse_one(*object, label, where);
      if (!parsed.ok()) return parsed.status();
      if (found && *found != *parsed) {
        return absl::InvalidArgumentError(fmt::format("{}: {} and {} disagree", label, found_at, where));
      }
      found = std::move(*parsed);
      found_at = where;
    }
  }
  // DeepSeek's expert_dtype: packed FP4 experts among FP8 modules.
  for (const boost::json::object* level : {&config, text_config}) {
    if (level == nullptr || !found || found->method != "fp8") continue;
    // V4 says it at the top, V4.1 among the rest of its quantisation.
    const boost::json::value* own = level->if_contains("quantization_config");
    for (const boost::json::object* at : {level, own != nullptr ? own->if_object() : nullptr}) {
      const boost::json::value* experts = at != nullptr ? at->if_contains("expert_dtype") : nullptr;
      if (experts == nullptr || !experts->is_string()) continue;
      if (experts->get_string() == "fp4") found->kinds.insert(StoredKind::kMxfp4);
    }
  }
  return found.value_or(QuantizationConfig{});
}

}  // namespace tensorfold
