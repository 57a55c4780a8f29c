#include "coordinator/schedule/lanes.h"

#include <utility>

namespace tensorfold {

int64_t pages_for(const GenerationRequest& request) {
  // A window's tentative rows may reach past the last token kept.
  const int64_t tokens = static_cast<int64_t>(request.prompt.size()) + request.max_tokens + kMaxWindow;
  return (tokens + kPageSize - 1) / kPageSize;
}

Lanes::Lanes(int slots, int64_t pages) : pool_(pages) {
  for (int slot = slots - 1; slot >= 0; --slot) free_slots_.push_back(static_cast<uint32_t>(slot));
}

bool Lanes::take(Sequence& sequence) {
  if (free_slots_.empty()) return false;
  std::vector<int32_t> pages = pool_.take(pages_for(sequence.context().request));
  if (pages.empty()) return false;
  sequence.pages = std::move(pages);
  sequence.slot = free_slots_.back();
  free_slots_.pop_back();
  return true;
}

bool Lanes::would_fit(const Sequence& sequence, int64_t slots, int64_t pages) const {
  return free_slots() + slots > 0 && free_pages() + pages >= pages_for(sequence.context().request);
}

void Lanes::give_back(Sequence& sequence) {
  if (!sequence.slot.has_value()) return;
  released_.push_back(*sequence.slot);
  free_slots_.push_back(*sequence.slot);
  pool_.give_back(sequence.pages);
  sequence.slot.reset();
  sequence.pages.clear();
}

std::vector<uint32_t> Lanes::take_released() { return std::exchange(released_, {}); }

}  // namespace tensorfold
