#include "coordinator/api/request_fields.h"

#include <algorithm>
#include <cmath>
#include <exception>

#include "fmt/format.h"

namespace tensorfold {
namespace {

// Edits between two names (insert, delete, replace), for "did you mean".
size_t distance_between(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

std::string_view nearest(std::string_view name, const std::vector<std::string_view>& known) {
  if (name.size() > 64) return {};
  std::string_view best;
  size_t least = std::max<size_t>(2, name.size() / 3) + 1;
  for (std::string_view candidate : known) {
    const size_t distance = distance_between(name, candidate);
    if (distance < least && distance < candidate.size()) {
      least = distance;
      best = candidate;
    }
  }
  return best;
}

}  // namespace

ApiOr<boost::json::value> parse_json_body(std::string_view body) {
  try {
    boost::json::parse_options options;
    options.max_depth = kMaxJsonDepth;
    boost::json::parser parser({}, options);
    boost::json::error_code ec;
    const size_t read = parser.write_some(body.data(), body.size(), ec);
    if (ec == boost::json::error::too_deep) {
      return invalid_json_error(read, fmt::format("nested deeper than {} levels", kMaxJsonDepth));
    }
    if (ec) return invalid_json_error(read, ec.message());
    const size_t rest = body.find_first_not_of(" \t\r\n", read);
    if (rest != std::string_view::npos) return invalid_json_error(rest, "something follows the value");
    return parser.release();
  } catch (const std::exception& e) {
    return invalid_json_error(0, e.what());
  }
}

std::string_view json_type_name(const boost::json::value& value) {
  switch (value.kind()) {
    case boost::json::kind::null:
      return "null";
    case boost::json::kind::bool_:
      return "a boolean";
    case boost::json::kind::int64:
    case boost::json::kind::uint64:
      return "an integer";
    case boost::json::kind::double_:
      return "a number";
    case boost::json::kind::string:
      return "a string";
    case boost::json::kind::array:
      return "an array";
    case boost::json::kind::object:
      return "an object";
  }
  return "something else";
}

ApiOr<int64_t> json_integer(const boost::json::value& value, std::string_view path, int64_t low, int64_t high) {
  const auto outside = [&](const std::string& shown) {
    return invalid_value_error(path, fmt::format("{} is not between {} and {}", shown, low, high));
  };
  int64_t number = 0;
  if (const int64_t* i = value.if_int64()) {
    number = *i;
  } else if (const uint64_t* u = value.if_uint64()) {
    return outside(std::to_string(*u));  // Boost keeps in 64 signed bits what fits there
  } else if (const double* d = value.if_double()) {
    if (!std::isfinite(*d) || *d != std::floor(*d)) return invalid_type_error(path, "an integer", "a number");
    if (std::abs(*d) > 9007199254740992.0) return outside(fmt::format("{}", *d));
    number = static_cast<int64_t>(*d);
  } else {
    return invalid_type_error(path, "an integer", json_type_name(value));
  }
  if (number < low || number > high) return outside(std::to_string(number));
  return number;
}

ApiOr<std::vector<uint32_t>> json_ids(const boost::json::array& array, std::string_view path) {
  std::vector<uint32_t> ids;
  ids.reserve(array.size());
  for (size_t i = 0; i < array.size(); ++i) {
    const int64_t* number = array[i].if_int64();  // the usual spelling; prompts have many ids
    if (number != nullptr && *number >= 0 && *number < int64_t{kMaxVocabulary}) {
      ids.push_back(static_cast<uint32_t>(*number));
      continue;
    }
    ApiOr<int64_t> id = json_integer(array[i], fmt::format("{}[{}]", path, i), 0, kMaxVocabulary - 1);
    if (!id.ok()) return id.error();
    ids.push_back(static_cast<uint32_t>(*id));
  }
  return ids;
}

std::string Fields::path_of(std::string_view name) const {
  return path_.empty() ? std::string(name) : fmt::format("{}.{}", path_, name);
}

void Fields::fail(ApiError error) {
  if (!error_) error_ = std::move(error);
}

const boost::json::value* Fields::get(std::string_view name) {
  known_.push_back(name);
  if (error_) return nullptr;
  const boost::json::value* value = object_.if_contains(name);
  return value == nullptr || value->is_null() ? nullptr : value;
}

std::optional<bool> Fields::boolean(std::string_view name) {
  const boost::json::value* value = get(name);
  if (value == nullptr) return std::nullopt;
  if (const bool* b = value->if_bool()) return *b;
  fail(invalid_type_error(path_of(name), "a boolean", json_type_name(*value)));
  return std::nullopt;
}

std::optional<double> Fields::number(std::string_view name) {
  const boost::json::value* value = get(name);
  if (value == nullptr) return std::nullopt;
  if (const int64_t* i = value->if_int64()) return static_cast<double>(*i);
  if (const uint64_t* u = value->if_uint64()) return static_cast<double>(*u);
  if (const double* d = value->if_double(); d != nullptr && std::isfinite(*d)) return *d;
  fail(invalid_type_error(path_of(name), "a number", value->is_double() ? "one too large" : json_type_name(*value)));
  return std::nullopt;
}

std::optional<int64_t> Fields::integer(std::string_view name, int64_t low, int64_t high) {
  const boost::json::value* value = get(name);
  if (value == nullptr) return std::nullopt;
  ApiOr<int64_t> number = json_integer(*value, path_of(name), low, high);
  if (number.ok()) return *number;
  fail(number.error());
  return std::nullopt;
}

std::optional<std::string> Fields::string(std::string_view name, size_t max_bytes) {
  const boost::json::value* value = get(name);
  if (value == nullptr) return std::nullopt;
  const boost::json::string* text = value->if_string();
  if (text == nullptr) {
    fail(invalid_type_error(path_of(name), "a string", json_type_name(*value)));
    return std::nullopt;
  }
  if (text->size() > max_bytes) {
    fail(invalid_value_error(path_of(name), fmt::format("{} bytes; at most {}", text->size(), max_bytes)));
    return std::nullopt;
  }
  return std::string(text->data(), text->size());
}

const boost::json::array* Fields::array(std::string_view name, size_t max_items) {
  const boost::json::value* value = get(name);
  if (value == nullptr) return nullptr;
  const boost::json::array* items = value->if_array();
  if (items == nullptr) {
    fail(invalid_type_error(path_of(name), "an array", json_type_name(*value)));
    return nullptr;
  }
  if (items->size() > max_items) {
    fail(invalid_value_error(path_of(name), fmt::format("{} items; at most {}", items->size(), max_items)));
    return nullptr;
  }
  return items;
}

const boost::json::object* Fields::object(std::string_view name) {
  const boost::json::value* value = get(name);
  if (value == nullptr) return nullptr;
  const boost::json::object* members = value->if_object();
  if (members == nullptr) fail(invalid_type_error(path_of(name), "an object", json_type_name(*value)));
  return members;
}

std::optional<std::vector<uint32_t>> Fields::ids(std::string_view name, size_t max_items) {
  const boost::json::array* items = array(name, max_items);
  if (items == nullptr) return std::nullopt;
  ApiOr<std::vector<uint32_t>> ids = json_ids(*items, path_of(name));
  if (ids.ok()) return std::move(*ids);
  fail(ids.error());
  return std::nullopt;
}

void Fields::ignore(std::initializer_list<std::string_view> names) {
  known_.insert(known_.end(), names.begin(), names.end());
}

void Fields::refuse(std::string_view name, std::string_view why,
                    const std::function<bool(const boost::json::value&)>& harmless) {
  const boost::json::value* value = get(name);
  if (value == nullptr || (harmless && harmless(*value))) return;
  fail(unsupported_error(path_of(name), why));
}

std::optional<ApiError> Fields::finish() {
  if (error_) return error_;
  for (const auto& member : object_) {
    const std::string_view name(member.key().data(), member.key().size());
    if (std::find(known_.begin(), known_.end(), name) == known_.end()) {
      return unknown_field_error(path_of(name), nearest(name, known_));
    }
  }
  return std::nullopt;
}

}  // namespace tensorfold
