#include "worker/checkpoint/rope_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace tensorfold {
namespace {

constexpr double kMaxTheta = 1e12;

std::optional<RopeType> rope_type(std::string_view name, Family family) {
  if (name == "default") return RopeType::kDefault;
  if (name == "linear") return RopeType::kLinear;
  if (name == "llama3") return RopeType::kLlama3;
  if (name == "yarn") return RopeType::kYarn;
  // An old name for interleaved image positions, which for text are the plain ones.
  if (name == "mrope" && is_hybrid(family)) return RopeType::kDefault;
  return std::nullopt;
}

// Why a known type is not computed; empty for an unknown one.
std::string_view refusal(std::string_view name) {
  if (name == "dynamic" || name == "longrope" || name == "su") {
    return ": its frequencies change with the length of the whole sequence, so a token's keys would depend on tokens "
           "that come later";
  }
  return "";
}

// The value of a key that may stand flat, in the nested object, or in both if they agree.
double flat_or_nested(FieldReader& fields, FieldReader* nested, std::string_view key, double low, double high,
                      std::optional<double> fallback) {
  const bool in_nested = nested != nullptr && nested->has(key);
  if (!in_nested) return fields.number(key, low, high, fallback);
  const double value = nested->number(key, low, high);
  if (fields.has(key) && fields.number(key, low, high) != value) {
    fields.fail(absl::InvalidArgumentError(fmt::format("{} and {} disagree", fields.where(key), nested->where(key))));
  }
  return value;
}

void parse_yarn(FieldReader& nested, int64_t max_positions, RopeConfig& rope) {
  rope.original_max_positions = nested.integer("original_max_position_embeddings", 1, int64_t{1} << 30, max_positions);
  const double stretched = static_cast<double>(max_positions) / static_cast<double>(rope.original_max_positions);
  rope.factor = nested.number("factor", 1.0, 1e6, std::max(1.0, stretched));
  rope.beta_fast = nested.number("beta_fast", 1e-6, 1e6, 32.0);
  rope.beta_slow = nested.number("beta_slow", 1e-6, 1e6, 1.0);
  rope.truncate = nested.boolean("truncate", true);
  rope.attention_factor = nested.number("attention_factor", 0.0, 1e3, 0.0);
  rope.mscale = nested.number("mscale", 0.0, 1e3, 0.0);
  rope.mscale_all_dim = nested.number("mscale_all_dim", 0.0, 1e3, 0.0);
  if (nested.ok() && rope.beta_fast < rope.beta_slow) nested.refuse("beta_fast", "a number not under beta_slow");
}

void parse_scaling(FieldReader& nested, int64_t max_positions, RopeConfig& rope) {
  if (rope.type == RopeType::kDefault) return;
  if (rope.type == RopeType::kYarn) return parse_yarn(nested, max_positions, rope);
  rope.factor = nested.number("factor", 1.0, 1e6);
  if (rope.type != RopeType::kLlama3) return;
  rope.low_freq_factor = nested.number("low_freq_factor", 1e-6, 1e6);
  rope.high_freq_factor = nested.number("high_freq_factor", 1e-6, 1e6);
  rope.original_max_positions = nested.integer("original_max_position_embeddings", 1, int64_t{1} << 30);
  if (nested.ok() && rope.high_freq_factor <= rope.low_freq_factor) {
    nested.refuse("high_freq_factor", "a number over low_freq_factor");
  }
}

}  // namespace

RopeConfig parse_rope(FieldReader& fields, Family family, int64_t head_dim, int64_t max_positions,
                      const std::string& label) {
  RopeConfig rope;
  const char* key = fields.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  const boost::json::object* object = fields.object(key);
  std::optional<FieldReader> nested;
  if (object != nullptr) {
    nested.emplace(fmt::format("{}: {}", label, key), *object);
    const std::string name = nested->string(nested->has("rope_type") ? "rope_type" : "type", "default");
    const std::optional<RopeType> type = rope_type(name, family);
    if (!type) {
      fields.fail(
          absl::UnimplementedError(fmt::format("{}: {} has rope_type '{}', which is not read here{}. Read are: "
                                               "default, linear, llama3, yarn",
                                               label, key, name.substr(0, 64), refusal(name))));
      return rope;
    }
    rope.type = *type;
    for (const auto& entry : *object) {
      if (!entry.value().is_object()) continue;
      fields.fail(absl::UnimplementedError(
          fmt::format("{}: {} holds an object '{}': different rotary positions in different layers are not read here",
                      label, key, std::string(entry.key().data(), std::min<size_t>(entry.key().size(), 64)))));
      return rope;
    }
    parse_scaling(*nested, max_positions, rope);
  }
  FieldReader* inner = nested ? &*nested : nullptr;
  // Old llama configurations leave theta out and mean 10000; later families always say it.
  rope.theta = flat_or_nested(fields, inner, "rope_theta", 1.0, kMaxTheta,
                              family == Family::kLlama ? std::optional<double>(10000.0) : std::nullopt);
  const double partial =
      flat_or_nested(fields, inner, "partial_rotary_factor", 0.0, 1.0, is_hybrid(family) ? 0.25 : 1.0);
  if (nested) fields.fail(nested->status());
  rope.dims = static_cast<int64_t>(std::trunc(static_cast<double>(head_dim) * partial));
  if (fields.ok() && !is_hybrid(family) && partial != 1.0) {
    fields.fail(absl::UnimplementedError(
        fmt::format("{}: partial_rotary_factor is {}; allowed for {}: 1", label, partial, family_name(family))));
  }
  if (fields.ok() && (rope.dims < 2 || rope.dims % 2 != 0)) {
    fields.fail(absl::InvalidArgumentError(
        fmt::format("{}: partial_rotary_factor {} of head_dim {} rotates {} dims; allowed: an even number from 2",
                    label, partial, head_dim, rope.dims)));
  }
  return rope;
}

}  // namespace tensorfold
