// The KV pages of the cluster: rank 0 alone hands them out, every rank has the same ids. Owned by the scheduler's
// thread.
#pragma once

#include <cstdint>
#include <vector>

namespace tensorfold {

class PagePool {
 public:
  explicit PagePool(int64_t pages) : pages_(pages) {
    for (int64_t page = pages - 1; page >= 0; --page) free_.push_back(static_cast<int32_t>(page));
  }
  int64_t pages() const { return pages_; }
  int64_t free_pages() const { return static_cast<int64_t>(free_.size()); }
  /// `count` pages, or none if fewer are free.
  std::vector<int32_t> take(int64_t count) {
    if (count > free_pages()) return {};
    std::vector<int32_t> taken(free_.end() - count, free_.end());
    free_.resize(free_.size() - static_cast<size_t>(count));
    return taken;
  }
  void give_back(const std::vector<int32_t>& pages) { free_.insert(free_.end(), pages.begin(), pages.end()); }

 private:
  int64_t pages_;
  std::vector<int32_t> free_;
};

}  // namespace tensorfold
