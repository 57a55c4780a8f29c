#include "worker/checkpoint/json_fields.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "worker/checkpoint/safetensors.h"

namespace tensorfold {
namespace {

boost::json::string_view key_view(std::string_view key) { return {key.data(), key.size()}; }

const boost::json::value* present(const boost::json::object* object, std::string_view key) {
  if (object == nullptr) return nullptr;
  const boost::json::value* value = object->if_contains(key_view(key));
  return value != nullptr && !value->is_null() ? value : nullptr;
}

}  // namespace

absl::StatusOr<std::string> read_text_file(const std::string& path, uint64_t max_bytes) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    const std::string message = fmt::format("{}: {}", path, std::strerror(error));
    return error == ENOENT ? absl::NotFoundError(message) : absl::InvalidArgumentError(message);
  }
  struct stat info {};
  absl::Status status;
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    status = absl::InvalidArgumentError(fmt::format("{}: not a regular file", path));
  } else if (static_cast<uint64_t>(info.st_size) > max_bytes) {
    status =
        absl::InvalidArgumentError(fmt::format("{}: {} bytes; allowed are at most {}", path, info.st_size, max_bytes));
  }
  std::string text(status.ok() ? static_cast<size_t>(info.st_size) : 0, '\0');
  size_t have = 0;
  while (status.ok() && have < text.size()) {
    const ssize_t got = ::read(fd, text.data() + have, text.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) status = absl::InvalidArgumentError(fmt::format("{}: reading: {}", path, std::strerror(errno)));
    if (got <= 0) break;
    have += static_cast<size_t>(got);
  }
  ::close(fd);
  if (!status.ok()) return status;
  text.resize(have);
  return text;
}

namespace {

// Python writes Infinity and NaN, which are not JSON, as bare words (nemotron_h's time_step_limit): each becomes the
// object {"__float__": "Infinity"} that newer files spell it as. What is in strings stays.
std::string spell_out_odd_numbers(std::string_view text) {
  std::string out;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') quoted = !quoted;
    if (quoted && c == '\\' && i + 1 < text.size()) {
      out += c;
      out += text[++i];
      continue;
    }
    bool found = false;
    for (const std::string_view word : {"-Infinity", "Infinity", "NaN"}) {
      if (quoted || found || text.substr(i, word.size()) != word) continue;
      out += fmt::format("{{\"__float__\":\"{}\"}}", word);
      i += word.size() - 1;
      found = true;
    }
    if (!found) out += c;
  }
  return out;
}

}  // namespace

absl::StatusOr<boost::json::object> parse_json_object(std::string_view text, const std::string& label) {
  boost::json::parse_options options;
  options.max_depth = 32;
  boost::system::error_code ec;
  std::string spelt;
  if (text.find("Infinity") != std::string_view::npos || text.find("NaN") != std::string_view::npos) {
    spelt = spell_out_odd_numbers(text);
    text = spelt;
  }
  boost::json::value value = boost::json::parse({text.data(), text.size()}, ec, {}, options);
  if (ec) return absl::InvalidArgumentError(fmt::format("{}: not JSON that is read here: {}", label, ec.message()));
  if (!value.is_object()) return absl::InvalidArgumentError(fmt::format("{}: not a JSON object", label));
  return std::move(value.as_object());
}

std::string json_text(const boost::json::value& value) {
  if (value.is_array() && value.as_array().size() > 16) {
    return fmt::format("a list of {} values", value.as_array().size());
  }
  if (value.is_object()) return fmt::format("an object of {} keys", value.as_object().size());
  if (value.is_double()) return fmt::format("{}", value.get_double());
  const std::string text = boost::json::serialize(value);
  return text.size() > 120 ? text.substr(0, 120) + "..." : text;
}

std::optional<int64_t> json_integer(const boost::json::value& value) {
  if (const int64_t* i = value.if_int64()) return *i;
  if (const double* d = value.if_double(); d != nullptr && std::fabs(*d) < 0x1p53 && std::trunc(*d) == *d) {
    return static_cast<int64_t>(*d);
  }
  return std::nullopt;
}

const boost::json::value* FieldReader::find(std::string_view key) const {
  const boost::json::value* value = present(inner_, key);
  return value != nullptr ? value : present(outer_, key);
}

