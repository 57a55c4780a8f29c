// Replaces operator new of the test program to see how much is asked for at once.
#include <atomic>

#include "tests/wire/wire_testing.h"

namespace {
std::atomic<size_t> largest{0};

void* allocate(size_t size) {
  size_t seen = largest.load(std::memory_order_relaxed);
  while (size > seen && !largest.compare_exchange_weak(seen, size, std::memory_order_relaxed)) {
  }
  void* const memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) std::abort();
  return memory;
}
}  // namespace

void* operator new(size_t size) { return allocate(size); }
void* operator new[](size_t size) { return allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace tensorfold {

size_t largest_allocation() { return largest.load(); }
void reset_largest_allocation() { largest.store(0); }

}  // namespace tensorfold
