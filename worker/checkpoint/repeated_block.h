// A short block of memory that reads as a long one: its pages are mapped again and again, end to end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "absl/status/statusor.h"

namespace tensorfold {

/// Thread-safety: read-only once it is made. Unmaps when it dies.
class RepeatedBlock {
 public:
  /// `block_bytes` of memory, filled once by `fill`, readable as `length` bytes in which it repeats. `block_bytes` is a
  /// multiple of the page size. ResourceExhausted when the system gives no memory or address space.
  static absl::StatusOr<std::unique_ptr<RepeatedBlock>> create(size_t block_bytes, size_t length,
                                                               const std::function<void(std::span<std::byte>)>& fill);
  ~RepeatedBlock();
  RepeatedBlock(const RepeatedBlock&) = delete;
  RepeatedBlock& operator=(const RepeatedBlock&) = delete;

  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(base_), length_}; }

 private:
  RepeatedBlock(void* base, size_t length) : base_(base), length_(length) {}

  void* base_;
  size_t length_;
};

}  // namespace tensorfold
