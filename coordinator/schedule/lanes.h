// Where sequences live on the ranks: a slot and KV pages each, taken when a sequence starts and given back when it
// ends. The same ids on every rank; rank 0 alone hands them out. Owned by the scheduler's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "coordinator/api/generation.h"
#include "coordinator/cache/prefix_cache.h"
#include "coordinator/schedule/sequence.h"

namespace tensorfold {

/// Pages that a request needs from its first pass to its longest reply's end.
int64_t pages_for(const GenerationRequest& request);

class Lanes {
 public:
  Lanes(int slots, int64_t pages, const CacheOptions& cache);

  /// Gives the sequence a slot and all pages that its request may need, some of them perhaps with what the cache has of
  /// its tokens; false when there are not enough of both. The sequence starts anew.
  bool take(Sequence& sequence);
  /// Whether what the disk has of the sequence's tokens is on its way. Begins to bring it when first asked.
  bool waits_for_state(Sequence& sequence);
  /// A pass of the sequence's rows has run.
  void advanced(Sequence& sequence);
  /// The sequence's slot and pages are free again, the slot with the next plan; nothing if it has none. What it has
  /// computed is left to the cache.
  void give_back(Sequence& sequence);

  /// What the next plan tells the ranks: slots freed, snapshots, copies. Always together: a snapshot of a freed slot is
  /// taken before it is freed.
  void order(PassPlan* plan);
  /// A pass failed: what the ranks have is unknown, and they will start with nothing. All of `active` lose their lanes.
  void lost(const std::vector<std::unique_ptr<Sequence>>& active);

  /// Whether `sequence` could have its lane if sequences that hold `slots` slots and `pages` pages gave theirs up.
  bool would_fit(const Sequence& sequence, int64_t slots, int64_t pages) const;

  int free_slots() const { return static_cast<int>(free_slots_.size()); }
  int64_t pages() const { return pool_.pages(); }
  /// Pages that a sequence can have, those included that only the cache holds.
  int64_t free_pages() const { return pool_.free_pages() + pool_.idle_pages(); }
  PrefixCache& cache() { return cache_; }
  const PrefixCache& cache() const { return cache_; }

 private:
  std::vector<uint32_t> free_slots_;
  std::vector<uint32_t> released_;
  void free_lane(Sequence& sequence);

  PagePool pool_;
  PrefixCache cache_;
};

}  // namespace tensorfold
