#include "coordinator/cache/prefix_tree.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace tensorfold {
namespace {

size_t common_prefix(std::span<const uint32_t> a, std::span<const uint32_t> b) {
  const size_t most = std::min(a.size(), b.size());
  return static_cast<size_t>(std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(most), b.begin()).first -
                             a.begin());
}

std::span<const uint32_t> page_of(std::span<const uint32_t> tokens, size_t index) {
  const size_t first = index * kPageSize;
  return tokens.subspan(first, std::min<size_t>(kPageSize, tokens.size() - first));
}

}  // namespace

// Uses are numbered, so no two are equal; addresses only make the order total.
bool PrefixTree::NodeOrder::operator()(const PrefixNode* a, const PrefixNode* b) const {
  return a->used != b->used ? a->used < b->used : std::less<>()(a, b);
}
bool PrefixTree::SnapshotOrder::operator()(const PrefixSnapshot* a, const PrefixSnapshot* b) const {
  return a->used != b->used ? a->used < b->used : std::less<>()(a, b);
}

PrefixNode* PrefixTree::find_child(const PrefixNode& node, std::span<const uint32_t> tokens, size_t* common) const {
  PrefixNode* best = nullptr;
  *common = 0;
  for (const std::unique_ptr<PrefixNode>& child : node.children) {
    const size_t same = common_prefix(child->tokens, tokens);
    if (same > *common) {
      *common = same;
      best = child.get();
    }
  }
  return best;
}

PrefixTree::Path PrefixTree::find(std::span<const uint32_t> tokens, bool mtp) const {
  Path path;
  const PrefixNode* node = &root_;
  while (path.tokens < tokens.size()) {
    size_t common = 0;
    PrefixNode* child = find_child(*node, page_of(tokens, path.nodes.size()), &common);
    if (child == nullptr || (mtp && !child->mtp)) break;
    path.nodes.push_back(child);
    path.tokens += common;
    if (common < kPageSize) break;
    node = child;
  }
  return path;
}

void PrefixTree::use(PrefixNode* node) {
  const bool leaf = node->children.empty();
  if (leaf) leaves_.erase(node);
  node->used = ++clock_;
  if (leaf) leaves_.insert(node);
}

// The end first: a chain's beginning is always younger than what hangs on it.
void PrefixTree::touch(const std::vector<PrefixNode*>& nodes) {
  for (size_t i = nodes.size(); i-- > 0;) use(nodes[i]);
}

PrefixNode* PrefixTree::add_child(PrefixNode& parent, std::span<const uint32_t> tokens, int32_t page, bool mtp) {
  if (&parent != &root_ && parent.children.empty()) leaves_.erase(&parent);
  auto child = std::make_unique<PrefixNode>();
  child->page = page;
  child->mtp = mtp;
  child->tokens.assign(tokens.begin(), tokens.end());
  child->parent = &parent;
  child->used = ++clock_;
  pool_.hold_cached(page);
  ++nodes_;
  leaves_.insert(child.get());
  parent.children.push_back(std::move(child));
  return parent.children.back().get();
}

void PrefixTree::swap_page(PrefixNode& node, std::span<const uint32_t> tokens, int32_t page, bool mtp) {
  pool_.hold_cached(page);
  pool_.give_back_cached(node.page);
  node.page = page;
  node.mtp = mtp;
  node.tokens.assign(tokens.begin(), tokens.end());
}

std::vector<PrefixNode*> PrefixTree::insert(std::span<const uint32_t> tokens, std::span<const int32_t> pages,
                                            bool mtp) {
  std::vector<PrefixNode*> path;
  PrefixNode* node = &root_;
  for (size_t i = 0; i * kPageSize < tokens.size(); ++i) {
    const std::span<const uint32_t> mine = page_of(tokens, i);
    size_t common = 0;
    PrefixNode* child = find_child(*node, mine, &common);
    const bool holds_mine = child != nullptr && common == mine.size();
    const bool grows = child != nullptr && common == child->tokens.size() && common < mine.size();
    if (!holds_mine && !grows) {
      child = add_child(*node, mine, pages[i], mtp);
    } else if (child->page != pages[i] && ((grows && (mtp || !child->mtp)) || (mtp && !child->mtp))) {
      // More tokens, or the MTP layer's keys: the page takes the other's place. It must hold all that the other held.
      if (common == child->tokens.size()) swap_page(*child, mine, pages[i], mtp);
    } else if (grows && child->page == pages[i]) {
      child->tokens.assign(mine.begin(), mine.end());
      child->mtp = child->mtp && mtp;
    }
    // A page with more tokens but without the MTP layer's keys does not replace one that has them: it ends here.
    if (child->tokens.size() < mine.size()) {
      path.push_back(child);
      break;
    }
    path.push_back(child);
    node = child;
  }
  touch(path);
  return path;
}

PrefixSnapshot* PrefixTree::add_snapshot(PrefixNode* node, PrefixSnapshot snapshot) {
  snapshot.node = node;
  snapshot.used = ++clock_;
  node->snapshots.push_back(std::make_unique<PrefixSnapshot>(std::move(snapshot)));
  by_use_.insert(node->snapshots.back().get());
  return node->snapshots.back().get();
}

void PrefixTree::touch(PrefixSnapshot* snapshot) {
  by_use_.erase(snapshot);
  snapshot->used = ++clock_;
  by_use_.insert(snapshot);
}

PrefixSnapshot* PrefixTree::oldest_snapshot() const {
  for (PrefixSnapshot* snapshot : by_use_) {
    if (snapshot->users == 0) return snapshot;
  }
  return nullptr;
}

void PrefixTree::remove(PrefixSnapshot* snapshot) {
  by_use_.erase(snapshot);
  std::erase_if(snapshot->node->snapshots, [&](const auto& other) { return other.get() == snapshot; });
}

PrefixNode* PrefixTree::oldest_leaf() const {
  for (PrefixNode* leaf : leaves_) {
    const bool wanted = std::any_of(leaf->snapshots.begin(), leaf->snapshots.end(),
                                    [](const auto& snapshot) { return snapshot->users > 0; });
    if (!wanted && pool_.refs(leaf->page) == 1) return leaf;
  }
  return nullptr;
}

void PrefixTree::remove(PrefixNode* leaf) {
  leaves_.erase(leaf);
  pool_.give_back_cached(leaf->page);
  --nodes_;
  PrefixNode* parent = leaf->parent;
  std::erase_if(parent->children, [&](const auto& other) { return other.get() == leaf; });
  if (parent != &root_ && parent->children.empty()) leaves_.insert(parent);
}

// Depth is that of the longest chain, so no recursion.
void PrefixTree::clear() {
  while (!leaves_.empty()) {
    PrefixNode* leaf = *leaves_.begin();
    leaf->snapshots.clear();
    remove(leaf);
  }
  by_use_.clear();
}

}  // namespace tensorfold
