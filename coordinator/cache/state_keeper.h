// States on disk, as rank 0 sees them: which there are, which are written when, and which are brought back for whom.
//
// A chain of tokens lies on disk as segments of kMaxSegmentTokens, the last one shorter; each names the one before it
// by its key, which is a hash of the fingerprint and all tokens so far. So conversations share their beginnings, and
// what a turn adds is all that is written for it. Every rank has a file of each segment; rank 0's own folder says what
// there is, and a state of which any rank's file is missing or damaged is not used but computed again.
//
// Owned by the scheduler's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "coordinator/cache/page_pool.h"
#include "coordinator/cache/prefix_tree.h"
#include "transport/pass/state_orders.h"

namespace tensorfold {

/// A segment on disk.
struct StoredSegment {
  StateKey key;
  StateKey parent;
  uint64_t first_position = 0;
  std::vector<uint32_t> tokens;
  bool mtp = false;
  uint64_t committed = 0;  // of its snapshot; 0: none
  std::vector<uint32_t> kept;
  uint64_t bytes = 0;              // on rank 0; 0: not known
  std::vector<std::string> names;  // of pinned contexts that it belongs to
  uint64_t end() const { return first_position + tokens.size(); }
};

struct StateOptions {
  bool enabled = false;
  std::string fingerprint;
  uint64_t min_tokens = 1024;
  bool has_states = false;  // the model has recurrent states
};

struct StateCounters {
  uint64_t saved = 0;  // segments
  uint64_t save_failures = 0;
  uint64_t restored = 0;
  uint64_t restore_failures = 0;
  uint64_t refusals = 0;  // segments not written because too many waited
};

/// What the keeper wants of the cache in memory.
class StateHost {
 public:
  virtual ~StateHost() = default;
  /// Pages held once, or none if there are not enough.
  virtual std::vector<int32_t> pages_for_state(int64_t count) = 0;
  /// A free snapshot number, if there is one.
  virtual std::optional<uint32_t> number_for_state() = 0;
  virtual void give_number_back(uint32_t id) = 0;
  /// Pages of a chain from 0 to its end, the last of them placed just now, are there for everybody.
  virtual void adopt(std::span<const uint32_t> tokens, std::span<const int32_t> pages, const StoredSegment& last,
                     std::optional<uint32_t> snapshot) = 0;
};

class StateKeeper {
 public:
  StateKeeper(PagePool& pool, PrefixTree& tree, StateHost& host) : pool_(pool), tree_(tree), host_(host) {}

  /// `stored`: what rank 0 found on its disk.
  void open(StateOptions options, std::vector<StoredSegment> stored, int world);
  bool enabled() const { return options_.enabled; }

  /// A chain that ends at `tokens`' end, with a snapshot there where the model has states, is worth keeping.
  void keep(std::span<const uint32_t> tokens, const std::vector<PrefixNode*>& nodes, bool mtp,
            PrefixSnapshot* snapshot);
  /// Begins to bring back what the disk has of `tokens` beyond `in_memory` of them; 0: nothing worth it.
  uint64_t restore(std::span<const uint32_t> tokens, uint64_t in_memory, bool mtp);
  /// Begins to bring back everything that is pinned. Returns how many chains.
  size_t restore_pinned();
  bool restoring(uint64_t job) const { return jobs_.count(job) > 0; }
  /// No more can be brought back at the same time: what waits for its state waits on.
  bool full() const { return jobs_.size() >= kMostJobs; }
  /// Passes should come at once; or soon.
  bool urgent() const { return !jobs_.empty(); }
  bool pending() const { return urgent() || !saves_.empty() || !tickets_.empty() || !orders_.empty(); }

  /// Segments that are not on all ranks' disks yet, though they are worth it.
  size_t unwritten() const { return writing_.size(); }

  /// Adds what the next plan orders.
  void add_orders(StateOrders* orders);
  /// What a rank reported. Each rank reports each ticket once.
  void take_events(std::span<const StateEvent> events);
  /// The ranks have lost what they had in memory, and what was on its way.
  void clear();

  std::vector<StoredSegment> list() const;
  /// Pins the chain that ends with `key` under `name`, or takes a name off, or removes the segment and all that hang on
  /// it. False: there is no such thing.
  bool pin(const StateKey& key, const std::string& name);
  bool unpin(const std::string& name);
  bool drop(const StateKey& key);

  const StateCounters& counters() const { return counters_; }
  size_t segments() const { return segments_.size(); }

 private:
  static constexpr size_t kMostJobs = 4;
  struct Save {
    SaveOrder order;
    PrefixSnapshot* snapshot = nullptr;
  };
  struct Job {
    std::vector<StateKey> chain;
    size_t at = 0;
    std::vector<uint32_t> tokens;  // of the chain
    std::vector<int32_t> pages;    // being placed
    std::optional<uint32_t> snapshot;
  };
  struct Ticket {
    int left = 0;  // ranks that have not answered
    bool ok = true;
    std::function<void(bool)> ended;
  };
  struct Found {
    std::vector<StateKey> chain;
    uint64_t position = 0;
  };
  Found find(std::span<const uint32_t> tokens, bool mtp) const;
  uint64_t begin(std::vector<StateKey> chain, uint64_t in_memory);
  void fetch(uint64_t id);
  void place(uint64_t id, bool fetched, uint64_t ticket);
  void placed(uint64_t id, bool ok);
  void give_up(uint64_t id);
  uint64_t new_ticket(std::function<void(bool)> ended);
  void release(Save& save);
  void add(StoredSegment segment);
  void remove(const StateKey& key);
  std::vector<StateKey> chain_of(const StateKey& key) const;
  std::vector<StateKey> with_descendants(const StateKey& key) const;
  LoadOrder order_for(LoadStep step, const StateKey& key, const std::string& name) const;

  PagePool& pool_;
  PrefixTree& tree_;
  StateHost& host_;
  StateOptions options_;
  int world_ = 1;
  std::map<StateKey, StoredSegment> segments_;
  std::multimap<StateKey, StateKey> by_parent_;
  std::deque<Save> saves_;      // that wait for a plan
  std::vector<Save> copying_;   // of the plan in flight
  std::set<StateKey> writing_;  // what is in either, or on its way to the disk
  std::map<uint64_t, Ticket> tickets_;
  std::map<uint64_t, Job> jobs_;
  uint64_t next_ticket_ = 1;
  uint64_t next_job_ = 1;
  std::vector<LoadOrder> orders_;
  StateCounters counters_;
};

}  // namespace tensorfold
