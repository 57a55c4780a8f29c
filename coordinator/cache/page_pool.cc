#include "coordinator/cache/page_pool.h"

namespace tensorfold {

PagePool::PagePool(int64_t pages) : refs_(static_cast<size_t>(pages), 0), cached_(static_cast<size_t>(pages), false) {
  for (int64_t page = pages - 1; page >= 0; --page) free_.push_back(static_cast<int32_t>(page));
}

bool PagePool::is_idle(int32_t page) const {
  return cached_[static_cast<size_t>(page)] && refs_[static_cast<size_t>(page)] == 1;
}

void PagePool::change(int32_t page, int by, bool cached) {
  const size_t index = static_cast<size_t>(page);
  idle_ -= is_idle(page) ? 1 : 0;
  refs_[index] += by;
  cached_[index] = cached;
  idle_ += is_idle(page) ? 1 : 0;
  if (refs_[index] == 0) free_.push_back(page);
}

std::vector<int32_t> PagePool::take(int64_t count) {
  if (count <= 0 || count > free_pages()) return {};
  std::vector<int32_t> taken(free_.end() - count, free_.end());
  free_.resize(free_.size() - static_cast<size_t>(count));
  for (const int32_t page : taken) refs_[static_cast<size_t>(page)] = 1;
  return taken;
}

void PagePool::hold(int32_t page) { change(page, 1, cached_[static_cast<size_t>(page)]); }
void PagePool::give_back(int32_t page) { change(page, -1, cached_[static_cast<size_t>(page)]); }
void PagePool::hold_cached(int32_t page) { change(page, 1, true); }
void PagePool::give_back_cached(int32_t page) { change(page, -1, false); }

}  // namespace tensorfold
