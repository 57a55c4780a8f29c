// The pages of the cluster with their reference counts: rank 0 alone hands them out, every rank has the same ids. A
// page is held by sequences, by the prefix tree, or by both; it is free when nobody holds it. Owned by the scheduler's
// thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tensorfold {

inline constexpr int64_t kPageSize = 64;  // tokens

class PagePool {
 public:
  explicit PagePool(int64_t pages);

  int64_t pages() const { return static_cast<int64_t>(refs_.size()); }
  int64_t free_pages() const { return static_cast<int64_t>(free_.size()); }
  /// Pages that nobody but the tree holds: they can be had by forgetting what is in them.
  int64_t idle_pages() const { return idle_; }
  int refs(int32_t page) const { return refs_[static_cast<size_t>(page)]; }

  /// `count` pages, each held once, or none if fewer are free.
  std::vector<int32_t> take(int64_t count);
  void hold(int32_t page);
  void give_back(int32_t page);
  void give_back(std::span<const int32_t> pages) {
    for (const int32_t page : pages) give_back(page);
  }
  /// The tree's own hold of a page: one at most.
  void hold_cached(int32_t page);
  void give_back_cached(int32_t page);

 private:
  void change(int32_t page, int by, bool cached);
  bool is_idle(int32_t page) const;

  std::vector<int32_t> free_;
  std::vector<int> refs_;
  std::vector<bool> cached_;
  int64_t idle_ = 0;
};

}  // namespace tensorfold
