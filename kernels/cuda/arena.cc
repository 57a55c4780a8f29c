#include "kernels/cuda/arena.h"

#include <algorithm>

namespace tensorfold {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kDeviceBlock = int64_t{16} << 20;
constexpr int64_t kPinnedBlock = int64_t{4} << 20;
constexpr int64_t kPinnedReserve = int64_t{16} << 20;

int64_t aligned(int64_t bytes) { return std::max<int64_t>((bytes + kAlignment - 1) / kAlignment, 1) * kAlignment; }

// The place of `bytes` in the first block at or after `current` that has room; false if none has.
template <typename Block>
bool find_room(const std::vector<Block>& blocks, size_t* current, int64_t* used, int64_t bytes) {
  while (*current < blocks.size() && *used + bytes > blocks[*current].bytes) {
    ++*current;
    *used = 0;
  }
  return *current < blocks.size();
}

}  // namespace

DeviceArena::~DeviceArena() {
  for (const Block& block : blocks_) device_free(block.data);
}

void* DeviceArena::take(int64_t bytes) {
  bytes = aligned(bytes);
  if (!find_room(blocks_, &current_, &used_, bytes)) {
    Block block;
    block.bytes = std::max(bytes, kDeviceBlock);
    block.data = static_cast<std::byte*>(device_allocate(block.bytes, "scratch memory of a pass"));
    if (block.data == nullptr) return nullptr;
    total_ += block.bytes;
    blocks_.push_back(block);
    used_ = 0;
  }
  std::byte* at = blocks_[current_].data + used_;
  used_ += bytes;
  return at;
}

void DeviceArena::release(ScratchMark mark) {
  current_ = mark.block;
  used_ = mark.used;
}

PinnedArena::~PinnedArena() {
  for (const Block& block : blocks_) cudaFreeHost(block.data);
}

void* PinnedArena::take(int64_t bytes) {
  bytes = aligned(bytes);
  if (!find_room(blocks_, &current_, &used_, bytes)) {
    Block block;
    block.bytes = std::max(bytes, kPinnedBlock);
    if (!cuda_ok(cudaMallocHost(&block.data, static_cast<size_t>(block.bytes)), "pinned host memory")) return nullptr;
    blocks_.push_back(block);
    used_ = 0;
  }
  std::byte* at = blocks_[current_].data + used_;
  used_ += bytes;
  return at;
}

void PinnedArena::reserve() {
  take(kPinnedReserve);
  reset();
}

void PinnedArena::reset() {
  current_ = 0;
  used_ = 0;
}

}  // namespace tensorfold
