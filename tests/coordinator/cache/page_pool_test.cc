// Pages and who holds them.
#include "coordinator/cache/page_pool.h"

#include <gtest/gtest.h>

namespace tensorfold {
namespace {

// Protects: a page is handed out once, is free only when its last holder gives it back, and is idle exactly while the
// tree alone holds it.
TEST(PagePool, CountsHolders) {
  PagePool pool(4);
  EXPECT_TRUE(pool.take(5).empty());
  EXPECT_TRUE(pool.take(0).empty());
  const std::vector<int32_t> mine = pool.take(3);
  ASSERT_EQ(mine.size(), 3u);
  EXPECT_EQ(pool.free_pages(), 1);
  EXPECT_EQ(pool.idle_pages(), 0);
  pool.hold_cached(mine[0]);
  EXPECT_EQ(pool.refs(mine[0]), 2);
  pool.hold(mine[0]);
  pool.give_back(mine);
  EXPECT_EQ(pool.free_pages(), 3) << "the tree and another sequence still hold one";
  EXPECT_EQ(pool.idle_pages(), 0);
  pool.give_back(mine[0]);
  EXPECT_EQ(pool.idle_pages(), 1);
  pool.hold(mine[0]);
  EXPECT_EQ(pool.idle_pages(), 0);
  pool.give_back(mine[0]);
  pool.give_back_cached(mine[0]);
  EXPECT_EQ(pool.idle_pages(), 0);
  EXPECT_EQ(pool.free_pages(), 4);
}

}  // namespace
}  // namespace tensorfold
