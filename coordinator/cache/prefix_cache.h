// The prefix cache: what sequences have computed is kept and used again by those that begin with the same tokens.
//
// A sequence starts at the longest prefix that is there: at any token where a model's pages hold everything, at any
// position that a snapshot reaches where it has recurrent states. Whole pages are shared by reference; the page that it
// goes on writing is a copy of its own. What it had is given to the tree when it ends: prompt and reply alike, with a
// snapshot of its end.
//
// Decides and remembers; the ranks do what take_orders() says in the next plan. Owned by the scheduler's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "coordinator/cache/page_pool.h"
#include "coordinator/cache/prefix_tree.h"
#include "coordinator/cache/state_keeper.h"
#include "transport/pass/state_orders.h"

namespace tensorfold {

struct CacheOptions {
  bool enabled = true;
  bool has_states = false;          // the model has recurrent states: pages alone are no state
  bool has_mtp = false;             // sequences may use an MTP layer, which keeps hidden rows
  int64_t snapshots = 0;            // that the ranks can hold
  uint64_t snapshot_tokens = 2048;  // prompts leave a snapshot every so many tokens; a multiple of kPageSize, 0: none
};

/// What the cache did, since the start.
struct CacheCounters {
  uint64_t hits = 0;  // sequences that started at a later position
  uint64_t hit_tokens = 0;
  uint64_t misses = 0;
  uint64_t evicted_pages = 0;
  uint64_t evicted_snapshots = 0;
  uint64_t refusals = 0;  // snapshots that were not taken and prefixes not used for want of memory
};

/// Where a sequence starts, and with what. Held for it until started() or given back by abandon().
struct CacheStart {
  uint64_t position = 0;       // tokens that are not computed again
  uint32_t accepted = 0;       // of them, kept rows of the snapshot
  std::vector<int32_t> pages;  // of the whole request, the shared ones first
  PrefixSnapshot* snapshot = nullptr;
  uint32_t snapshot_id() const { return snapshot == nullptr ? kNoSnapshot : snapshot->id; }
};

class PrefixCache : private StateHost {
 public:
  PrefixCache(PagePool& pool, CacheOptions options);
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  /// Pages for a sequence of `tokens` that may need `pages` of them; none if there are not enough, whatever is
  /// forgotten. At least the last token is left to compute. `use` false: starts at 0 on pages of its own.
  std::optional<CacheStart> start(std::span<const uint32_t> tokens, int64_t pages, bool mtp, bool use);
  /// How many of `tokens` start() would find; uses nothing.
  uint64_t peek(std::span<const uint32_t> tokens, bool mtp) {
    return options_.enabled ? match(tokens, mtp).position : 0;
  }
  /// The sequence's first pass has run, or never will: its snapshot may go.
  void started(PrefixSnapshot* snapshot);

  /// A sequence that started on `pages` ends without a pass: nothing is copied for it.
  void abandon(std::span<const int32_t> pages);

  /// A prompt of `prompt` tokens has been read up to `computed` in `slot`: its whole pages are there for others, and a
  /// snapshot if this is a place for one.
  void grown(std::span<const uint32_t> tokens, uint64_t prompt, uint64_t computed, std::span<const int32_t> pages,
             uint32_t slot, bool mtp);
  /// The sequence in `slot` ends, is cancelled or gives up its lane: `computed` tokens, the last `accepted` of them
  /// tentative rows of its last window. Its slot is released by the next plan, with the orders of take_orders().
  void ended(std::span<const uint32_t> tokens, uint64_t computed, uint32_t accepted, std::span<const int32_t> pages,
             uint32_t slot, bool mtp);
  /// The next position after `computed` where a prompt's rows should stop for a snapshot; `prompt` if there is none.
  uint64_t next_stop(uint64_t prompt, uint64_t computed) const;

  /// For the next plan, which also releases the slots of sequences that ended.
  StateOrders take_orders();
  /// The ranks have nothing any more.
  void clear();

  /// What lies on disk; enabled by open().
  StateKeeper& states() { return states_; }
  const StateKeeper& states() const { return states_; }
  const CacheOptions& options() const { return options_; }
  const CacheCounters& counters() const { return counters_; }
  int64_t cached_pages() const { return tree_.nodes(); }
  int64_t snapshots() const { return tree_.snapshots(); }

 private:
  struct Match {
    uint64_t position = 0;
    uint32_t accepted = 0;
    PrefixSnapshot* snapshot = nullptr;
    uint64_t writes_from = 0;  // first position that is written again
    std::vector<PrefixNode*> nodes;
  };
  Match match(std::span<const uint32_t> tokens, bool mtp);
  bool make_room(int64_t pages);
  void drop(PrefixSnapshot* snapshot);
  std::vector<int32_t> pages_for_state(int64_t count) override;
  std::optional<uint32_t> number_for_state() override { return snapshot_number(); }
  void give_number_back(uint32_t id) override { free_snapshots_.push_back(id); }
  void adopt(std::span<const uint32_t> tokens, std::span<const int32_t> pages, const StoredSegment& last,
             std::optional<uint32_t> snapshot) override;
  PrefixSnapshot* take_snapshot(PrefixNode* node, uint32_t slot, uint64_t committed, std::span<const uint32_t> kept,
                                bool mtp);
  std::optional<uint32_t> snapshot_number();

  PagePool& pool_;
  const CacheOptions options_;
  PrefixTree tree_;
  StateKeeper states_;
  std::vector<uint32_t> free_snapshots_;
  StateOrders orders_;
  std::vector<int32_t> held_;  // pages that pending copies read
  CacheCounters counters_;
};

}  // namespace tensorfold
