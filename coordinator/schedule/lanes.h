// Where sequences live on the ranks: a slot and KV pages each, taken when a sequence starts and given back when it
// ends. The same ids on every rank; rank 0 alone hands them out. Owned by the scheduler's thread.
#pragma once

#include <cstdint>
#include <vector>

#include "coordinator/api/generation.h"
#include "coordinator/schedule/page_pool.h"
#include "coordinator/schedule/sequence.h"

namespace tensorfold {

/// Pages that a request needs from its first pass to its longest reply's end.
int64_t pages_for(const GenerationRequest& request);

class Lanes {
 public:
  Lanes(int slots, int64_t pages);

  /// Gives the sequence a slot and all pages that its request may need; false when there are not enough of both.
  bool take(Sequence& sequence);
  /// The sequence's slot and pages are free again, the slot with the next plan; nothing if it has none.
  void give_back(Sequence& sequence);

  /// Whether `sequence` could have its lane if sequences that hold `slots` slots and `pages` pages gave theirs up.
  bool would_fit(const Sequence& sequence, int64_t slots, int64_t pages) const;

  /// Slots freed since the last call: the next plan tells the ranks.
  std::vector<uint32_t> take_released();
  /// The ranks start with empty slots.
  void forget_released() { released_.clear(); }

  int free_slots() const { return static_cast<int>(free_slots_.size()); }
  int64_t pages() const { return pool_.pages(); }
  int64_t free_pages() const { return pool_.free_pages(); }

 private:
  std::vector<uint32_t> free_slots_;
  std::vector<uint32_t> released_;
  PagePool pool_;
};

}  // namespace tensorfold
