// Where sequences start, what the ranks are told, and what is forgotten when.
#include "coordinator/cache/prefix_cache.h"

#include <gtest/gtest.h>

#include <numeric>

namespace tensorfold {
namespace {

std::vector<uint32_t> text(size_t count, uint32_t first = 0) {
  std::vector<uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

std::vector<uint32_t> joined(std::vector<uint32_t> a, const std::vector<uint32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class PrefixCacheTest : public ::testing::Test {
 protected:
  void open(CacheOptions options, int64_t pages = 32) {
    cache_.reset();
    pool_ = std::make_unique<PagePool>(pages);
    cache_ = std::make_unique<PrefixCache>(*pool_, options);
  }
  // Pages alone are state, or not.
  static CacheOptions plain(bool mtp = false) { return {.has_mtp = mtp}; }
  static CacheOptions recurrent(int64_t snapshots = 4) {
    return {.has_states = true, .has_mtp = true, .snapshots = snapshots, .snapshot_tokens = 128};
  }

  CacheStart start(const std::vector<uint32_t>& tokens, int64_t pages, bool mtp = false) {
    std::optional<CacheStart> start = cache_->start(tokens, pages, mtp, true);
    EXPECT_TRUE(start.has_value());
    return start.value_or(CacheStart{});
  }
  // A sequence of `prompt` and `reply`, the last `accepted` of it tentative, that ran from start to end in slot 3.
  void live(const std::vector<uint32_t>& tokens, uint32_t accepted = 0, bool mtp = false) {
    CacheStart mine = start(tokens, static_cast<int64_t>(tokens.size() + 63) / 64, mtp);
    cache_->started(mine.snapshot);
    cache_->ended(tokens, tokens.size(), accepted, mine.pages, 3, mtp);
    pool_->give_back(mine.pages);
  }
  void finish(const CacheStart& mine) {
    cache_->started(mine.snapshot);
    pool_->give_back(mine.pages);
  }

  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<PrefixCache> cache_;
};

// Protects: where pages are all there is, a sequence starts at the very token where its text departs; whole pages are
// shared, the partial one is copied to a page of its own before it is written, and the last token is always left.
TEST_F(PrefixCacheTest, StartsAtTheTokenWherePagesAreEnough) {
  open(plain());
  live(text(150));
  cache_->take_orders();
  const CacheStart branch = start(joined(text(100), text(50, 900)), 4);
  EXPECT_EQ(branch.position, 100u);
  ASSERT_EQ(branch.pages.size(), 4u);
  EXPECT_EQ(pool_->refs(branch.pages[0]), 2) << "shared";
  StateOrders orders = cache_->take_orders();
  ASSERT_EQ(orders.copies.size(), 1u);
  EXPECT_EQ(orders.copies[0].to, branch.pages[1]);
  finish(branch);
  const CacheStart again = start(text(150), 3);
  EXPECT_EQ(again.position, 149u);
  orders = cache_->take_orders();
  ASSERT_EQ(orders.copies.size(), 1u);
  EXPECT_EQ(orders.copies[0].to, again.pages[2]);
  finish(again);
  const CacheStart boundary = start(joined(text(128), {7}), 3);
  EXPECT_EQ(boundary.position, 128u);
  EXPECT_TRUE(cache_->take_orders().copies.empty()) << "nothing of a whole page is written again";
  finish(boundary);
  EXPECT_EQ(cache_->counters().hits, 3u);
  EXPECT_EQ(cache_->counters().hit_tokens, 100u + 149u + 128u);
  EXPECT_EQ(cache_->counters().misses, 1u);
  EXPECT_EQ(pool_->free_pages() + pool_->idle_pages(), 32);
}

// Protects: with an MTP layer one more row is computed, for the hidden row that the layer goes on from, and the page in
// which that row's MTP key is written again is the sequence's own.
TEST_F(PrefixCacheTest, StepsBackARowForTheMtpLayer) {
  open(plain(true));
  live(text(150), 0, true);
  cache_->take_orders();
  const CacheStart boundary = start(joined(text(128), {7}), 3, true);
  EXPECT_EQ(boundary.position, 127u);
  const StateOrders orders = cache_->take_orders();
  ASSERT_EQ(orders.copies.size(), 1u);
  EXPECT_EQ(orders.copies[0].to, boundary.pages[1]);
  EXPECT_EQ(pool_->refs(boundary.pages[1]), 1);
  finish(boundary);
}

// Protects: with recurrent states a sequence starts only where a snapshot reaches, in any of its kept rows that agree,
// and the pages whose MTP keys are written again are its own.
TEST_F(PrefixCacheTest, StartsWhereASnapshotReaches) {
  open(recurrent());
  const std::vector<uint32_t> lived = text(132);
  live(lived, 6, true);  // committed 126, six kept rows that cross a page's end
  StateOrders orders = cache_->take_orders();
  ASSERT_EQ(orders.takes.size(), 1u);
  EXPECT_EQ(orders.takes[0].slot, 3u);
  const uint32_t id = orders.takes[0].id;
  const struct {
    std::vector<uint32_t> tokens;
    uint64_t position;
    size_t copies;
  } cases[] = {{joined(text(132), text(9, 700)), 132, 2},
               {joined(text(129), text(9, 700)), 129, 2},
               {joined(text(128), text(9, 700)), 128, 1},
               {joined(text(126), text(9, 700)), 126, 1},
               {joined(text(125), text(9, 700)), 0, 0},
               {text(132), 131, 2},
               {text(126), 0, 0}};
  for (const auto& each : cases) {
    SCOPED_TRACE(each.tokens.size());
    const CacheStart mine = start(each.tokens, 4, true);
    EXPECT_EQ(mine.position, each.position);
    EXPECT_EQ(mine.accepted, each.position == 0 ? 0 : each.position - 126);
    EXPECT_EQ(mine.snapshot_id(), each.position == 0 ? kNoSnapshot : id);
    orders = cache_->take_orders();
    EXPECT_EQ(orders.copies.size(), each.copies);
    for (size_t page = each.position == 0 ? 0 : 1; page < 4; ++page)
      EXPECT_EQ(pool_->refs(mine.pages[page]), 1) << page;
    finish(mine);
  }
}

// Protects: prompts stop, and leave a snapshot, at the grid and at their last page's beginning, nowhere else; the
// snapshot is taken once.
TEST_F(PrefixCacheTest, PromptsLeaveSnapshotsOnTheGridAndAtTheirLastPage) {
  open(recurrent(8));
  const std::vector<uint32_t> prompt = text(300);
  EXPECT_EQ(cache_->next_stop(300, 0), 128u);
  EXPECT_EQ(cache_->next_stop(300, 128), 256u);
  EXPECT_EQ(cache_->next_stop(300, 256), 300u);
  EXPECT_EQ(cache_->next_stop(250, 128), 192u);
  EXPECT_EQ(cache_->next_stop(64, 0), 64u);
  EXPECT_EQ(cache_->next_stop(65, 0), 64u);
  const CacheStart mine = start(prompt, 5);
  const auto takes_at = [&](uint64_t computed) {
    cache_->grown(prompt, 300, computed, mine.pages, 2, true);
    return cache_->take_orders().takes.size();
  };
  EXPECT_EQ(takes_at(64), 0u);
  EXPECT_EQ(takes_at(128), 1u);
  EXPECT_EQ(takes_at(128), 0u);
  EXPECT_EQ(takes_at(200), 0u);
  EXPECT_EQ(takes_at(256), 1u);
  EXPECT_EQ(takes_at(300), 0u);
  finish(mine);
  const CacheStart resent = start(prompt, 5, true);
  EXPECT_EQ(resent.position, 256u);
  finish(resent);
}

// Protects: when the ranks' memory for snapshots is full the least recently used one goes, unless somebody is about to
// start from it; then the new one is refused, and both are counted.
TEST_F(PrefixCacheTest, SnapshotsGoByTheirLastUse) {
  open(recurrent(2));
  live(text(70, 100), 0, true);
  live(text(70, 200), 0, true);
  cache_->take_orders();
  CacheStart used = start(joined(text(70, 100), {1}), 2, true);
  EXPECT_EQ(used.position, 70u);
  live(text(70, 300), 0, true);
  EXPECT_EQ(cache_->counters().evicted_snapshots, 1u);
  const StateOrders orders = cache_->take_orders();
  ASSERT_EQ(orders.takes.size(), 1u);
  EXPECT_EQ(orders.drops, std::vector<uint32_t>{orders.takes[0].id}) << "the number of the one that went";
  CacheStart other = start(joined(text(70, 300), {1}), 2, true);
  EXPECT_EQ(other.position, 70u);
  live(text(70, 400), 0, true);
  EXPECT_EQ(cache_->counters().refusals, 1u);
  finish(used);
  finish(other);
  EXPECT_EQ(start(joined(text(70, 200), {1}), 2, true).position, 0u) << "it went first";
}

// Protects: pages of chains that nobody uses make room for a sequence; what is in use does not; and a prefix that
// stands in the way of the whole request is given up rather than the request.
TEST_F(PrefixCacheTest, MakesRoomOfWhatIsNotInUse) {
  open(plain(), 8);
  live(text(256, 1000));  // four pages
  live(text(128, 2000));  // two
  EXPECT_EQ(pool_->free_pages(), 2);
  const CacheStart mine = start(joined(text(128, 2000), text(100)), 5);
  EXPECT_EQ(mine.position, 128u);
  EXPECT_EQ(cache_->counters().evicted_pages, 1u) << "three of its own: two were free";
  EXPECT_FALSE(cache_->start(text(300, 3000), 5, false, true).has_value()) << "eight pages, five in use";
  finish(mine);
  const CacheStart all = start(joined(text(64, 1000), {1}), 8);
  EXPECT_EQ(all.position, 64u);
  cache_->take_orders();
  // A copy's source cannot be had while it is to be copied: with every page needed the prefix is not used.
  cache_->ended(text(70, 1000), 70, 0, all.pages, 3, false);
  finish(all);
  const CacheStart whole = start(joined(text(70, 1000), {1}), 8);
  EXPECT_EQ(whole.position, 0u);
  EXPECT_EQ(cache_->counters().refusals, 1u);
  finish(whole);
}

// Protects: a sequence that ends before its first pass leaves no order that writes pages others have by then; and ranks
// that start with nothing are not told of what they had.
TEST_F(PrefixCacheTest, OrdersOfWhatEndedAreForgotten) {
  open(recurrent());
  live(text(100), 2, true);
  cache_->take_orders();
  const CacheStart mine = start(joined(text(100), {1}), 2, true);
  cache_->abandon(mine.pages);
  finish(mine);
  EXPECT_TRUE(cache_->take_orders().empty());
  live(text(100, 500), 0, true);
  cache_->clear();
  EXPECT_TRUE(cache_->take_orders().empty());
  EXPECT_EQ(pool_->free_pages(), 32);
  EXPECT_EQ(cache_->snapshots(), 0);
  EXPECT_EQ(start(joined(text(100), {1}), 2, true).position, 0u);
}

// Protects: a request that opts out, and a profile that does, start at 0 and leave nothing behind.
TEST_F(PrefixCacheTest, CanBeTurnedOff) {
  open(plain());
  live(text(100));
  const std::optional<CacheStart> mine = cache_->start(text(100), 2, false, false);
  ASSERT_TRUE(mine.has_value());
  EXPECT_EQ(mine->position, 0u);
  EXPECT_EQ(cache_->counters().misses, 1u) << "the first one's";
  CacheOptions off = plain();
  off.enabled = false;
  open(off);
  live(text(100));
  EXPECT_EQ(cache_->cached_pages(), 0);
  open(recurrent(0));
  live(text(100));
  EXPECT_EQ(cache_->cached_pages(), 0) << "pages without states are of no use";
}

}  // namespace
}  // namespace tensorfold
