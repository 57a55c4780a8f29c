#include "coordinator/schedule/lanes.h"

#include <utility>

namespace tensorfold {

int64_t pages_for(const GenerationRequest& request) {
  // A window's tentative rows may reach past the last token kept.
  const int64_t tokens = static_cast<int64_t>(request.prompt.size()) + request.max_tokens + kMaxWindow;
  return (tokens + kPageSize - 1) / kPageSize;
}

Lanes::Lanes(int slots, int64_t pages, const CacheOptions& cache) : pool_(pages), cache_(pool_, cache) {
  for (int slot = slots - 1; slot >= 0; --slot) free_slots_.push_back(static_cast<uint32_t>(slot));
}

bool Lanes::take(Sequence& sequence) {
  if (free_slots_.empty()) return false;
  const GenerationRequest& request = sequence.context().request;
  std::optional<CacheStart> start = cache_.start(sequence.tokens(), pages_for(request),
                                                 sequence.drafts_with_mtp() && cache_.options().has_mtp, request.cache);
  if (!start.has_value()) return false;
  sequence.start_at(start->position, start->accepted, start->snapshot_id());
  sequence.held_snapshot = start->snapshot;
  sequence.pages = std::move(start->pages);
  sequence.slot = free_slots_.back();
  free_slots_.pop_back();
  return true;
}

bool Lanes::waits_for_state(Sequence& sequence) {
  constexpr uint64_t kNothing = ~uint64_t{0};
  StateKeeper& states = cache_.states();
  if (!states.enabled() || !sequence.context().request.cache) return false;
  if (sequence.restore_job == 0) {
    if (states.full()) return true;
    const bool mtp = sequence.drafts_with_mtp() && cache_.options().has_mtp;
    const uint64_t job = states.restore(sequence.tokens(), cache_.peek(sequence.tokens(), mtp), mtp);
    sequence.restore_job = job == 0 ? kNothing : job;
  }
  return states.restoring(sequence.restore_job);
}

void Lanes::advanced(Sequence& sequence) {
  cache_.started(std::exchange(sequence.held_snapshot, nullptr));
  if (!sequence.context().request.cache || sequence.computed() > sequence.fill_end()) return;
  cache_.grown(sequence.tokens(), sequence.fill_end(), sequence.computed() - sequence.tentative(), sequence.pages,
               *sequence.slot, sequence.drafts_with_mtp() && cache_.options().has_mtp);
}

bool Lanes::would_fit(const Sequence& sequence, int64_t slots, int64_t pages) const {
  return free_slots() + slots > 0 && free_pages() + pages >= pages_for(sequence.context().request);
}

void Lanes::free_lane(Sequence& sequence) {
  cache_.started(std::exchange(sequence.held_snapshot, nullptr));
  if (sequence.fresh) cache_.abandon(sequence.pages);
  free_slots_.push_back(*sequence.slot);
  pool_.give_back(sequence.pages);
  sequence.slot.reset();
  sequence.pages.clear();
}

void Lanes::give_back(Sequence& sequence) {
  if (!sequence.slot.has_value()) return;
  if (!sequence.fresh && sequence.context().request.cache) {
    cache_.ended(sequence.tokens(), sequence.computed(), sequence.tentative(), sequence.pages, *sequence.slot,
                 sequence.drafts_with_mtp() && cache_.options().has_mtp);
  }
  released_.push_back(*sequence.slot);
  free_lane(sequence);
}

void Lanes::order(PassPlan* plan) {
  plan->orders = cache_.take_orders();
  plan->release = std::exchange(released_, {});
}

void Lanes::lost(const std::vector<std::unique_ptr<Sequence>>& active) {
  for (const std::unique_ptr<Sequence>& sequence : active) {
    if (sequence->slot.has_value()) free_lane(*sequence);
  }
  released_.clear();
  cache_.clear();
}

}  // namespace tensorfold
