// Which segments of a chain are written with which snapshot, and what they give back.
#include "coordinator/cache/state_keeper.h"

#include <gtest/gtest.h>

#include <numeric>

#include "coordinator/cache/prefix_cache.h"

namespace tensorfold {
namespace {

std::vector<uint32_t> text(size_t count) {
  std::vector<uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 0u);
  return tokens;
}

// A cache of a model with recurrent states, whose one rank answers every state order at once with yes.
class World {
 public:
  explicit World(std::vector<StoredSegment> stored)
      : pool_(128), cache_(pool_, {.has_states = true, .has_mtp = true, .snapshots = 8, .snapshot_tokens = 0}) {
    cache_.states().open({.enabled = true, .fingerprint = "f", .min_tokens = 64, .has_states = true}, std::move(stored),
                         1);
  }
  // A reply that ended at `tokens`' end, the last `accepted` of them tentative rows of its last window.
  void live(const std::vector<uint32_t>& tokens, uint32_t accepted) {
    std::optional<CacheStart> mine = cache_.start(tokens, static_cast<int64_t>(tokens.size() + 63) / 64, true, true);
    ASSERT_TRUE(mine.has_value());
    cache_.started(mine->snapshot);
    cache_.ended(tokens, tokens.size(), accepted, mine->pages, 0, true);
    pool_.give_back(mine->pages);
  }
  // Passes until nothing is on its way.
  void settle() {
    for (int pass = 0; cache_.states().pending() && pass < 100; ++pass) {
      const StateOrders orders = cache_.take_orders();
      std::vector<StateEvent> events;
      for (const SaveOrder& save : orders.saves) events.push_back({save.ticket, true, ""});
      for (const LoadOrder& load : orders.loads) {
        if (load.step == LoadStep::kFetch || load.step == LoadStep::kPlace) events.push_back({load.ticket, true, ""});
      }
      cache_.states().take_events(events);
    }
  }
  PrefixCache& cache() { return cache_; }

 private:
  PagePool pool_;
  PrefixCache cache_;
};

// Protects: a reply whose last window crosses the end of a segment is kept with its snapshot, which lies before that
// end, and a conversation that goes on after a restart starts there and not at nothing.
TEST(StateKeeper, AWindowMayCrossTheEndOfASegment) {
  for (const uint64_t committed : {2046u, 2048u}) {
    World before({});
    before.live(text(committed + 4), 4);
    before.settle();
    const std::vector<StoredSegment> stored = before.cache().states().list();
    ASSERT_EQ(stored.size(), 1u);
    EXPECT_EQ(stored[0].committed, committed);
    EXPECT_EQ(stored[0].kept.size(), 4u);
    EXPECT_EQ(stored[0].end(), 2048u);

    World after(stored);
    const std::vector<uint32_t> next = text(2100);
    EXPECT_NE(after.cache().states().restore(next, 0, true), 0u);
    after.settle();
    EXPECT_EQ(after.cache().states().counters().restored, 1u);
    const std::optional<CacheStart> start = after.cache().start(next, 40, true, true);
    ASSERT_TRUE(start.has_value());
    EXPECT_EQ(start->position, 2048u);
    EXPECT_EQ(start->accepted, 2048u - committed);
  }
}

// Protects: a segment that lies on disk without a snapshot is written again when there is one, and once is enough.
TEST(StateKeeper, ASnapshotIsAddedToAWholeSegment) {
  World world({});
  world.live(text(2200), 0);
  world.settle();
  EXPECT_EQ(world.cache().states().counters().saved, 2u);
  world.live(text(2049), 3);
  world.settle();
  EXPECT_EQ(world.cache().states().counters().saved, 3u);
  world.live(text(2049), 3);
  world.settle();
  EXPECT_EQ(world.cache().states().counters().saved, 3u);
  EXPECT_EQ(world.cache().states().segments(), 2u);
}

// Protects: what waits to be written is counted until the disks have it.
TEST(StateKeeper, CountsWhatIsNotWritten) {
  World world({});
  world.live(text(2200), 0);
  EXPECT_EQ(world.cache().states().unwritten(), 2u);
  const StateOrders first = world.cache().take_orders();
  ASSERT_EQ(first.saves.size(), 1u);
  EXPECT_EQ(world.cache().states().unwritten(), 2u);
  world.cache().states().take_events(std::vector<StateEvent>{{first.saves[0].ticket, true, ""}});
  EXPECT_EQ(world.cache().states().unwritten(), 1u);
  world.settle();
  EXPECT_EQ(world.cache().states().unwritten(), 0u);
}

}  // namespace
}  // namespace tensorfold
