#include "coordinator/api/json_writer.h"

#include <cmath>
#include <iterator>
#include <utility>

#include "fmt/format.h"

namespace tensorfold {

void JsonWriter::separate() {
  if (comma_) out_.push_back(',');
  comma_ = true;
}

JsonWriter& JsonWriter::open(char bracket) {
  separate();
  out_.push_back(bracket);
  comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::close(char bracket) {
  out_.push_back(bracket);
  comma_ = true;
  return *this;
}

JsonWriter& JsonWriter::key(std::string_view name) {
  string(name);
  out_.push_back(':');
  comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::string(std::string_view text) {
  separate();
  out_.push_back('"');
  for (size_t pos = 0; pos < text.size();) {
    const unsigned char c = static_cast<unsigned char>(text[pos]);
    if (c >= 0x80) {
      const size_t length = json_utf8_length(text, pos);
      if (length == 0) {
        out_.append("\xEF\xBF\xBD");
        ++pos;
      } else {
        out_.append(text, pos, length);
        pos += length;
      }
      continue;
    }
    ++pos;
    switch (c) {
      case '"':
        out_.append("\\\"");
        break;
      case '\\':
        out_.append("\\\\");
        break;
      case '\n':
        out_.append("\\n");
        break;
      case '\r':
        out_.append("\\r");
        break;
      case '\t':
        out_.append("\\t");
        break;
      default:
        if (c < 0x20 || c == 0x7F) {
          fmt::format_to(std::back_inserter(out_), "\\u{:04x}", c);
        } else {
          out_.push_back(static_cast<char>(c));
        }
    }
  }
  out_.push_back('"');
  return *this;
}

JsonWriter& JsonWriter::integer(int64_t value) {
  separate();
  fmt::format_to(std::back_inserter(out_), "{}", value);
  return *this;
}

JsonWriter& JsonWriter::unsigned_integer(uint64_t value) {
  separate();
  fmt::format_to(std::back_inserter(out_), "{}", value);
  return *this;
}

JsonWriter& JsonWriter::number(double value) {
  if (!std::isfinite(value)) return null();
  separate();
  fmt::format_to(std::back_inserter(out_), "{}", value);
  return *this;
}

JsonWriter& JsonWriter::boolean(bool value) {
  separate();
  out_.append(value ? "true" : "false");
  return *this;
}

JsonWriter& JsonWriter::null() {
  separate();
  out_.append("null");
  return *this;
}

JsonWriter& JsonWriter::ids(std::span<const uint32_t> ids) {
  begin_array();
  for (uint32_t id : ids) unsigned_integer(id);
  return end_array();
}

JsonWriter& JsonWriter::bytes(std::string_view bytes) {
  begin_array();
  for (char c : bytes) unsigned_integer(static_cast<unsigned char>(c));
  return end_array();
}

JsonWriter& JsonWriter::raw(std::string_view json) {
  separate();
  out_.append(json);
  return *this;
}

std::string JsonWriter::take() {
  comma_ = false;
  return std::exchange(out_, {});
}

size_t json_utf8_length(std::string_view text, size_t pos) {
  const auto at = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto tail = [&](size_t i) { return (at(i) & 0xC0u) == 0x80u; };
  const unsigned c = at(pos);
  if (pos >= text.size()) return 0;
  if (c < 0x80) return 1;
  if (c >= 0xC2 && c <= 0xDF) return tail(pos + 1) ? 2 : 0;
  if (c >= 0xE0 && c <= 0xEF) {
    const unsigned next = at(pos + 1);
    if (!tail(pos + 1) || !tail(pos + 2)) return 0;
    if ((c == 0xE0 && next < 0xA0) || (c == 0xED && next > 0x9F)) return 0;
    return 3;
  }
  if (c >= 0xF0 && c <= 0xF4) {
    const unsigned next = at(pos + 1);
    if (!tail(pos + 1) || !tail(pos + 2) || !tail(pos + 3)) return 0;
    if ((c == 0xF0 && next < 0x90) || (c == 0xF4 && next > 0x8F)) return 0;
    return 4;
  }
  return 0;
}

bool json_is_utf8(std::string_view text) {
  for (size_t pos = 0; pos < text.size();) {
    const size_t length = json_utf8_length(text, pos);
    if (length == 0) return false;
    pos += length;
  }
  return true;
}

}  // namespace tensorfold
