#include "coordinator/cache/prefix_cache.h"

#include <algorithm>
#include <utility>

namespace tensorfold {
namespace {

// How many of `kept` come next in `tokens` after `from`.
uint64_t agreeing(std::span<const uint32_t> tokens, uint64_t from, const std::vector<uint32_t>& kept) {
  uint64_t count = 0;
  while (count < kept.size() && from + count < tokens.size() && tokens[from + count] == kept[count]) ++count;
  return count;
}

uint64_t last_page_boundary(uint64_t prompt) {
  // The last token is always computed again, so a boundary at the end would be of no use to the same prompt.
  return prompt == 0 ? 0 : (prompt - 1) / kPageSize * kPageSize;
}

CacheOptions usable(CacheOptions options) {
  // Pages without the states that belong to them would only be in the way.
  if (options.has_states && options.snapshots == 0) options.enabled = false;
  return options;
}

}  // namespace

PrefixCache::PrefixCache(PagePool& pool, CacheOptions options)
    : pool_(pool), options_(usable(options)), tree_(pool), states_(pool, tree_, *this) {
  for (int64_t id = options.snapshots - 1; id >= 0; --id) free_snapshots_.push_back(static_cast<uint32_t>(id));
}

PrefixCache::Match PrefixCache::match(std::span<const uint32_t> tokens, bool mtp) {
  Match best;
  if (tokens.size() < 2) return best;
  const uint64_t most = tokens.size() - 1;
  const PrefixTree::Path path = tree_.find(tokens.first(most), mtp);
  if (!options_.has_states) {
    // The hidden row before the first one computed is not there, which the MTP layer wants: one row more is computed.
    best.position = mtp && path.tokens > 0 ? path.tokens - 1 : path.tokens;
    best.writes_from = best.position;
  } else {
    for (PrefixNode* node : path.nodes) {
      for (const std::unique_ptr<PrefixSnapshot>& snapshot : node->snapshots) {
        if (snapshot->committed > path.tokens || (mtp && !snapshot->mtp)) continue;
        const uint64_t kept = agreeing(tokens.first(path.tokens), snapshot->committed, snapshot->kept);
        if (snapshot->committed + kept <= best.position) continue;
        best.position = snapshot->committed + kept;
        best.accepted = static_cast<uint32_t>(kept);
        best.snapshot = snapshot.get();
      }
    }
    // The MTP layer's keys of the kept rows are written when they are accepted.
    if (best.snapshot != nullptr) best.writes_from = mtp ? best.snapshot->committed - 1 : best.position;
  }
  const size_t nodes = static_cast<size_t>((best.position + kPageSize - 1) / kPageSize);
  best.nodes.assign(path.nodes.begin(), path.nodes.begin() + static_cast<std::ptrdiff_t>(nodes));
  return best;
}

std::optional<CacheStart> PrefixCache::start(std::span<const uint32_t> tokens, int64_t pages, bool mtp, bool use) {
  use = use && options_.enabled;
  Match found = use ? match(tokens, mtp) : Match();
  const auto take = [&]() -> std::optional<CacheStart> {
    const size_t shared = static_cast<size_t>(found.writes_from) / kPageSize;
    CacheStart start;
    for (size_t i = 0; i < found.nodes.size(); ++i) pool_.hold(found.nodes[i]->page);
    if (found.snapshot != nullptr) ++found.snapshot->users;
    const int64_t own = pages - static_cast<int64_t>(shared);
    const bool room = make_room(own);
    if (!room) {
      for (const PrefixNode* node : found.nodes) pool_.give_back(node->page);
      if (found.snapshot != nullptr) --found.snapshot->users;
      return std::nullopt;
    }
    const std::vector<int32_t> mine = pool_.take(own);
    for (size_t i = 0; i < shared; ++i) start.pages.push_back(found.nodes[i]->page);
    start.pages.insert(start.pages.end(), mine.begin(), mine.end());
    for (size_t i = shared; i < found.nodes.size(); ++i) {
      // What lies before the first row in a page that will be written; held until the ranks have copied it.
      if (found.position > i * kPageSize) orders_.copies.push_back({found.nodes[i]->page, start.pages[i]});
      held_.push_back(found.nodes[i]->page);
    }
    start.position = found.position;
    start.accepted = found.accepted;
    start.snapshot = found.snapshot;
    return start;
  };
  std::optional<CacheStart> start = take();
  if (!start.has_value() && found.position > 0) {
    // What it would share stands in the way of what it needs.
    found = Match();
    start = take();
    if (start.has_value()) ++counters_.refusals;
  }
  if (!start.has_value() || !use) return start;
  if (start->position == 0) {
    ++counters_.misses;
    return start;
  }
  ++counters_.hits;
  counters_.hit_tokens += start->position;
  tree_.touch(found.nodes);
  if (found.snapshot != nullptr) tree_.touch(found.snapshot);
  return start;
}

void PrefixCache::started(PrefixSnapshot* snapshot) {
  if (snapshot != nullptr) --snapshot->users;
}

void PrefixCache::abandon(std::span<const int32_t> pages) {
  std::erase_if(orders_.copies,
                [&](const PageCopy& copy) { return std::find(pages.begin(), pages.end(), copy.to) != pages.end(); });
}

// Forgets the ends of the least recently used chains until so many pages are free.
bool PrefixCache::make_room(int64_t pages) {
  if (pages > pool_.free_pages() + pool_.idle_pages()) return false;
  while (pool_.free_pages() < pages) {
    PrefixNode* leaf = tree_.oldest_leaf();
    if (leaf == nullptr) return false;
    while (!leaf->snapshots.empty()) drop(leaf->snapshots.back().get());
    tree_.remove(leaf);
    ++counters_.evicted_pages;
  }
  return true;
}

void PrefixCache::drop(PrefixSnapshot* snapshot) {
  ++counters_.evicted_snapshots;
  free_snapshots_.push_back(snapshot->id);
  // One that was to be taken in the next plan is not taken; one that the ranks have is forgotten there.
  const size_t pending =
      std::erase_if(orders_.takes, [&](const SnapshotTake& take) { return take.id == snapshot->id; });
  if (pending == 0) orders_.drops.push_back(snapshot->id);
  tree_.remove(snapshot);
}

std::optional<uint32_t> PrefixCache::snapshot_number() {
  if (free_snapshots_.empty()) {
    PrefixSnapshot* oldest = tree_.oldest_snapshot();
    if (oldest == nullptr) {
      ++counters_.refusals;
      return std::nullopt;
    }
    drop(oldest);
  }
  const uint32_t id = free_snapshots_.back();
  free_snapshots_.pop_back();
  return id;
}

PrefixSnapshot* PrefixCache::take_snapshot(PrefixNode* node, uint32_t slot, uint64_t committed,
                                           std::span<const uint32_t> kept, bool mtp) {
  for (const std::unique_ptr<PrefixSnapshot>& other : node->snapshots) {
    const bool covers = other->committed == committed && other->kept.size() >= kept.size() &&
                        std::equal(kept.begin(), kept.end(), other->kept.begin()) && (other->mtp || !mtp);
    if (!covers) continue;
    tree_.touch(other.get());
    return other.get();
  }
  const std::optional<uint32_t> id = snapshot_number();
  if (!id.has_value()) return nullptr;
  orders_.takes.push_back({slot, *id});
  return tree_.add_snapshot(node, {.id = *id,
                                   .committed = committed,
                                   .kept = {kept.begin(), kept.end()},
                                   .mtp = mtp,
                                   .users = 0,
                                   .node = nullptr,
                                   .used = 0});
}

uint64_t PrefixCache::next_stop(uint64_t prompt, uint64_t computed) const {
  uint64_t stop = prompt;
  if (!options_.enabled || !options_.has_states || options_.snapshots == 0) return stop;
  const uint64_t boundary = last_page_boundary(prompt);
  if (computed < boundary) stop = boundary;
  if (options_.snapshot_tokens > 0) {
    stop = std::min(stop, (computed / options_.snapshot_tokens + 1) * options_.snapshot_tokens);
  }
  return stop;
}

void PrefixCache::grown(std::span<const uint32_t> tokens, uint64_t prompt, uint64_t computed,
                        std::span<const int32_t> pages, uint32_t slot, bool mtp) {
  const uint64_t whole = computed / kPageSize * kPageSize;
  if (!options_.enabled || whole == 0) return;
  const std::vector<PrefixNode*> path = tree_.insert(tokens.first(whole), pages, mtp);
  const bool on_grid = options_.snapshot_tokens > 0 && computed % options_.snapshot_tokens == 0;
  if (!options_.has_states || computed != whole || !(on_grid || computed == last_page_boundary(prompt))) return;
  if (path.size() * kPageSize != computed) return;
  states_.keep(tokens.first(computed), path, mtp, take_snapshot(path.back(), slot, computed, {}, mtp));
}

void PrefixCache::ended(std::span<const uint32_t> tokens, uint64_t computed, uint32_t accepted,
                        std::span<const int32_t> pages, uint32_t slot, bool mtp) {
  if (!options_.enabled || computed <= accepted) return;
  const std::vector<PrefixNode*> path = tree_.insert(tokens.first(computed), pages, mtp);
  PrefixSnapshot* snapshot = nullptr;
  if (options_.has_states) {
    const uint64_t committed = computed - accepted;
    const size_t node = static_cast<size_t>((committed - 1) / kPageSize);
    if (node >= path.size()) return;
    snapshot = take_snapshot(path[node], slot, committed, tokens.subspan(committed, accepted), mtp);
  }
  states_.keep(tokens.first(computed), path, mtp, snapshot);
}

std::vector<int32_t> PrefixCache::pages_for_state(int64_t count) {
  return make_room(count) ? pool_.take(count) : std::vector<int32_t>();
}

void PrefixCache::adopt(std::span<const uint32_t> tokens, std::span<const int32_t> pages, const StoredSegment& last,
                        std::optional<uint32_t> snapshot) {
  const std::vector<PrefixNode*> path = tree_.insert(tokens, pages, last.mtp);
  if (!snapshot.has_value()) return;
  const size_t node = static_cast<size_t>((last.committed - 1) / kPageSize);
  const auto same = [&](const std::unique_ptr<PrefixSnapshot>& other) {
    return other->committed == last.committed && other->kept == last.kept;
  };
  if (node >= path.size() || std::any_of(path[node]->snapshots.begin(), path[node]->snapshots.end(), same)) {
    give_number_back(*snapshot);
    return;
  }
  tree_.add_snapshot(path[node], {.id = *snapshot,
                                  .committed = last.committed,
                                  .kept = last.kept,
                                  .mtp = last.mtp,
                                  .users = 0,
                                  .node = nullptr,
                                  .used = 0});
}

StateOrders PrefixCache::take_orders() {
  for (const int32_t page : std::exchange(held_, {})) pool_.give_back(page);
  states_.add_orders(&orders_);
  return std::exchange(orders_, {});
}

void PrefixCache::clear() {
  states_.clear();
  for (const int32_t page : std::exchange(held_, {})) pool_.give_back(page);
  orders_ = {};
  tree_.clear();
  free_snapshots_.clear();
  for (int64_t id = options_.snapshots - 1; id >= 0; --id) free_snapshots_.push_back(static_cast<uint32_t>(id));
}

}  // namespace tensorfold
