#include "coordinator/cache/state_keeper.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

namespace tensorfold {
namespace {

constexpr size_t kMostWaiting = 256;   // segments that wait to be copied for the disk
constexpr size_t kMostUnanswered = 8;  // segments that the ranks are writing
constexpr uint64_t kSegment = kMaxSegmentTokens;

uint64_t common(std::span<const uint32_t> a, std::span<const uint32_t> b) {
  const size_t most = std::min(a.size(), b.size());
  return static_cast<uint64_t>(
      std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(most), b.begin()).first - a.begin());
}

std::vector<int32_t> as_ids(std::span<const uint32_t> tokens) { return {tokens.begin(), tokens.end()}; }

}  // namespace

void StateKeeper::open(StateOptions options, std::vector<StoredSegment> stored, int world) {
  options_ = std::move(options);
  world_ = world;
  for (StoredSegment& segment : stored) add(std::move(segment));
}

void StateKeeper::add(StoredSegment segment) {
  remove(segment.key);
  by_parent_.emplace(segment.parent, segment.key);
  const StateKey key = segment.key;
  segments_.emplace(key, std::move(segment));
}

void StateKeeper::remove(const StateKey& key) {
  const auto found = segments_.find(key);
  if (found == segments_.end()) return;
  const auto [first, last] = by_parent_.equal_range(found->second.parent);
  for (auto it = first; it != last; ++it) {
    if (it->second != key) continue;
    by_parent_.erase(it);
    break;
  }
  segments_.erase(found);
}

uint64_t StateKeeper::new_ticket(std::function<void(bool)> ended) {
  const uint64_t ticket = next_ticket_++;
  tickets_[ticket] = {.left = world_, .ok = true, .ended = std::move(ended)};
  return ticket;
}

// Whole segments first: they are named by their tokens alone, so that a longer chain finds them. The last one is named
// by its snapshot's place, too.
void StateKeeper::keep(std::span<const uint32_t> tokens, const std::vector<PrefixNode*>& nodes, bool mtp,
                       PrefixSnapshot* snapshot) {
  if (!options_.enabled || tokens.size() < options_.min_tokens) return;
  if (options_.has_states && snapshot == nullptr) return;
  if (nodes.size() * kPageSize < tokens.size()) return;
  StateKey parent;
  for (uint64_t first = 0; first < tokens.size(); first += kSegment) {
    const std::span<const uint32_t> mine = tokens.subspan(first, std::min(kSegment, tokens.size() - first));
    const uint64_t end = first + mine.size();
    const auto begin = nodes.begin() + static_cast<std::ptrdiff_t>(first / kPageSize);
    const auto stop = nodes.begin() + static_cast<std::ptrdiff_t>((end + kPageSize - 1) / kPageSize);
    // The tentative rows of the chain's last window may cross the end of a segment: its snapshot then lies in the
    // segment before, and what follows is no state of its own but a few rows to compute.
    const bool last = end == tokens.size() || (snapshot != nullptr && snapshot->committed <= end);
    PrefixSnapshot* here = last ? snapshot : nullptr;
    for (const std::unique_ptr<PrefixSnapshot>& other : (*std::prev(stop))->snapshots) {
      if (end < tokens.size() && other->committed == end) here = other.get();
    }
    const std::vector<int32_t> ids = as_ids(mine);
    const StateKey key =
        state_key(options_.fingerprint, parent, ids, mine.size() == kSegment || here == nullptr ? 0 : here->committed);
    const auto known = segments_.find(key);
    const bool there =
        known != segments_.end() && (known->second.committed != 0 || here == nullptr) && (known->second.mtp || !mtp);
    if (!there && writing_.count(key) == 0) {
      if (saves_.size() >= kMostWaiting) {
        ++counters_.refusals;
        return;
      }
      writing_.insert(key);
      Save& save = saves_.emplace_back();
      save.order.key = key;
      save.order.parent = parent;
      save.order.first_position = first;
      save.order.tokens = ids;
      save.order.mtp = mtp;
      for (auto node = begin; node != stop; ++node) {
        save.order.pages.push_back((*node)->page);
        pool_.hold((*node)->page);
      }
      if (here != nullptr) {
        save.snapshot = here;
        ++here->users;
        save.order.snapshot = here->id;
        save.order.committed = here->committed;
        save.order.kept = as_ids(here->kept);
      }
    }
    if (last) return;
    parent = key;
  }
}

