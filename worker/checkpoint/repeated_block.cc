#include "worker/checkpoint/repeated_block.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace tensorfold {
namespace {

absl::Status no_memory(const char* what, size_t bytes) {
  return absl::ResourceExhaustedError(
      fmt::format("{} of {} bytes for random weights: {}", what, bytes, std::strerror(errno)));
}

// Closes on every path: the mappings keep the memory.
struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<RepeatedBlock>> RepeatedBlock::create(
    size_t block_bytes, size_t length, const std::function<void(std::span<std::byte>)>& fill) {
  const Descriptor memory{memfd_create("tensorfold-weights", MFD_CLOEXEC)};
  if (memory.fd < 0 || ftruncate(memory.fd, static_cast<off_t>(block_bytes)) != 0) {
    return no_memory("no memory block", block_bytes);
  }
  void* const block = mmap(nullptr, block_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd, 0);
  if (block == MAP_FAILED) return no_memory("no memory block", block_bytes);
  fill({static_cast<std::byte*>(block), block_bytes});
  munmap(block, block_bytes);

  const size_t whole = std::max(length, size_t{1});
  void* const base = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return no_memory("no address space", whole);
  std::unique_ptr<RepeatedBlock> out(new RepeatedBlock(base, whole));
  for (size_t at = 0; at < whole; at += block_bytes) {
    const size_t part = std::min(block_bytes, whole - at);
    void* const where = static_cast<std::byte*>(base) + at;
    if (mmap(where, part, PROT_READ, MAP_SHARED | MAP_FIXED, memory.fd, 0) == MAP_FAILED) {
      return no_memory("no mapping", whole);
    }
  }
  return out;
}

RepeatedBlock::~RepeatedBlock() { munmap(base_, length_); }

}  // namespace tensorfold
