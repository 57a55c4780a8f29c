// Sequence slots of one rank: page tables, recurrent state and what the last window left to be committed.
//
// Every rank applies the same plans to the same table, so all hold the same slots. A slot's committed position is the
// number of tokens whose state cannot be taken back; tentative rows beyond it leave no trace unless the next plan
// accepts them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "kernels/ops/ops.h"
#include "transport/pass/plan.h"
#include "worker/model/model.h"

namespace tensorfold {

/// One sequence's state on this rank.
struct Slot {
  bool in_use = false;
  int64_t committed = 0;  // tokens committed
  int64_t tentative = 0;  // rows of the last window that may still be accepted
  std::vector<int32_t> pages;
  std::vector<std::unique_ptr<RecurrentState>> recurrent;  // one per recurrent layer
  // For the MTP layer: final-normed hidden rows of the last certain row and the tentative rows after it.
  Tensor kept_hidden;                // [kMaxWindow, hidden]
  int64_t kept_rows = 0;             // 0: nothing kept, the MTP layer starts later
  int64_t kept_position = 0;         // position of kept_hidden's first row
  std::vector<int32_t> kept_tokens;  // the tentative tokens: token at kept_position + 1 + i
};

class SnapshotStore;

class SlotTable {
 public:
  /// `slots` sequences at most. The states of all are made here, so that serving takes no memory for them.
  SlotTable(const ModelShape& shape, Ops& ops, int64_t slots, int64_t pages);
  /// False where the backend had no memory for all states: the table is then of no use.
  bool whole() const { return whole_; }

  void release(uint32_t slot);
  /// Applies one sequence's page changes and commits: returns the slot, or an error that names slot and both positions
  /// when plan and state disagree (a lost or repeated plan must never be computed on).
  /// A fresh slot may start at a later position: on pages that hold what came before, from a snapshot where the model
  /// has what a page does not hold.
  absl::StatusOr<Slot*> open(const SequencePlan& plan, const SnapshotStore* snapshots = nullptr);
  /// Null if there is no such slot.
  const Slot* find(uint32_t slot) const { return slot < slots_.size() ? &slots_[slot] : nullptr; }
  /// Makes `slot` one whose first `tokens` tokens are taken for computed, on pages 0 and up (measurements only).
  absl::Status assume(uint32_t slot, int64_t tokens);
  int64_t slots() const { return static_cast<int64_t>(slots_.size()); }
  /// Bytes of recurrent state in use.
  int64_t state_bytes() const;

 private:
  void start(Slot& slot);
  absl::Status start_later(const SequencePlan& plan, const SnapshotStore* snapshots, Slot& slot);

  const ModelShape& shape_;
  Ops& ops_;
  int64_t pages_;
  std::vector<Slot> slots_;
  bool whole_ = false;
};

}  // namespace tensorfold
