// Internal to the parsers: typed access to the members of a JSON object, with the first error kept and unknown members
// refused.
#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/api/error.h"
#include "coordinator/api/request_options.h"

namespace tensorfold {

// Parses a body of at most kMaxJsonDepth levels. Errors name the byte.
ApiOr<boost::json::value> parse_json_body(std::string_view body);

// "a string", "null", … for messages.
std::string_view json_type_name(const boost::json::value& value);

// Reads one object. Every read names a member, so the members that were never named are the unknown ones. null means
// absent. After the first error, reads return nothing and keep it.
class Fields {
 public:
  // `path` is the object's place for messages: "" at the top, "tools[0].function". Keeps a reference to `object`.
  Fields(const boost::json::object& object, std::string path) : object_(object), path_(std::move(path)) {}

  const boost::json::value* get(std::string_view name);  // null when absent, null in JSON, or after an error
  std::optional<bool> boolean(std::string_view name);
  std::optional<double> number(std::string_view name);
  std::optional<int64_t> integer(std::string_view name, int64_t low, int64_t high);
  std::optional<std::string> string(std::string_view name, size_t max_bytes);
  const boost::json::array* array(std::string_view name, size_t max_items);
  const boost::json::object* object(std::string_view name);
  // Token ids, as an array of integers.
  std::optional<std::vector<uint32_t>> ids(std::string_view name, size_t max_items);

  // Accepted and without effect here.
  void ignore(std::initializer_list<std::string_view> names);
  // Known and not offered: an error when present, unless `harmless` says that this value changes nothing.
  void refuse(std::string_view name, std::string_view why,
              const std::function<bool(const boost::json::value&)>& harmless = nullptr);

  void fail(ApiError error);
  bool failed() const { return error_.has_value(); }
  const std::optional<ApiError>& error() const { return error_; }
  // Refuses unknown members; the first error, or nothing.
  std::optional<ApiError> finish();

  std::string path_of(std::string_view name) const;

 private:
  const boost::json::object& object_;
  std::string path_;
  std::vector<std::string_view> known_;
  std::optional<ApiError> error_;
};

// An integer of any JSON spelling (7, 7.0) within the range, or an error.
ApiOr<int64_t> json_integer(const boost::json::value& value, std::string_view path, int64_t low, int64_t high);
// An array of token ids.
ApiOr<std::vector<uint32_t>> json_ids(const boost::json::array& array, std::string_view path);

// The options that chat and completions share. logprobs differ and are read by each.
RequestOptions read_options(Fields& fields, const RequestDefaults& defaults);

}  // namespace tensorfold
