// Copies of slots, by number: what a sequence had at some position besides its pages. Rank 0 says when one is taken,
// used, put away and forgotten; every rank holds the same numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/ops/ops.h"
#include "worker/model/model.h"
#include "worker/state/slots.h"

namespace tensorfold {

/// What a snapshot costs on a rank with this share: recurrent states and the MTP layer's kept rows.
int64_t snapshot_bytes(const ModelShape& shape);

/// Thread-safety: the pass runner's thread.
class SnapshotStore {
 public:
  /// Numbers below `capacity`. All their memory is taken and touched here: what the plan of memory says is there before
  /// the first request, and serving never asks the system for more.
  SnapshotStore(const ModelShape& shape, Ops& ops, int64_t capacity);
  /// False where the backend had no memory for all states: the store is then of no use.
  bool whole() const { return whole_; }

  /// FailedPrecondition, InvalidArgument: no such number, a free slot, or nothing under that number.
  absl::Status take(uint32_t id, const Slot& slot);
  absl::Status drop(uint32_t id);
  /// Gives `slot` (started, its pages in place) what the snapshot holds: the next plan accepts rows of it as it would
  /// have of the slot that it was taken of.
  absl::Status restore(uint32_t id, Slot* slot) const;

  /// The same as bytes, on any rank with the same share. load() checks everything before it takes anything:
  /// InvalidArgument.
  absl::Status save(uint32_t id, std::vector<std::byte>* bytes) const;
  absl::Status load(uint32_t id, std::span<const std::byte> bytes);

  void clear();
  int64_t bytes() const;

 private:
  struct Snapshot {
    bool valid = false;
    int64_t committed = 0;
    int64_t tentative = 0;
    int64_t kept_rows = 0;
    int64_t kept_position = 0;
    std::vector<int32_t> kept_tokens;
    std::vector<std::unique_ptr<RecurrentState>> recurrent;
    Tensor kept_hidden;  // [kMaxWindow, hidden], where there is an MTP layer
  };
  absl::Status check(uint32_t id, bool must_hold) const;

  const ModelShape& shape_;
  Ops& ops_;
  std::vector<Snapshot> snapshots_;
  bool whole_ = false;
};

}  // namespace tensorfold
