// Bounds of the queue, and when those who are turned away are told to come again.
#include "coordinator/schedule/admission.h"

#include <gtest/gtest.h>

namespace tensorfold {
namespace {

// Protects: both bounds, each with its own message and numbers; lanes that are free count.
TEST(Admission, BoundedByCountAndTokens) {
  Admission admission({.count = 2, .tokens = 1000});
  EXPECT_FALSE(admission.refuse(1, 5000, 0).has_value());  // alone it may be as long as it likes
  admission.add(1, 600);
  const auto tokens = admission.refuse(1, 500, 0);
  ASSERT_TRUE(tokens.has_value());
  EXPECT_EQ(tokens->http_status(), 429);
  EXPECT_NE(tokens->message.find("600 prompt tokens are waiting and the queue holds 1000"), std::string::npos)
      << tokens->message;
  EXPECT_FALSE(admission.refuse(1, 400, 0).has_value());
  admission.add(1, 10);
  const auto count = admission.refuse(1, 10, 0);
  ASSERT_TRUE(count.has_value());
  EXPECT_EQ(count->http_status(), 429);
  EXPECT_NE(count->message.find("2 requests are waiting and the queue holds 2"), std::string::npos) << count->message;
  EXPECT_FALSE(admission.refuse(1, 10, 1).has_value());
  EXPECT_TRUE(admission.refuse(2, 10, 1).has_value());
}

// Protects: Retry-After is what the measured rates say, within bounds, also before anything was measured.
TEST(Admission, RetryAfterFromMeasuredRates) {
  Admission admission({.count = 0, .tokens = 0});
  EXPECT_EQ(*admission.refuse(1, 10, 0)->retry_after_s, 1);
  for (int i = 0; i < 100; ++i) admission.record_round(0.1, 50, i % 50 == 49 ? 1 : 0);  // one ends every 5 s
  EXPECT_NEAR(*admission.refuse(1, 10, 0)->retry_after_s, 5, 1);
  EXPECT_NEAR(*admission.refuse(4, 10, 0)->retry_after_s, 20, 3);
  EXPECT_NEAR(admission.seconds_until(0, 5000), 10, 1);  // 500 tokens a second
  EXPECT_EQ(admission.seconds_until(0, 100000000), 600);
  EXPECT_EQ(admission.seconds_until(0, 1), 1);
}

}  // namespace
}  // namespace tensorfold
