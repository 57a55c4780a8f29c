// Device memory that a pass takes and gives back, and pinned host memory on its way to the device.
#pragma once

#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/ops/ops.h"

namespace tensorfold {

/// Scratch in device memory: grows, never moves what it has given out. Reuse is safe in the order of one stream. Not
/// thread-safe.
class DeviceArena {
 public:
  DeviceArena() = default;
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;
  ~DeviceArena();

  /// 256-byte aligned; null (and cuda_failure() set) when the device has no memory left.
  void* take(int64_t bytes);
  ScratchMark mark() const { return {current_, used_}; }
  void release(ScratchMark mark);
  int64_t bytes() const { return total_; }

 private:
  struct Block {
    std::byte* data = nullptr;
    int64_t bytes = 0;
  };
  std::vector<Block> blocks_;
  size_t current_ = 0;
  int64_t used_ = 0;
  int64_t total_ = 0;
};

/// Pinned host memory, given out piece by piece until reset(), which may only be called when no copy is under way.
class PinnedArena {
 public:
  PinnedArena() = default;
  PinnedArena(const PinnedArena&) = delete;
  PinnedArena& operator=(const PinnedArena&) = delete;
  ~PinnedArena();

  void* take(int64_t bytes);
  void reset();
  /// Takes the memory of an ordinary pass from the system. Pinned memory is mapped into every GPU of the process, and
  /// for that their work has to end: a rank that takes it when another already waits in an exchange would wait for one
  /// that waits for it.
  void reserve();

 private:
  struct Block {
    std::byte* data = nullptr;
    int64_t bytes = 0;
  };
  std::vector<Block> blocks_;
  size_t current_ = 0;
  int64_t used_ = 0;
};

}  // namespace tensorfold
