// What config.json says of quantisation: MLX affine is read, everything else is refused by name.
#pragma once

#include <boost/json/object.hpp>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tensorfold {

/// "safetensors in bf16, f16, f32; MLX affine 2, 3, 4, 5, 6, 8 bits in groups of 32, 64, 128": ends every refusal.
std::string formats_read();

/// MLX affine: values of `bits` bits, and one scale and one bias for each `group` of them along a row.
struct AffineFormat {
  int bits = 0;
  int group = 0;
  bool operator==(const AffineFormat&) const = default;
};

/// A module path without any of the prefixes that checkpoints put before it:
/// "model.language_model.layers.0.mlp.up_proj" and "language_model.model.layers.0.mlp.up_proj" are both
/// "layers.0.mlp.up_proj".
std::string_view strip_prefixes(std::string_view path);

struct QuantizationConfig {
  /// Of modules without an entry of their own. Empty: nothing is quantised.
  std::optional<AffineFormat> standard;
  /// By strip_prefixes(module path); empty value: this module is not quantised.
  std::map<std::string, std::optional<AffineFormat>, std::less<>> modules;

  bool any() const { return standard.has_value() || !modules.empty(); }
  /// What config.json says of a module, given by a path with or without prefixes.
  std::optional<AffineFormat> of(std::string_view module_path) const;
  /// True if config.json names the module itself.
  bool names(std::string_view module_path) const;
  bool operator==(const QuantizationConfig&) const = default;
};

/// Reads `quantization` and `quantization_config` at the top and in text_config (null if there is none). Where several
/// are present they must agree. Refuses by name every method, mode, width and group that is not read.
absl::StatusOr<QuantizationConfig> parse_quantization(const boost::json::object& config,
                                                      const boost::json::object* text_config, const std::string& label);

}  // namespace tensorfold
