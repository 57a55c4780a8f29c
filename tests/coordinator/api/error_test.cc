#include "coordinator/api/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <set>
#include <string>
#include <vector>

namespace tensorfold {
namespace {

using ::testing::HasSubstr;

std::vector<ApiError> one_of_each() {
  const std::vector<std::string> served = {"a", "b"};
  return {invalid_json_error(7, "syntax error"),
          invalid_type_error("n", "an integer", "a string"),
          invalid_value_error("n", "0 is not between 1 and 16"),
          missing_field_error("messages", "an array"),
          unknown_field_error("temprature", "temperature"),
          unsupported_error("suffix", "no"),
          context_length_error(2048, 2000, 100),
          cache_too_small_error(5000, 4096),
          unauthorized_error(),
          model_not_found_error("c", served),
          unknown_url_error("GET", "/v2"),
          method_not_allowed_error("GET", "/v1/chat/completions", "POST"),
          request_timeout_error(10),
          body_too_large_error(1024),
          unsupported_media_type_error("text/plain"),
          headers_too_large_error(8192),
          cancelled_error(),
          rank_failed_error(1, "spark-2", "no step for 2 s", 5),
          model_output_broken_error("the logit of token 4 at position 9 is nan"),
          queue_full_error(64, 64, 3),
          cluster_down_error(1, "spark-2", "connection lost", 10),
          starting_error("rank 1 (spark-2)", 5),
          draining_error(5),
          timeout_error(60),
          internal_error("x")};
}

// Protects the table: one entry a code, in order, each with one maker whose message fits its format.
TEST(ErrorCatalogue, IsWhole) {
  const std::vector<ApiError> errors = one_of_each();
  ASSERT_EQ(error_catalogue().size(), errors.size());
  std::set<std::string_view> names;
  for (size_t i = 0; i < errors.size(); ++i) {
    const ErrorInfo& info = error_catalogue()[i];
    EXPECT_EQ(static_cast<size_t>(info.code), i);
    EXPECT_EQ(static_cast<size_t>(errors[i].code), i);
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_GE(info.http_status, 400);
    EXPECT_FALSE(info.help.empty());
    EXPECT_FALSE(errors[i].message.empty());
    EXPECT_EQ(errors[i].message.find('{'), std::string::npos) << errors[i].message;
    // Every 429 and every "come back later" says when.
    const bool later = info.http_status == 429 || info.http_status == 503;
    EXPECT_EQ(errors[i].retry_after_s.has_value(), later) << info.name;
  }
}

// Protects statuses and texts that clients act on.
TEST(ErrorCatalogue, Statuses) {
  EXPECT_EQ(unauthorized_error().http_status(), 401);
  EXPECT_EQ(model_not_found_error("x", {}).http_status(), 404);
  EXPECT_EQ(body_too_large_error(1).http_status(), 413);
  EXPECT_EQ(queue_full_error(1, 1, 0).http_status(), 429);
  EXPECT_EQ(queue_full_error(1, 1, 0).retry_after_s, 1);
  EXPECT_EQ(timeout_error(1).http_status(), 504);
  const ApiError down = cluster_down_error(1, "spark-2", "connection lost", 10);
  EXPECT_EQ(down.http_status(), 503);
  EXPECT_THAT(down.message, HasSubstr("rank 1 (spark-2)"));
  EXPECT_EQ(down.info().group, ErrorGroup::kCluster);
  const ApiError length = context_length_error(2048, 2000, 100);
  EXPECT_EQ(length.info().name, "context_length_exceeded");
  EXPECT_THAT(length.message, HasSubstr("2048"));
  EXPECT_THAT(length.message, HasSubstr("2100"));
}

// Protects the body's shape, and that it is valid JSON whatever the message holds.
TEST(ErrorBody, IsOpenAis) {
  ApiError error = invalid_value_error("n", "bad \"quote\" \xff\n");
  const boost::json::value body = boost::json::parse(error_body(error));
  const boost::json::object& inner = body.at("error").as_object();
  EXPECT_EQ(inner.at("type").as_string(), "invalid_request_error");
  EXPECT_EQ(inner.at("param").as_string(), "n");
  EXPECT_EQ(inner.at("code").as_string(), "invalid_value");
  EXPECT_TRUE(inner.at("message").is_string());
  EXPECT_TRUE(boost::json::parse(error_body(draining_error(1))).at("error").at("param").is_null());
}

// Protects long client text in messages.
TEST(ErrorBody, ClientTextIsCut) {
  EXPECT_LT(error_body(unknown_field_error(std::string(100000, 'x'), "")).size(), 2000u);
  EXPECT_LT(error_body(model_not_found_error(std::string(100000, 'x'), {})).size(), 2000u);
}

// Protects the mapping of statuses of deeper layers.
TEST(ErrorFromStatus, Maps) {
  EXPECT_EQ(error_from_status(absl::InvalidArgumentError("x")).http_status(), 400);
  EXPECT_EQ(error_from_status(absl::UnavailableError("rank 1")).http_status(), 503);
  EXPECT_EQ(error_from_status(absl::DeadlineExceededError("x")).http_status(), 504);
  EXPECT_EQ(error_from_status(absl::ResourceExhaustedError("x")).http_status(), 429);
  EXPECT_EQ(error_from_status(absl::InternalError("x")).http_status(), 500);
  EXPECT_EQ(error_from_status(absl::DataLossError("x")).http_status(), 500);
  EXPECT_EQ(error_from_status(absl::UnavailableError("rank 1")).message, "rank 1");
}

}  // namespace
}  // namespace tensorfold
