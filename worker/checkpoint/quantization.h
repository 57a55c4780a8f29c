// What config.json says of quantisation: which formats the modules may have; all others are refused by name.
#pragma once

#include <boost/json/object.hpp>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tensorfold {

/// "safetensors in bf16, f16, f32; MLX affine 2, 3, 4, 5, 6, 8 bits in groups of 32, 64, 128; ...": ends every refusal.
std::string formats_read();

/// MLX's modes: affine has a scale and a bias a group, the others a scale of 8 bits.
enum class MlxMode : uint8_t { kAffine, kMxfp4, kMxfp8, kNvfp4 };
std::string_view mlx_mode_name(MlxMode mode);

/// MLX: values of `bits` bits, and one scale (affine: and one bias) for each `group` of them along a row.
struct AffineFormat {
  int bits = 0;
  int group = 0;
  MlxMode mode = MlxMode::kAffine;
  bool operator==(const AffineFormat&) const = default;
};

/// Formats of methods other than MLX. The tensors of a module say which one it has and how its scales lie; the config
/// says which ones a checkpoint may have.
enum class StoredKind : uint8_t { kFp8, kMxfp8, kNvfp4, kMxfp4, kExl3 };
std::string_view stored_kind_name(StoredKind kind);

/// A module path without any of the prefixes that checkpoints put before it:
/// "model.language_model.layers.0.mlp.up_proj" and "language_model.model.layers.0.mlp.up_proj" are both
/// "layers.0.mlp.up_proj".
std::string_view strip_prefixes(std::string_view path);

struct QuantizationConfig {
  /// MLX: of modules without an entry of their own. Empty: nothing is quantised.
  std::optional<AffineFormat> standard;
  /// MLX: by strip_prefixes(module path); empty value: this module is not quantised.
  std::map<std::string, std::optional<AffineFormat>, std::less<>> modules;

  /// Other methods: "modelopt", "compressed-tensors", "fp8", "exl3"; the formats that modules may have; those of
  /// modules named outright; and names or globs of modules that are not quantised, both without prefixes.
  std::string method;
  std::set<StoredKind> kinds;
  std::map<std::string, StoredKind, std::less<>> stored_modules;
  std::vector<std::string> ignored;
  /// Rows and columns that a scale of FP8 stands for, where the config says so.
  std::optional<std::pair<int64_t, int64_t>> fp8_block;

  bool any() const { return standard.has_value() || !modules.empty() || !kinds.empty(); }
  /// What config.json says of a module, given by a path with or without prefixes, in MLX's way.
  std::optional<AffineFormat> of(std::string_view module_path) const;
  /// True if config.json names the module itself.
  bool names(std::string_view module_path) const;
  /// The format of a module that config.json names itself.
  std::optional<StoredKind> stored_kind_of(std::string_view module_path) const;
  /// True if a name or a glob says that this module is not quantised. ("re:" patterns are not evaluated: the tensors
  /// say what they are.)
  bool ignores(std::string_view module_path) const;
  bool operator==(const QuantizationConfig&) const = default;
};

/// Reads `quantization` and `quantization_config` at the top and in text_config (null if there is none). Where several
/// are present they must agree. Refuses by name every method, mode, width and group that is not read.
absl::StatusOr<QuantizationConfig> parse_quantization(const boost::json::object& config,
                                                      const boost::json::object* text_config, const std::string& label);

/// modelopt's own file beside config.json, hf_quant_config.json.
absl::StatusOr<QuantizationConfig> parse_hf_quant_config(const boost::json::object& file, const std::string& label);

/// One form for one meaning; for checkpoints in bf16 or MLX formats the same as ever.
std::string canonical_text(const QuantizationConfig& config);

}  // namespace tensorfold
