// Aligned memory of the CPU backend: weights in large blocks, pass scratch, and caches that cost nothing until touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/ops/ops.h"

namespace tensorfold {

inline constexpr int64_t kAlignment = 64;
inline constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// A block of zeroed memory from the system, aligned to at least 64 bytes, with huge pages where that pays. Pages are
/// taken when first written. Running out ends the program with a message.
class MemoryBlock {
 public:
  explicit MemoryBlock(int64_t bytes);
  ~MemoryBlock();
  MemoryBlock(const MemoryBlock&) = delete;
  MemoryBlock& operator=(const MemoryBlock&) = delete;

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  float* floats() { return reinterpret_cast<float*>(data_); }
  const float* floats() const { return reinterpret_cast<const float*>(data_); }
  int64_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  int64_t mapped_ = 0;  // 0: from the heap
};

/// A piece of a block; keeps the block alive.
struct SharedSpan {
  std::shared_ptr<MemoryBlock> block;
  std::byte* data = nullptr;
  int64_t bytes = 0;
};

/// Hands out consecutive pieces of large blocks, so that weights packed one after another lie one after another
/// (hardware prefetch runs on) and share huge pages. Not thread-safe.
class BlockArena {
 public:
  SharedSpan take(int64_t bytes);

 private:
  std::shared_ptr<MemoryBlock> block_;
  int64_t used_ = 0;
};

/// Scratch of one pass: grows, never moves what it has given out, starts again at reset(). Not thread-safe.
class ScratchArena {
 public:
  float* take(int64_t floats);
  void reset() { release({}); }
  ScratchMark mark() const { return {current_, used_}; }
  /// What was given out since the mark may be given out again.
  void release(ScratchMark mark);

 private:
  std::vector<std::unique_ptr<MemoryBlock>> blocks_;
  size_t current_ = 0;
  int64_t used_ = 0;
};

}  // namespace tensorfold
