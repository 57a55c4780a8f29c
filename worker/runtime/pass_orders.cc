// What a plan orders beside its rows, in the order that PassPlan states.
#include <fmt/format.h>

#include "worker/runtime/pass_runner.h"

namespace tensorfold {

void PassRunner::copy_page(PageCopy copy) {
  kv_->copy_page(copy.from, copy.to);
  if (row_cache_ != nullptr) row_cache_->copy_page(copy.from, copy.to);
}

absl::Status PassRunner::carry_out(const PassPlan& plan) {
  const StateOrders& orders = plan.orders;
  for (const uint32_t id : orders.drops) {
    if (absl::Status status = snapshots_->drop(id); !status.ok()) return status;
  }
  for (const SnapshotTake& take : orders.takes) {
    const Slot* slot = slots_->find(take.slot);
    if (slot == nullptr) {
      return absl::InvalidArgumentError(
          fmt::format("plan takes a snapshot of slot {}, this rank has {}", take.slot, slots_->slots()));
    }
    if (absl::Status status = snapshots_->take(take.id, *slot); !status.ok()) return status;
  }
  for (const uint32_t slot : plan.release) {
    if (slot >= slots_->slots()) {
      return absl::InvalidArgumentError(fmt::format("plan releases slot {}, this rank has {}", slot, slots_->slots()));
    }
    slots_->release(slot);
  }
  for (const PageCopy& copy : orders.copies) {
    for (const int32_t page : {copy.from, copy.to}) {
      if (page >= options_.pages) {
        return absl::InvalidArgumentError(fmt::format("plan copies page {}, this rank has {}", page, options_.pages));
      }
    }
    copy_page(copy);
  }
  return absl::OkStatus();
}

}  // namespace tensorfold