void StateKeeper::release(Save& save) {
  for (const int32_t page : save.order.pages) pool_.give_back(page);
  if (save.snapshot != nullptr) --save.snapshot->users;
}

void StateKeeper::add_orders(StateOrders* orders) {
  // The plan that copied these has run.
  for (Save& save : copying_) release(save);
  copying_.clear();
  for (LoadOrder& order : orders_) orders->loads.push_back(std::move(order));
  orders_.clear();
  // One a plan: passes stay short.
  if (saves_.empty() || tickets_.size() >= kMostUnanswered) return;
  Save save = std::move(saves_.front());
  saves_.pop_front();
  StoredSegment segment;
  segment.key = save.order.key;
  segment.parent = save.order.parent;
  segment.first_position = save.order.first_position;
  segment.tokens.assign(save.order.tokens.begin(), save.order.tokens.end());
  segment.mtp = save.order.mtp;
  segment.committed = save.order.committed;
  segment.kept.assign(save.order.kept.begin(), save.order.kept.end());
  save.order.ticket = new_ticket([this, segment](bool ok) {
    writing_.erase(segment.key);
    ++(ok ? counters_.saved : counters_.save_failures);
    if (ok) add(segment);
  });
  orders->saves.push_back(save.order);
  copying_.push_back(std::move(save));
}

void StateKeeper::take_events(std::span<const StateEvent> events) {
  for (const StateEvent& event : events) {
    const auto found = tickets_.find(event.ticket);
    if (found == tickets_.end()) continue;  // of before the ranks were lost
    if (!event.ok) {
      spdlog::warn("a state on disk is not used: {}", event.message);
      found->second.ok = false;
    }
    if (--found->second.left > 0) continue;
    const Ticket ticket = std::move(found->second);
    tickets_.erase(found);
    ticket.ended(ticket.ok);
  }
}

StateKeeper::Found StateKeeper::find(std::span<const uint32_t> tokens, bool mtp) const {
  Found best;
  std::vector<StateKey> chain;
  StateKey parent;
  for (uint64_t at = 0; at < tokens.size(); at += kSegment) {
    const std::span<const uint32_t> left = tokens.subspan(at);
    std::optional<StateKey> next;
    const auto [first, last] = by_parent_.equal_range(parent);
    for (auto it = first; it != last; ++it) {
      const StoredSegment& segment = segments_.at(it->second);
      const uint64_t same = common(segment.tokens, left);
      if (same == 0 || (mtp && !segment.mtp) || segment.first_position != at) continue;
      uint64_t position = options_.has_states ? 0 : at + same;
      if (options_.has_states && segment.committed != 0 && segment.committed <= at + same) {
        position = segment.committed + common(segment.kept, tokens.first(at + same).subspan(segment.committed));
      }
      if (position > best.position) {
        best.position = position;
        best.chain = chain;
        best.chain.push_back(segment.key);
      }
      if (same == kSegment) next = segment.key;
    }
    if (!next.has_value()) break;
    chain.push_back(*next);
    parent = *next;
  }
  return best;
}

uint64_t StateKeeper::restore(std::span<const uint32_t> tokens, uint64_t in_memory, bool mtp) {
  if (!options_.enabled || tokens.size() < 2) return 0;
  const Found found = find(tokens.first(tokens.size() - 1), mtp);
  if (found.position < in_memory + options_.min_tokens) return 0;
  return begin(found.chain, tree_.find(tokens, mtp).tokens);
}

