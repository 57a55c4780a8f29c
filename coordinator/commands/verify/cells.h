// The axes of the differential tester and their product (contract, section 8).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tensorfold {

/// How a cell drafts. Widths are rows of the verify window: 1 drafts nothing.
enum class CellDraft : uint8_t {
  kOff,
  kCopy,       // suffix match in the history
  kMtp,        // the model's own MTP layer, chained
  kBlock,      // a block drafter: one of its own, or the one that the model brings along
  kMixed,      // the right tokens with some made wrong: every number of accepted rows occurs
  kAdversary,  // windows of changing width, in turn all right, all wrong, one token repeated, and noise
};

/// Where the tested sequence's state comes from. All but the first move it to another slot whenever they may.
enum class CellCache : uint8_t {
  kCold,     // it computes everything itself
  kPrefix,   // at each page boundary of its prompt: shared pages, a snapshot
  kReply,    // after each pass of its reply, tentative rows included: a copy of the partial page, too
  kDisk,     // the same places, by way of files on every rank
  kEvicted,  // the same places, but nothing is left: everything known is computed again
};

/// One combination of everything that must not matter.
struct Cell {
  int world = 1;
  std::string transport = "local";  // local, ucx; with a GPU a rank also peer, nccl
  std::string variant = "auto";     // cpu: instruction set; cuda: graph or eager
  int threads = 1;
  CellDraft draft = CellDraft::kOff;
  int width = 1;
  int chunk = 0;       // prompt rows a pass; 0: all at once
  bool mates = false;  // beside other sequences, in another slot
  CellCache cache = CellCache::kCold;
  bool sampled = false;  // the only axis that changes the bytes: greedy and sampled replies differ from each other

  std::string name() const;
};

struct Axes {
  std::vector<int> worlds = {1, 2, 3, 4, 8};
  std::vector<std::string> transports = {"local", "ucx"};
  std::vector<std::string> variants;  // filled in from the backend and the machine
  std::vector<int> threads = {1, 2};
  std::vector<CellDraft> drafts = {CellDraft::kOff,   CellDraft::kCopy,  CellDraft::kMtp,
                                   CellDraft::kBlock, CellDraft::kMixed, CellDraft::kAdversary};
  std::vector<int> widths = {2, 3, 4, 5, 6, 7, 8};
  std::vector<int> chunks = {1, 7, 64, 0};
  std::vector<bool> mates = {false, true};
  std::vector<CellCache> caches = {CellCache::kCold, CellCache::kPrefix, CellCache::kReply, CellCache::kDisk,
                                   CellCache::kEvicted};
  std::vector<bool> sampled = {false, true};
};

/// All combinations, those that share a cluster (world, transport, ISA, threads) together. A world of one has no
/// transport and appears once. `has_mtp` false leaves the MTP drafts out, `has_block` false
/// the block drafter's; worlds wider than `widest` are left out.
std::vector<Cell> product(const Axes& axes, bool has_mtp, bool has_block, int widest);

/// A part of `cells` in which every pair of values of two axes that occurs in `cells` still occurs, at least `at_least`
/// cells if there are as many; the same choice every time.
std::vector<Cell> pairwise_sample(const std::vector<Cell>& cells, size_t at_least);

std::string draft_name(CellDraft draft);
std::string cache_name(CellCache cache);

}  // namespace tensorfold
