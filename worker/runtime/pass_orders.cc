// What a plan orders beside its rows, in the order that PassPlan states.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "worker/runtime/pass_runner.h"

namespace tensorfold {

std::vector<PagedMemory*> PassRunner::paged() const {
  std::vector<PagedMemory*> memories = {kv_.get()};
  if (row_cache_ != nullptr) memories.push_back(row_cache_.get());
  if (draft_kv_ != nullptr) memories.push_back(draft_kv_.get());
  if (draft_rows_ != nullptr) memories.push_back(draft_rows_.get());
  return memories;
}

int64_t PassRunner::page_bytes() const {
  int64_t bytes = 0;
  for (const PagedMemory* memory : paged()) bytes += memory->page_bytes();
  return bytes;
}

void PassRunner::copy_page(PageCopy copy) {
  for (PagedMemory* memory : paged()) memory->copy_page(copy.from, copy.to);
}

absl::Status PassRunner::check_pages(const std::vector<int32_t>& pages) const {
  for (const int32_t page : pages) {
    if (page < options_.pages) continue;
    return absl::InvalidArgumentError(fmt::format("plan orders page {}, this rank has {}", page, options_.pages));
  }
  return absl::OkStatus();
}

std::vector<StateEvent> PassRunner::take_events() {
  std::vector<StateEvent> events = std::exchange(events_, {});
  if (store_ == nullptr) return events;
  for (StateEvent& event : store_->events(kMaxOrders - std::min<size_t>(events.size(), kMaxOrders))) {
    events.push_back(std::move(event));
  }
  return events;
}

// Only the copy to host memory is the pass's; what follows is the store's thread's.
absl::Status PassRunner::save_state(const SaveOrder& save) {
  if (absl::Status status = check_pages(save.pages); !status.ok()) return status;
  if (store_ == nullptr) {
    events_.push_back({save.ticket, false, "this rank keeps no states on disk"});
    return absl::OkStatus();
  }
  std::vector<std::byte> snapshot;
  if (save.snapshot != kNoSnapshot) {
    if (absl::Status status = snapshots_->save(save.snapshot, &snapshot); !status.ok()) return status;
  }
  StateHeader header;
  header.owner = store_->options().owner;
  header.key = save.key;
  header.parent = save.parent;
  header.first_position = save.first_position;
  header.tokens = save.tokens;
  header.mtp = save.mtp;
  header.committed = save.committed;
  header.kept = save.kept;
  header.page_bytes = static_cast<uint64_t>(page_bytes());
  header.snapshot_bytes = snapshot.size();
  std::vector<std::byte> payload(header.payload_bytes());
  std::span<std::byte> to(payload);
  for (const int32_t page : save.pages) {
    for (const PagedMemory* memory : paged()) {
      memory->save_page(page, to.first(static_cast<size_t>(memory->page_bytes())));
      to = to.subspan(static_cast<size_t>(memory->page_bytes()));
    }
  }
  std::copy(snapshot.begin(), snapshot.end(), to.begin());
  store_->save(save.ticket, std::move(header), std::move(payload));
  return absl::OkStatus();
}

// What does not fit is no error of the plan: rank 0 learns of it and computes instead.
absl::Status PassRunner::place_state(const LoadOrder& load) {
  std::vector<std::byte> payload;
  const absl::StatusOr<StateHeader> header = store_->take(load.ticket, &payload);
  if (!header.ok()) return header.status();
  // Tickets begin anew with a new rank 0: what a former one had fetched is never taken for what this one asked for.
  if (header->key != load.key) return absl::FailedPreconditionError("another state was fetched under this order");
  if (header->pages() != load.pages.size() || header->page_bytes != static_cast<uint64_t>(page_bytes())) {
    return absl::InvalidArgumentError(fmt::format("a state of {} pages of {} bytes for {} of {}", header->pages(),
                                                  header->page_bytes, load.pages.size(), page_bytes()));
  }
  std::span<const std::byte> from(payload);
  for (const int32_t page : load.pages) {
    for (PagedMemory* memory : paged()) {
      memory->load_page(page, from.first(static_cast<size_t>(memory->page_bytes())));
      from = from.subspan(static_cast<size_t>(memory->page_bytes()));
    }
  }
  return load.snapshot == kNoSnapshot ? absl::OkStatus() : snapshots_->load(load.snapshot, from);
}

absl::Status PassRunner::carry_out_load(const LoadOrder& load) {
  if (absl::Status status = check_pages(load.pages); !status.ok()) return status;
  const bool answered = load.step == LoadStep::kFetch || load.step == LoadStep::kPlace;
  if (store_ == nullptr) {
    if (answered) events_.push_back({load.ticket, false, "this rank keeps no states on disk"});
    return absl::OkStatus();
  }
  switch (load.step) {
    case LoadStep::kFetch:
      store_->fetch(load.ticket, load.key);
      break;
    case LoadStep::kPlace: {
      const absl::Status placed = place_state(load);
      events_.push_back({load.ticket, placed.ok(), std::string(placed.message()).substr(0, kMaxEventBytes)});
      break;
    }
    case LoadStep::kForget:
      store_->forget(load.ticket);
      break;
    case LoadStep::kPin:
      store_->pin(load.key, load.name);
      break;
    case LoadStep::kUnpin:
      store_->unpin(load.key, load.name);
      break;
    case LoadStep::kErase:
      store_->erase(load.key);
      break;
  }
  return absl::OkStatus();
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
  for (const SaveOrder& save : orders.saves) {
    if (absl::Status status = save_state(save); !status.ok()) return status;
  }
  for (const uint32_t slot : plan.release) {
    if (slot >= slots_->slots()) {
      return absl::InvalidArgumentError(fmt::format("plan releases slot {}, this rank has {}", slot, slots_->slots()));
    }
    slots_->release(slot);
  }
  for (const LoadOrder& load : orders.loads) {
    if (absl::Status status = carry_out_load(load); !status.ok()) return status;
  }
  for (const PageCopy& copy : orders.copies) {
    if (absl::Status status = check_pages({copy.from, copy.to}); !status.ok()) return status;
    copy_page(copy);
  }
  return absl::OkStatus();
}

}  // namespace tensorfold
