// How often each token occurs in one sequence's own history: what penalties read.
//
// Kept incrementally. Before the k-th row of a verify window is sampled, the drafts before it are pushed, and popped
// again when they are rejected, so that every row sees exactly the history it would have had serially. One owner, not
// thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace tensorfold {

class TokenCounts {
 public:
  struct Count {
    uint32_t total = 0;  // prompt and reply
    uint32_t reply = 0;  // reply alone
  };
  using Map = absl::flat_hash_map<uint32_t, Count>;

  TokenCounts() = default;
  explicit TokenCounts(std::span<const uint32_t> prompt) { add_prompt(prompt); }

  void add_prompt(std::span<const uint32_t> ids);  // may come in chunks, before the first push
  void push(uint32_t id);                          // the next reply token, or a draft about to be evaluated
  void pop();                                      // takes the latest push back; without one it does nothing
  void pop_to(size_t reply_size);                  // pops until `reply_size` reply tokens are left

  size_t reply_size() const { return reply_.size(); }
  Count of(uint32_t id) const;
  // Every token with total > 0; the order means nothing.
  const Map& counts() const { return counts_; }

 private:
  Map counts_;
  std::vector<uint32_t> reply_;
};

}  // namespace tensorfold
