// Little-endian writer and bounded reader for wire messages. The reader never reads past its bytes: after the first
// failure every further read returns zero and ok() is false.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace tensorfold {

static_assert(std::endian::native == std::endian::little, "wire messages are written as the machine's own bytes");

class ByteWriter {
 public:
  template <typename T>
  void put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    append(&value, sizeof value);
  }
  template <typename T>
  void put_array(std::span<const T> values) {
    put(static_cast<uint32_t>(values.size()));
    append(values.data(), values.size_bytes());
  }
  void put_string(const std::string& text) { put_array(std::span<const char>(text.data(), text.size())); }
  std::vector<std::byte>& bytes() { return bytes_; }

 private:
  void append(const void* data, size_t size) {
    if (size == 0) return;
    const size_t at = bytes_.size();
    bytes_.resize(at + size);
    std::memcpy(bytes_.data() + at, data, size);
  }
  std::vector<std::byte> bytes_;
};

class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  T get() {
    T value{};
    take(&value, sizeof value);
    return value;
  }
  /// An array of at most `limit` elements; its length is checked against the bytes that are left before allocating.
  template <typename T>
  std::vector<T> get_array(size_t limit) {
    const uint32_t count = get<uint32_t>();
    if (!ok_ || count > limit || count > left() / sizeof(T)) {
      ok_ = false;
      return {};
    }
    std::vector<T> values(count);
    take(values.data(), values.size() * sizeof(T));
    return values;
  }
  std::string get_string(size_t limit) {
    const std::vector<char> chars = get_array<char>(limit);
    return std::string(chars.begin(), chars.end());
  }
  /// What was read makes no sense: as if the bytes had ended.
  void fail() { ok_ = false; }
  bool ok() const { return ok_; }
  size_t left() const { return bytes_.size() - at_; }

 private:
  void take(void* out, size_t size) {
    if (!ok_ || size > left()) {
      ok_ = false;
      return;
    }
    if (size != 0) std::memcpy(out, bytes_.data() + at_, size);
    at_ += size;
  }
  std::span<const std::byte> bytes_;
  size_t at_ = 0;
  bool ok_ = true;
};

}  // namespace tensorfold
