#include "coordinator/api/service_bodies.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tensorfold {
namespace {

// Protects /tokenize: a prompt or messages, never both or neither.
TEST(Tokenize, Body) {
  auto request = parse_tokenize_request(R"({"prompt":"hi","add_special_tokens":false})");
  ASSERT_TRUE(request.ok());
  EXPECT_EQ(request->prompt, "hi");
  EXPECT_FALSE(request->add_special_tokens);
  request = parse_tokenize_request(R"({"messages":[{"role":"user","content":"x"}],"add_generation_prompt":false})");
  ASSERT_TRUE(request.ok());
  EXPECT_FALSE(request->prompt.has_value());
  EXPECT_EQ(request->messages.size(), 1u);
  EXPECT_FALSE(request->add_generation_prompt);
  EXPECT_EQ(parse_tokenize_request(R"({})").error().param, "prompt");
  EXPECT_EQ(parse_tokenize_request(R"({"prompt":7})").error().param, "prompt");
  EXPECT_EQ(parse_tokenize_request(R"({"prompt":"x","messages":[]})").error().param, "messages");
  EXPECT_EQ(parse_tokenize_request(R"({"promt":"x"})").ok(), false);
  EXPECT_EQ(tokenize_body(std::vector<uint32_t>{1, 2}, 2048), R"({"tokens":[1,2],"count":2,"max_model_len":2048})");
}

// Protects /detokenize.
TEST(Detokenize, Body) {
  auto request = parse_detokenize_request(R"({"tokens":[1,2]})");
  ASSERT_TRUE(request.ok());
  EXPECT_EQ(request->tokens, (std::vector<uint32_t>{1, 2}));
  EXPECT_TRUE(parse_detokenize_request(R"({"tokens":[]})")->tokens.empty());
  EXPECT_EQ(parse_detokenize_request(R"({})").error().param, "tokens");
  EXPECT_EQ(parse_detokenize_request(R"({"tokens":["a"]})").error().param, "tokens[0]");
  EXPECT_EQ(detokenize_body("\"x\xff"), "{\"prompt\":\"\\\"x\xef\xbf\xbd\"}");
}

// Protects the model list (with fingerprint) and the 404 that names what there is.
TEST(Models, ListAndCheck) {
  const std::vector<ServedModel> models = {{"sprout", 5, 2048, "0123456789abcdef"}};
  EXPECT_EQ(models_body(models),
            R"({"object":"list","data":[{"id":"sprout","object":"model","created":5,"owned_by":"tensorfold",)"
            R"("max_model_len":2048,"fingerprint":"0123456789abcdef"}]})");
  const std::vector<std::string> served = {"sprout"};
  EXPECT_FALSE(check_model("", served));
  EXPECT_FALSE(check_model("sprout", served));
  const auto error = check_model("gpt-4", served);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->http_status(), 404);
  EXPECT_NE(error->message.find("'sprout'"), std::string::npos);
}

}  // namespace
}  // namespace tensorfold
