#include "worker/state/slots.h"

#include <fmt/format.h>

#include "absl/status/statusor.h"
#include "worker/state/snapshots.h"

namespace tensorfold {

SlotTable::SlotTable(const ModelShape& shape, Ops& ops, int64_t slots, int64_t pages)
    : shape_(shape), ops_(ops), pages_(pages), slots_(static_cast<size_t>(slots)) {
  for (Slot& slot : slots_) {
    for (const StateShape& layer : shape_.recurrent) {
      slot.recurrent.push_back(ops_.make_recurrent_state(layer));
      if (slot.recurrent.back() == nullptr) return;
      slot.recurrent.back()->reset();  // large ones are not there before they are written
    }
    if (shape_.has_mtp) slot.kept_hidden = ops_.persistent(kMaxWindow, shape_.row_values());
  }
  whole_ = true;
}

void SlotTable::release(uint32_t slot) {
  if (slot >= slots_.size()) return;
  Slot& freed = slots_[slot];
  freed.in_use = false;
  freed.pages.clear();
  freed.kept_rows = 0;
}

void SlotTable::start(Slot& slot) {
  slot.in_use = true;
  slot.committed = 0;
  slot.tentative = 0;
  slot.pages.clear();
  slot.kept_rows = 0;
  slot.kept_tokens.clear();
  for (const std::unique_ptr<RecurrentState>& state : slot.recurrent) state->reset();
}

// What a fresh slot has of the tokens before its first row.
absl::Status SlotTable::start_later(const SequencePlan& plan, const SnapshotStore* snapshots, Slot& slot) {
  if (plan.snapshot != kNoSnapshot) {
    if (snapshots == nullptr) return absl::FailedPreconditionError("this rank keeps no snapshots");
    return snapshots->restore(plan.snapshot, &slot);
  }
  if (plan.first_position == 0) return absl::OkStatus();
  if (!shape_.recurrent.empty()) {
    return absl::FailedPreconditionError(fmt::format(
        "plan starts slot {} at position {} without a snapshot, but this model has states that no page holds",
        plan.slot, plan.first_position));
  }
  slot.committed = static_cast<int64_t>(plan.first_position);
  return absl::OkStatus();
}

absl::StatusOr<Slot*> SlotTable::open(const SequencePlan& plan, const SnapshotStore* snapshots) {
  if (plan.slot >= slots_.size()) {
    return absl::InvalidArgumentError(fmt::format("plan uses slot {}, this rank has {}", plan.slot, slots_.size()));
  }
  Slot& slot = slots_[plan.slot];
  if (plan.fresh) {
    start(slot);
    if (absl::Status status = start_later(plan, snapshots, slot); !status.ok()) return status;
  } else if (!slot.in_use) {
    return absl::FailedPreconditionError(fmt::format("plan continues slot {}, which is free here", plan.slot));
  }
  if (static_cast<int64_t>(plan.accepted) > slot.tentative) {
    return absl::FailedPreconditionError(fmt::format("plan accepts {} rows of slot {}, its last window had {}",
                                                     plan.accepted, plan.slot, slot.tentative));
  }
  const int64_t at = slot.committed + plan.accepted;
  if (static_cast<int64_t>(plan.first_position) != at) {
    return absl::FailedPreconditionError(
        fmt::format("plan says position {} for slot {}, its state is at {}", plan.first_position, plan.slot, at));
  }
  for (const int32_t page : plan.new_pages) {
    if (page >= pages_) {
      return absl::InvalidArgumentError(fmt::format("plan uses page {}, this rank has {}", page, pages_));
    }
    slot.pages.push_back(page);
  }
  const int64_t end = at + static_cast<int64_t>(plan.tokens.size()) + static_cast<int64_t>(plan.drafted());
  if (end > static_cast<int64_t>(slot.pages.size()) * kPageTokens) {
    return absl::InvalidArgumentError(fmt::format("plan runs slot {} to position {}, its {} pages end at {}", plan.slot,
                                                  end, slot.pages.size(), slot.pages.size() * kPageTokens));
  }
  return &slot;
}

absl::Status SlotTable::assume(uint32_t slot, int64_t tokens) {
  const int64_t pages = (tokens + kMaxWindow + kPageTokens - 1) / kPageTokens + 1;
  if (slot >= slots_.size() || tokens < 0 || pages > pages_) {
    return absl::InvalidArgumentError(fmt::format(
        "slot {} cannot be taken to position {}: there are {} slots, {} pages", slot, tokens, slots_.size(), pages_));
  }
  start(slots_[slot]);
  slots_[slot].committed = tokens;
  for (int64_t page = 0; page < pages; ++page) slots_[slot].pages.push_back(static_cast<int32_t>(page));
  return absl::OkStatus();
}

int64_t SlotTable::state_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_) {
    for (const std::unique_ptr<RecurrentState>& state : slot.recurrent) bytes += state->bytes();
  }
  return bytes;
}

}  // namespace tensorfold
