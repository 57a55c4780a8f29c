// Writes JSON text, in the order that members are given. What it returns is valid JSON in valid UTF-8 whatever goes in:
// ill-formed bytes become U+FFFD, numbers that JSON cannot express become null. Used like a stream; one owner, not
// thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tensorfold {

class JsonWriter {
 public:
  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }
  JsonWriter& key(std::string_view name);

  JsonWriter& string(std::string_view text);
  JsonWriter& integer(int64_t value);
  JsonWriter& unsigned_integer(uint64_t value);
  JsonWriter& number(double value);  // shortest form that reads back as the same double
  JsonWriter& boolean(bool value);
  JsonWriter& null();
  JsonWriter& ids(std::span<const uint32_t> ids);  // an array
  JsonWriter& bytes(std::string_view bytes);       // an array of 0..255
  JsonWriter& raw(std::string_view json);          // must be one valid JSON value

  JsonWriter& field(std::string_view name, std::string_view text) { return key(name).string(text); }
  JsonWriter& field(std::string_view name, const char* text) { return key(name).string(text); }
  JsonWriter& field(std::string_view name, const std::string& text) { return key(name).string(text); }
  JsonWriter& field(std::string_view name, double value) { return key(name).number(value); }
  JsonWriter& field(std::string_view name, int64_t value) { return key(name).integer(value); }
  JsonWriter& field(std::string_view name, uint64_t value) { return key(name).unsigned_integer(value); }
  JsonWriter& field(std::string_view name, uint32_t value) { return key(name).unsigned_integer(value); }
  JsonWriter& field(std::string_view name, bool value) { return key(name).boolean(value); }

  // The text so far; the writer is empty afterwards.
  std::string take();

 private:
  JsonWriter& open(char bracket);
  JsonWriter& close(char bracket);
  void separate();

  std::string out_;
  bool comma_ = false;  // the next value or key needs one
};

// The length of the well-formed UTF-8 sequence at `pos`, or 0. No overlong forms, surrogates, or code points past
// U+10FFFF.
size_t json_utf8_length(std::string_view text, size_t pos);
bool json_is_utf8(std::string_view text);

}  // namespace tensorfold
