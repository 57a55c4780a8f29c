#include "coordinator/sampling/token_counts.h"

namespace tensorfold {

void TokenCounts::add_prompt(std::span<const uint32_t> ids) {
  for (uint32_t id : ids) ++counts_[id].total;
}

void TokenCounts::push(uint32_t id) {
  Count& count = counts_[id];
  ++count.total;
  ++count.reply;
  reply_.push_back(id);
}

void TokenCounts::pop() {
  if (reply_.empty()) return;
  const auto it = counts_.find(reply_.back());
  reply_.pop_back();
  --it->second.reply;
  // An entry of zeros would count as "in the history" for whoever walks the map.
  if (--it->second.total == 0) counts_.erase(it);
}

void TokenCounts::pop_to(size_t reply_size) {
  while (reply_.size() > reply_size) pop();
}

TokenCounts::Count TokenCounts::of(uint32_t id) const {
  const auto it = counts_.find(id);
  return it == counts_.end() ? Count{} : it->second;
}

}  // namespace tensorfold