uint64_t StateKeeper::begin(std::vector<StateKey> chain, uint64_t in_memory) {
  const uint64_t id = next_job_++;
  Job& job = jobs_[id];
  for (const StateKey& key : chain) {
    const StoredSegment& segment = segments_.at(key);
    job.tokens.insert(job.tokens.end(), segment.tokens.begin(), segment.tokens.end());
  }
  // Whole segments that are in memory are not read; the last one always is, for its snapshot.
  job.at = std::min<size_t>(static_cast<size_t>(in_memory / kSegment), chain.size() - 1);
  job.chain = std::move(chain);
  fetch(id);
  return id;
}

std::vector<StateKey> StateKeeper::chain_of(const StateKey& key) const {
  std::vector<StateKey> chain;
  for (auto at = segments_.find(key); at != segments_.end(); at = segments_.find(at->second.parent)) {
    chain.push_back(at->first);
    if (at->second.first_position == 0) {
      std::reverse(chain.begin(), chain.end());
      return chain;
    }
  }
  return {};  // its beginning is gone
}

std::vector<StateKey> StateKeeper::with_descendants(const StateKey& key) const {
  std::vector<StateKey> keys = {key};
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto [first, last] = by_parent_.equal_range(keys[i]);
    for (auto it = first; it != last; ++it) keys.push_back(it->second);
  }
  return keys;
}

size_t StateKeeper::restore_pinned() {
  size_t count = 0;
  for (const auto& [key, segment] : segments_) {
    // A pinned chain's last segment is the one after which nothing has its name.
    const auto [first, last] = by_parent_.equal_range(key);
    const bool ends = std::any_of(segment.names.begin(), segment.names.end(),
                                  [&, first = first, last = last](const std::string& name) {
                                    return std::none_of(first, last, [&](const auto& child) {
                                      const std::vector<std::string>& names = segments_.at(child.second).names;
                                      return std::find(names.begin(), names.end(), name) != names.end();
                                    });
                                  });
    const std::vector<StateKey> chain = ends ? chain_of(key) : std::vector<StateKey>();
    if (chain.empty()) continue;
    begin(chain, 0);
    ++count;
  }
  return count;
}

LoadOrder StateKeeper::order_for(LoadStep step, const StateKey& key, const std::string& name) const {
  LoadOrder order;
  order.step = step;
  order.key = key;
  order.name = name;
  return order;
}

void StateKeeper::fetch(uint64_t id) {
  const Job& job = jobs_.at(id);
  const uint64_t next = next_ticket_;
  LoadOrder order = order_for(LoadStep::kFetch, job.chain[job.at], "");
  order.ticket = new_ticket([this, id, next](bool ok) { place(id, ok, next); });
  orders_.push_back(std::move(order));
}

// `fetched`: on all ranks, under `ticket`.
void StateKeeper::place(uint64_t id, bool fetched, uint64_t ticket) {
  const auto found = jobs_.find(id);
  if (found == jobs_.end()) return;
  Job& job = found->second;
  const auto segment = segments_.find(job.chain[job.at]);
  LoadOrder forget = order_for(LoadStep::kForget, {}, "");
  forget.ticket = ticket;
  if (!fetched || segment == segments_.end()) {
    orders_.push_back(forget);
    // What hangs on it is of no use either; all of it is written again when it has been computed again.
    if (segment != segments_.end()) {
      for (const StateKey& key : with_descendants(segment->first)) remove(key);
    }
    give_up(id);
    return;
  }
  job.pages = host_.pages_for_state(static_cast<int64_t>((segment->second.tokens.size() + kPageSize - 1) / kPageSize));
  if (job.pages.empty()) {
    orders_.push_back(forget);
    give_up(id);
    return;
  }
  if (segment->second.committed != 0) job.snapshot = host_.number_for_state();
  LoadOrder order = order_for(LoadStep::kPlace, segment->first, "");
  order.pages = job.pages;
  order.snapshot = job.snapshot.value_or(kNoSnapshot);
  // What was fetched is known by the fetch's ticket; the answer comes under the same.
  order.ticket = ticket;
  tickets_[ticket] = {.left = world_, .ok = true, .ended = [this, id](bool ok) { placed(id, ok); }};
  orders_.push_back(std::move(order));
}

