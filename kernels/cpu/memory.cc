#include "kernels/cpu/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/numerics/check.h"

namespace tensorfold {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kWeightBlock = int64_t{32} << 20;
constexpr int64_t kScratchBlock = int64_t{4} << 20;

}  // namespace

MemoryBlock::MemoryBlock(int64_t bytes) : bytes_(bytes) {
  kernel_check(bytes >= 0, "negative allocation");
  if (bytes < kHugePage) {
    const int64_t padded = std::max(round_up(bytes, kAlignment), kAlignment);
    data_ = static_cast<std::byte*>(std::aligned_alloc(kAlignment, static_cast<size_t>(padded)));
    kernel_check(data_ != nullptr, "out of memory");
    std::memset(data_, 0, static_cast<size_t>(padded));
    return;
  }
  mapped_ = round_up(bytes, kHugePage);
  void* mapping = mmap(nullptr, static_cast<size_t>(mapped_), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  kernel_check(mapping != MAP_FAILED, "out of memory");
  data_ = static_cast<std::byte*>(mapping);
  madvise(mapping, static_cast<size_t>(mapped_), MADV_HUGEPAGE);  // only a hint
}

MemoryBlock::~MemoryBlock() {
  if (mapped_ != 0) {
    munmap(data_, static_cast<size_t>(mapped_));
  } else {
    std::free(data_);
  }
}

SharedSpan BlockArena::take(int64_t bytes) {
  bytes = round_up(bytes, kAlignment);
  if (bytes > kWeightBlock / 4) {
    auto own = std::make_shared<MemoryBlock>(bytes);
    return {own, own->data(), bytes};
  }
  if (block_ == nullptr || used_ + bytes > block_->size()) {
    block_ = std::make_shared<MemoryBlock>(kWeightBlock);
    used_ = 0;
  }
  SharedSpan span{block_, block_->data() + used_, bytes};
  used_ += bytes;
  return span;
}

float* ScratchArena::take(int64_t floats) {
  const int64_t bytes = std::max(round_up(floats * 4, kAlignment), kAlignment);
  while (current_ < blocks_.size() && used_ + bytes > blocks_[current_]->size()) {
    ++current_;
    used_ = 0;
  }
  if (current_ == blocks_.size()) {
    blocks_.push_back(std::make_unique<MemoryBlock>(std::max(bytes, kScratchBlock)));
    used_ = 0;
  }
  float* at = reinterpret_cast<float*>(blocks_[current_]->data() + used_);
  used_ += bytes;
  return at;
}

void ScratchArena::release(ScratchMark mark) {
  current_ = mark.block;
  used_ = mark.used;
}

}  // namespace tensorfold
