#include "coordinator/api/completion_request.h"

#include <gtest/gtest.h>

#include <string>

namespace tensorfold {
namespace {

using Ids = std::vector<uint32_t>;

ApiError refused(const std::string& text) {
  const ApiOr<CompletionRequest> request = parse_completion_request(text, {});
  if (request.ok()) {
    ADD_FAILURE() << "accepted: " << text;
    return {};
  }
  return request.error();
}

// Protects the four forms of a prompt.
TEST(CompletionRequest, Prompts) {
  auto request = parse_completion_request(R"({"prompt":"a"})", {});
  ASSERT_TRUE(request.ok());
  EXPECT_EQ(std::get<std::string>(request->prompts.at(0)), "a");
  request = parse_completion_request(R"({"prompt":["a","b"],"n":2})", {});
  ASSERT_TRUE(request.ok());
  EXPECT_EQ(std::get<std::string>(request->prompts.at(1)), "b");
  request = parse_completion_request(R"({"prompt":[1,2,3]})", {});
  ASSERT_TRUE(request.ok());
  EXPECT_EQ(request->prompts.size(), 1u);
  EXPECT_EQ(std::get<Ids>(request->prompts.at(0)), (Ids{1, 2, 3}));
  request = parse_completion_request(R"({"prompt":[[1],[2,3]]})", {});
  ASSERT_TRUE(request.ok());
  EXPECT_EQ(std::get<Ids>(request->prompts.at(1)), (Ids{2, 3}));
}

// Protects against mixed, nested and empty prompts.
TEST(CompletionRequest, BadPrompts) {
  EXPECT_EQ(refused(R"({})").code, ErrorCode::kMissingField);
  EXPECT_EQ(refused(R"({"prompt":7})").param, "prompt");
  EXPECT_EQ(refused(R"({"prompt":[]})").param, "prompt");
  EXPECT_EQ(refused(R"({"prompt":["a",1]})").param, "prompt[1]");
  EXPECT_EQ(refused(R"({"prompt":[1,"a"]})").param, "prompt[1]");
  EXPECT_EQ(refused(R"({"prompt":[[1],"a"]})").param, "prompt[1]");
  EXPECT_EQ(refused(R"({"prompt":[[[1]]]})").param, "prompt[0][0]");
  EXPECT_EQ(refused(R"({"prompt":[[1],[]]})").param, "prompt[1]");
  EXPECT_EQ(refused(R"({"prompt":[-1]})").param, "prompt[0]");
  EXPECT_EQ(refused(R"({"prompt":[1.5]})").param, "prompt[0]");
  EXPECT_EQ(refused(R"({"prompt":[99999999999]})").param, "prompt[0]");
  EXPECT_EQ(refused(R"({"prompt":[{}]})").param, "prompt[0]");
  std::string many = R"({"prompt":["a")";
  for (int i = 0; i < 64; ++i) many += ",\"a\"";
  EXPECT_EQ(refused(many + "]}").param, "prompt");
}

// Protects the dialect: logprobs is a number here; what is not offered is refused by name.
TEST(CompletionRequest, Dialect) {
  auto request = parse_completion_request(
      R"({"prompt":"a","logprobs":5,"max_tokens":7,"echo":false,"suffix":null,"best_of":1,"temperature":0})", {});
  ASSERT_TRUE(request.ok());
  EXPECT_EQ(request->options.logprobs, 5u);
  EXPECT_EQ(request->options.max_tokens, 7u);
  EXPECT_EQ(refused(R"({"prompt":"a","logprobs":true})").code, ErrorCode::kInvalidType);
  for (const char* field : {R"("echo":true)", R"("suffix":"x")", R"("best_of":3)", R"("messages":[])"}) {
    EXPECT_EQ(refused(std::string(R"({"prompt":"a",)") + field + "}").code, ErrorCode::kUnsupported) << field;
  }
  EXPECT_EQ(refused(R"({"prompt":"a","tools":[]})").code, ErrorCode::kUnknownField);
}

}  // namespace
}  // namespace tensorfold