std::string FieldReader::where(std::string_view key) const {
  const bool inner = inner_ != nullptr && (present(inner_, key) != nullptr || present(outer_, key) == nullptr);
  return fmt::format("{}: {}{}", label_, inner ? inner_name_ : "", key);
}

void FieldReader::fail(absl::Status status) {
  if (status_.ok()) status_ = std::move(status);
}
void FieldReader::refuse(std::string_view key, std::string_view allowed) {
  const boost::json::value* value = find(key);
  fail(absl::InvalidArgumentError(
      fmt::format("{} is {}; allowed: {}", where(key), value != nullptr ? json_text(*value) : "absent", allowed)));
}
void FieldReader::missing(std::string_view key, std::string_view allowed) {
  fail(absl::InvalidArgumentError(fmt::format("{} is missing; allowed: {}", where(key), allowed)));
}

int64_t FieldReader::integer(std::string_view key, int64_t low, int64_t high, std::optional<int64_t> fallback) {
  const std::string allowed = fmt::format("a whole number from {} to {}", low, high);
  const boost::json::value* value = find(key);
  if (value == nullptr) {
    if (!fallback) missing(key, allowed);
    return fallback.value_or(low);
  }
  const std::optional<int64_t> i = json_integer(*value);
  if (i && *i >= low && *i <= high) return *i;
  refuse(key, allowed);
  return low;
}

double FieldReader::number(std::string_view key, double low, double high, std::optional<double> fallback) {
  const std::string allowed = fmt::format("a number from {} to {}", low, high);
  const boost::json::value* value = find(key);
  if (value == nullptr) {
    if (!fallback) missing(key, allowed);
    return fallback.value_or(low);
  }
  double d = std::nan("");
  if (value->is_double()) d = value->get_double();
  if (value->is_int64()) d = static_cast<double>(value->get_int64());
  if (value->is_uint64()) d = static_cast<double>(value->get_uint64());
  if (d >= low && d <= high) return d;
  refuse(key, allowed);
  return low;
}

bool FieldReader::boolean(std::string_view key, bool fallback) {
  const boost::json::value* value = find(key);
  if (value == nullptr) return fallback;
  if (value->is_bool()) return value->get_bool();
  refuse(key, "true or false");
  return fallback;
}

std::string FieldReader::string(std::string_view key, std::string_view fallback) {
  const boost::json::value* value = find(key);
  if (value == nullptr) return std::string(fallback);
  if (value->is_string()) return std::string(value->get_string().data(), value->get_string().size());
  refuse(key, "a string");
  return std::string(fallback);
}

const boost::json::object* FieldReader::object(std::string_view key) {
  const boost::json::value* value = find(key);
  if (value == nullptr) return nullptr;
  if (!value->is_object()) refuse(key, "an object");
  return value->if_object();
}

std::vector<int64_t> FieldReader::integers(std::string_view key, int64_t low, int64_t high) {
  constexpr size_t kMost = 256;
  const std::string allowed = fmt::format("one or a list of at most {} whole numbers from {} to {}", kMost, low, high);
  std::vector<int64_t> out;
  const boost::json::value* value = find(key);
  if (value == nullptr) return out;
  const auto add = [&](const boost::json::value& item) {
    const std::optional<int64_t> i = json_integer(item);
    if (!i || *i < low || *i > high) return refuse(key, allowed);
    out.push_back(*i);
  };
  if (const boost::json::array* list = value->if_array()) {
    if (list->size() > kMost) {
      refuse(key, allowed);
      return out;
    }
    for (const boost::json::value& item : *list) add(item);
  } else {
    add(*value);
  }
  return out;
}

std::vector<std::string> FieldReader::strings(std::string_view key) {
  std::vector<std::string> out;
  const boost::json::value* value = find(key);
  if (value == nullptr) return out;
  const boost::json::array* list = value->if_array();
  if (list == nullptr) {
    refuse(key, "a list of strings");
    return out;
  }
  for (const boost::json::value& item : *list) {
    if (!item.is_string()) {
      refuse(key, "a list of strings");
      return out;
    }
    out.emplace_back(item.get_string().data(), item.get_string().size());
  }
  return out;
}

}  // namespace tensorfold
