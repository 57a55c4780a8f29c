// The tree of computed tokens.
#include "coordinator/cache/prefix_tree.h"

#include <gtest/gtest.h>

#include <numeric>

namespace tensorfold {
namespace {

// Tokens first, first + 1, …
std::vector<uint32_t> text(size_t count, uint32_t first = 0) {
  std::vector<uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

std::vector<uint32_t> joined(std::vector<uint32_t> a, const std::vector<uint32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class PrefixTreeTest : public ::testing::Test {
 protected:
  // Inserts a chain on pages of its own, which only the tree then holds.
  std::vector<PrefixNode*> add(const std::vector<uint32_t>& tokens, bool mtp = false) {
    const std::vector<int32_t> pages = pool_.take(static_cast<int64_t>((tokens.size() + 63) / 64));
    std::vector<PrefixNode*> nodes = tree_.insert(tokens, pages, mtp);
    pool_.give_back(pages);
    return nodes;
  }
  uint64_t found(const std::vector<uint32_t>& tokens, bool mtp = false) { return tree_.find(tokens, mtp).tokens; }

  PagePool pool_{64};
  PrefixTree tree_{pool_};
};

// Protects: the longest common beginning is found to the token, across pages and inside them, over several branches.
TEST_F(PrefixTreeTest, FindsTheLongestCommonBeginning) {
  const std::vector<uint32_t> shared = text(128);
  add(joined(shared, text(100, 1000)));
  add(joined(shared, text(30, 2000)));
  add(joined(text(10), text(60, 5000)));
  EXPECT_EQ(tree_.nodes(), 2 + 2 + 1 + 2) << "what is shared is there once";
  EXPECT_EQ(found(shared), 128u);
  EXPECT_EQ(found(text(50)), 50u);
  EXPECT_EQ(found(joined(shared, text(80, 1000))), 208u);
  EXPECT_EQ(found(joined(shared, joined(text(20, 1000), {7}))), 148u);
  EXPECT_EQ(found(joined(shared, joined(text(30, 2000), text(9)))), 158u);
  EXPECT_EQ(found(joined(text(10), text(10, 5000))), 20u);
  EXPECT_EQ(found({9, 9, 9}), 0u);
  EXPECT_EQ(found({}), 0u);
}

// Protects: a page that holds more tokens after the same beginning takes the place of one that holds fewer, whoever
// computed them, and one that holds fewer adds nothing; no page is lost or held twice.
TEST_F(PrefixTreeTest, LongerPagesTakeTheShorterOnesPlace) {
  const std::vector<PrefixNode*> before = add(text(80));
  const int32_t partial = before[1]->page;
  add(text(100));
  EXPECT_EQ(tree_.nodes(), 2);
  EXPECT_NE(before[1]->page, partial);
  EXPECT_EQ(found(text(120)), 100u);
  add(text(90));
  EXPECT_EQ(tree_.nodes(), 2);
  EXPECT_EQ(found(text(120)), 100u);
  add(text(200));
  EXPECT_EQ(tree_.nodes(), 4);
  EXPECT_EQ(pool_.free_pages() + pool_.idle_pages(), 64);
  EXPECT_EQ(pool_.idle_pages(), 4);
  tree_.clear();
  EXPECT_EQ(pool_.free_pages(), 64);
}

// Protects: a sequence that drafts with the MTP layer does not start on pages that lack that layer's keys, and leaves
// its own in their place; one without does not take them away.
TEST_F(PrefixTreeTest, KnowsWhereTheMtpKeysAre) {
  add(text(100), false);
  EXPECT_EQ(found(text(100), true), 0u);
  EXPECT_EQ(found(text(100), false), 100u);
  add(text(64), true);
  EXPECT_EQ(found(text(100), true), 64u);
  EXPECT_EQ(found(text(100), false), 100u);
  add(text(120), true);
  EXPECT_EQ(found(text(120), true), 120u);
  add(text(127), false);
  EXPECT_EQ(found(text(127), true), 120u);
  EXPECT_EQ(pool_.free_pages() + pool_.idle_pages(), 64);
}

// Protects: what was used last is forgotten last, the end of a chain before its beginning, and what somebody holds
// never.
TEST_F(PrefixTreeTest, ForgetsTheLeastRecentlyUsedEnds) {
  add(joined(text(64), text(64, 1000)));
  add(joined(text(64), text(64, 2000)));
  tree_.touch(tree_.find(joined(text(64), text(64, 1000)), false).nodes);
  PrefixNode* oldest = tree_.oldest_leaf();
  ASSERT_NE(oldest, nullptr);
  EXPECT_EQ(oldest->tokens, text(64, 2000));
  pool_.hold(oldest->page);
  EXPECT_EQ(tree_.oldest_leaf()->tokens, text(64, 1000)) << "the other one is held";
  pool_.give_back(oldest->page);
  PrefixSnapshot* snapshot = tree_.add_snapshot(oldest, {.id = 1, .committed = 128, .kept = {}, .node = nullptr});
  snapshot->users = 1;
  EXPECT_EQ(tree_.oldest_leaf()->tokens, text(64, 1000)) << "somebody is about to start from the other one";
  snapshot->users = 0;
  tree_.remove(snapshot);
  tree_.remove(oldest);
  tree_.remove(tree_.oldest_leaf());
  EXPECT_EQ(tree_.oldest_leaf()->tokens, text(64));
  tree_.remove(tree_.oldest_leaf());
  EXPECT_EQ(tree_.oldest_leaf(), nullptr);
  EXPECT_EQ(pool_.free_pages(), 64);
}

}  // namespace
}  // namespace tensorfold
