// What has been computed, by its tokens: a tree whose nodes are pages and whose edges are the tokens in them, with
// snapshots of recurrent states at some positions. Only bookkeeping: the bits lie on the ranks.
//
// Because a row's bits are a function of its own history alone, two pages that hold the same tokens after the same
// tokens hold the same bits, whoever computed them, in a prompt or in a reply; so pages of a node can be swapped, and a
// page that holds more tokens takes the place of one that holds fewer. The exception are the MTP layer's keys: the last
// one of a chain depends on the token after it, and a sequence that was not drafted for has none. Whoever goes on at
// some position writes the MTP key before it again, on a page of its own (PrefixCache), and nodes know whether the MTP
// layer's keys are there.
//
// Owned by the scheduler's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "coordinator/cache/page_pool.h"

namespace tensorfold {

struct PrefixNode;

/// A snapshot on the ranks. It was taken where `committed` tokens were committed; `kept` are the tentative tokens after
/// them that the sequence accepted, so that it can go on anywhere in [committed, committed + kept].
struct PrefixSnapshot {
  uint32_t id = 0;
  uint64_t committed = 0;
  std::vector<uint32_t> kept;
  bool mtp = false;            // hidden rows for the MTP layer are in it
  int users = 0;               // sequences that are about to start from it
  PrefixNode* node = nullptr;  // holds position committed - 1
  uint64_t used = 0;
};

/// A page of tokens: kPageSize of them, or fewer at the end of a chain.
struct PrefixNode {
  int32_t page = -1;
  bool mtp = false;
  std::vector<uint32_t> tokens;
  PrefixNode* parent = nullptr;
  std::vector<std::unique_ptr<PrefixNode>> children;
  std::vector<std::unique_ptr<PrefixSnapshot>> snapshots;
  uint64_t used = 0;
};

class PrefixTree {
 public:
  explicit PrefixTree(PagePool& pool) : pool_(pool) {}

  struct Path {
    std::vector<PrefixNode*> nodes;  // the last one may match only in part
    uint64_t tokens = 0;             // that match
  };
  /// The longest chain that agrees with `tokens`; `mtp`: whose pages have the MTP layer's keys.
  Path find(std::span<const uint32_t> tokens, bool mtp) const;
  /// Adds what is new of a chain on `pages`, which the tree then holds, and returns its nodes. `tokens` may end inside
  /// a page.
  std::vector<PrefixNode*> insert(std::span<const uint32_t> tokens, std::span<const int32_t> pages, bool mtp);
  /// Marks a chain as used now.
  void touch(const std::vector<PrefixNode*>& nodes);

  PrefixSnapshot* add_snapshot(PrefixNode* node, PrefixSnapshot snapshot);
  void touch(PrefixSnapshot* snapshot);
  /// The least recently used one that nobody is about to use; null: there is none.
  PrefixSnapshot* oldest_snapshot() const;
  void remove(PrefixSnapshot* snapshot);

  /// The least recently used end of a chain whose page nobody else holds and whose snapshots nobody is about to use.
  PrefixNode* oldest_leaf() const;
  /// Takes a leaf out and gives its page back; its snapshots must have been removed.
  void remove(PrefixNode* leaf);
  /// Gives all pages back.
  void clear();

  int64_t nodes() const { return nodes_; }
  int64_t snapshots() const { return static_cast<int64_t>(by_use_.size()); }

 private:
  struct NodeOrder {
    bool operator()(const PrefixNode* a, const PrefixNode* b) const;
  };
  struct SnapshotOrder {
    bool operator()(const PrefixSnapshot* a, const PrefixSnapshot* b) const;
  };
  PrefixNode* find_child(const PrefixNode& node, std::span<const uint32_t> tokens, size_t* common) const;
  PrefixNode* add_child(PrefixNode& parent, std::span<const uint32_t> tokens, int32_t page, bool mtp);
  void swap_page(PrefixNode& node, std::span<const uint32_t> tokens, int32_t page, bool mtp);
  void use(PrefixNode* node);

  PagePool& pool_;
  PrefixNode root_;
  uint64_t clock_ = 0;
  int64_t nodes_ = 0;
  std::set<PrefixNode*, NodeOrder> leaves_;
  std::set<PrefixSnapshot*, SnapshotOrder> by_use_;
};

}  // namespace tensorfold