void StateKeeper::placed(uint64_t id, bool ok) {
  const auto found = jobs_.find(id);
  if (found == jobs_.end()) return;
  Job& job = found->second;
  const auto segment = segments_.find(job.chain[job.at]);
  if (!ok || segment == segments_.end()) {
    give_up(id);
    return;
  }
  const uint64_t end = segment->second.end();
  const std::span<const uint32_t> tokens = std::span(job.tokens).first(end);
  const PrefixTree::Path before = tree_.find(tokens.first(segment->second.first_position), segment->second.mtp);
  if (before.tokens < segment->second.first_position) {
    give_up(id);  // what it hangs on was forgotten meanwhile
    return;
  }
  std::vector<int32_t> pages;
  for (const PrefixNode* node : before.nodes) pages.push_back(node->page);
  pages.insert(pages.end(), job.pages.begin(), job.pages.end());
  host_.adopt(tokens, pages, segment->second, std::exchange(job.snapshot, std::nullopt));
  for (const int32_t page : std::exchange(job.pages, {})) pool_.give_back(page);
  ++counters_.restored;
  if (++job.at < job.chain.size()) {
    fetch(id);
  } else {
    jobs_.erase(found);
  }
}

void StateKeeper::give_up(uint64_t id) {
  Job& job = jobs_.at(id);
  ++counters_.restore_failures;
  for (const int32_t page : job.pages) pool_.give_back(page);
  if (job.snapshot.has_value()) host_.give_number_back(*job.snapshot);
  jobs_.erase(id);
}

void StateKeeper::clear() {
  for (Save& save : saves_) release(save);
  for (Save& save : copying_) release(save);
  saves_.clear();
  copying_.clear();
  writing_.clear();
  for (const auto& [id, job] : jobs_) {
    for (const int32_t page : job.pages) pool_.give_back(page);
  }
  jobs_.clear();
  orders_.clear();
  // What ranks that were not lost have fetched meanwhile takes memory.
  for (const auto& [ticket, rest] : std::exchange(tickets_, {})) {
    LoadOrder forget = order_for(LoadStep::kForget, {}, "");
    forget.ticket = ticket;
    orders_.push_back(std::move(forget));
  }
}

std::vector<StoredSegment> StateKeeper::list() const {
  std::vector<StoredSegment> all;
  for (const auto& [key, segment] : segments_) all.push_back(segment);
  return all;
}

bool StateKeeper::pin(const StateKey& key, const std::string& name) {
  const std::vector<StateKey> chain = chain_of(key);
  if (chain.empty() || name.empty() || name.size() > kMaxPinName) return false;
  unpin(name);
  for (const StateKey& each : chain) {
    segments_.at(each).names.push_back(name);
    orders_.push_back(order_for(LoadStep::kPin, each, name));
  }
  return true;
}

bool StateKeeper::unpin(const std::string& name) {
  bool any = false;
  for (auto& [key, segment] : segments_) {
    if (std::erase(segment.names, name) == 0) continue;
    orders_.push_back(order_for(LoadStep::kUnpin, key, name));
    any = true;
  }
  return any;
}

bool StateKeeper::drop(const StateKey& key) {
  if (segments_.count(key) == 0) return false;
  for (const StateKey& each : with_descendants(key)) {
    for (const std::string& name : segments_.at(each).names) orders_.push_back(order_for(LoadStep::kUnpin, each, name));
    orders_.push_back(order_for(LoadStep::kErase, each, ""));
    remove(each);
  }
  return true;
}

}  // namespace tensorfold
