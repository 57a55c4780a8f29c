#include "worker/checkpoint/quantization.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

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

absl::Status refused(const std::string& label, std::string_view where, const std::string& found) {
  return absl::UnimplementedError(
      fmt::format("{}: {} asks for {}, which is not read here. Read are: {}", label, where, found, formats_read()));
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

// One {group_size, bits, mode}; a module's entry inherits what it leaves out.
absl::StatusOr<AffineFormat> parse_affine(const boost::json::object& object,
                                          const std::optional<AffineFormat>& standard, const std::string& label,
                                          const std::string& where) {
  if (const boost::json::value* mode = object.if_contains("mode"); mode != nullptr && !mode->is_null()) {
    if (!mode->is_string() || mode->get_string() != "affine") {
      return refused(label, where, fmt::format("MLX mode {}", json_text(*mode)));
    }
  }
  const int64_t bits = integer_or(object, "bits", standard ? standard->bits : 0);
  const int64_t group = integer_or(object, "group_size", standard ? standard->group : 0);
  if (!contains(kBits, bits))
    return refused(label, where, fmt::format("MLX affine with bits {}", shown(object, "bits")));
  if (!contains(kGroups, group)) {
    return refused(label, where, fmt::format("MLX affine with group_size {}", shown(object, "group_size")));
  }
  return AffineFormat{static_cast<int>(bits), static_cast<int>(group)};
}

// Methods other than MLX's announce themselves by a key of their own.
absl::Status check_method(const boost::json::object& object, const std::string& label, const std::string& where) {
  for (const char* key : {"quant_method", "quant_algo", "format", "load_in_4bit", "load_in_8bit", "config_groups"}) {
    const boost::json::value* value = object.if_contains(key);
    if (value == nullptr || value->is_null()) continue;
    std::string found = fmt::format("{} {}", key, json_text(*value));
    const boost::json::value* algo = object.if_contains("quant_algo");
    if (std::string_view(key) == "quant_method" && algo != nullptr) found += " with quant_algo " + json_text(*algo);
    return refused(label, where, found);
  }
  return absl::OkStatus();
}

absl::StatusOr<QuantizationConfig> parse_one(const boost::json::object& object, const std::string& label,
                                             const std::string& where) {
  if (absl::Status status = check_method(object, label, where); !status.ok()) return status;
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
  return "safetensors in bf16, f16, f32; MLX affine 2, 3, 4, 5, 6, 8 bits in groups of 32, 64, 128";
}

std::string_view strip_prefixes(std::string_view path) {
  for (bool again = true; again;) {
    again = false;
    for (std::string_view prefix : {std::string_view("model."), std::string_view("language_model.")}) {
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
  return found.value_or(QuantizationConfig{});
}

}  // namespace tensorfold
