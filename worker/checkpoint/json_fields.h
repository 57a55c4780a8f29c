// Bounded reading of a checkpoint's JSON files, and typed, range-checked access to their keys.
#pragma once

#include <boost/json/object.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tensorfold {

/// Limits of config.json and generation_config.json, and of model.safetensors.index.json.
inline constexpr uint64_t kMaxConfigBytes = 16u << 20;
inline constexpr uint64_t kMaxIndexBytes = 32u << 20;

/// The whole of a regular file. NotFound if there is none; InvalidArgument if it is larger than `max_bytes`.
absl::StatusOr<std::string> read_text_file(const std::string& path, uint64_t max_bytes);

/// Parses one JSON object, at most 32 levels deep.
absl::StatusOr<boost::json::object> parse_json_object(std::string_view text, const std::string& label);

/// A JSON value cut to a length that fits an error message.
std::string json_text(const boost::json::value& value);

/// Reads keys from one or two objects (inner first) and keeps the first error, so that a parser can be a flat list of
/// fields. Every message names file, key, value and what is allowed. A JSON null counts as absent.
class FieldReader {
 public:
  /// `inner` may be null. Objects must outlive the reader. `inner_name` precedes keys found in it: "text_config.".
  FieldReader(std::string label, const boost::json::object& outer, const boost::json::object* inner = nullptr,
              std::string inner_name = "")
      : label_(std::move(label)), outer_(&outer), inner_(inner), inner_name_(std::move(inner_name)) {}

  const absl::Status& status() const { return status_; }
  bool ok() const { return status_.ok(); }
  bool has(std::string_view key) const { return find(key) != nullptr; }
  const boost::json::value* find(std::string_view key) const;
  /// "config.json: text_config.head_dim".
  std::string where(std::string_view key) const;

  /// Whole number in [low, high]; `fallback` if absent, and an error if there is no fallback.
  int64_t integer(std::string_view key, int64_t low, int64_t high, std::optional<int64_t> fallback = std::nullopt);
  /// Finite number in [low, high].
  double number(std::string_view key, double low, double high, std::optional<double> fallback = std::nullopt);
  bool boolean(std::string_view key, bool fallback);
  std::string string(std::string_view key, std::string_view fallback);
  /// nullptr if absent; an error if it is something else than an object.
  const boost::json::object* object(std::string_view key);
  /// One whole number or a list of them, each in [low, high].
  std::vector<int64_t> integers(std::string_view key, int64_t low, int64_t high);
  /// A list of strings.
  std::vector<std::string> strings(std::string_view key);

  /// Records an error, if it is the first: "<file>: <key> is <value>; allowed: <allowed>".
  void refuse(std::string_view key, std::string_view allowed);
  void fail(absl::Status status);

 private:
  void missing(std::string_view key, std::string_view allowed);

  std::string label_;
  const boost::json::object* outer_;
  const boost::json::object* inner_;
  std::string inner_name_;
  absl::Status status_;
};

/// A JSON number as a whole number, if it is one (64.0 is). nullopt otherwise.
std::optional<int64_t> json_integer(const boost::json::value& value);

}  // namespace tensorfold
