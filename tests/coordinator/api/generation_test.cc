#include "coordinator/api/generation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/api/request_options.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;

GenerationRequest request_of(size_t prompt) {
  GenerationRequest request;
  request.prompt.assign(prompt, 1);
  return request;
}

// Protects "over-long request": 400 context_length_exceeded with limit and length, before any work.
TEST(ResolveGeneration, Context) {
  const GenerationBounds bounds{.context = 100, .vocabulary = 10, .max_tokens = 0};
  GenerationRequest request = request_of(60);
  EXPECT_FALSE(resolve_generation(bounds, std::nullopt, &request));
  EXPECT_EQ(request.max_tokens, 40u);
  EXPECT_FALSE(resolve_generation(bounds, 40u, &request));
  EXPECT_EQ(request.max_tokens, 40u);
  auto error = resolve_generation(bounds, 41u, &request);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->info().name, "context_length_exceeded");
  EXPECT_THAT(error->message, HasSubstr("100"));
  EXPECT_THAT(error->message, HasSubstr("101"));
  GenerationRequest full = request_of(100);
  EXPECT_EQ(resolve_generation(bounds, std::nullopt, &full)->code, ErrorCode::kContextLengthExceeded);
  const GenerationBounds preset{.context = 100, .vocabulary = 10, .max_tokens = 16};
  EXPECT_FALSE(resolve_generation(preset, std::nullopt, &request));
  EXPECT_EQ(request.max_tokens, 16u);
  GenerationRequest late = request_of(95);
  EXPECT_FALSE(resolve_generation(preset, std::nullopt, &late));
  EXPECT_EQ(late.max_tokens, 5u);
}

// Protects the engine against ids and counts that it cannot hold, whichever front end they come from.
TEST(ResolveGeneration, Checks) {
  const GenerationBounds bounds{.context = 100, .vocabulary = 10, .max_tokens = 0};
  GenerationRequest empty;
  EXPECT_EQ(resolve_generation(bounds, 1u, &empty)->param, "prompt");
  GenerationRequest request = request_of(3);
  request.prompt[1] = 10;
  EXPECT_EQ(resolve_generation(bounds, 1u, &request)->param, "prompt");
  request = request_of(3);
  request.stop_ids = {10};
  EXPECT_EQ(resolve_generation(bounds, 1u, &request)->param, "stop_token_ids");
  request = request_of(3);
  request.n = 17;
  EXPECT_EQ(resolve_generation(bounds, 1u, &request)->param, "n");
  request = request_of(3);
  request.stop = {""};
  EXPECT_EQ(resolve_generation(bounds, 1u, &request)->param, "stop");
  request = request_of(3);
  request.min_tokens = 2;
  EXPECT_EQ(resolve_generation(bounds, 1u, &request)->param, "min_tokens");
  request = request_of(3);
  request.sampling.temperature = 3;
  EXPECT_EQ(resolve_generation(bounds, 1u, &request)->param, "temperature");
  request = request_of(3);
  EXPECT_EQ(resolve_generation(bounds, 0u, &request)->param, "max_tokens");
}

// Protects the way from options to the engine's request: a field left behind would be "accepted and ignored".
TEST(MakeGeneration, CarriesEverything) {
  RequestOptions options;
  options.sampling.temperature = 0.3;
  options.seed = 9;
  options.max_tokens = 5;
  options.min_tokens = 2;
  options.stop = {"x"};
  options.stop_token_ids = {3};
  options.n = 2;
  options.logprobs = 4;
  options.draft = false;
  options.return_token_ids = true;
  options.ignore_eos = true;
  const auto request = make_generation(options, "id", {1, 2}, {.context = 100, .vocabulary = 10, .max_tokens = 0});
  ASSERT_TRUE(request.ok());
  EXPECT_EQ(request->sampling.temperature, 0.3);
  EXPECT_EQ(request->seed, 9u);
  EXPECT_EQ(request->max_tokens, 5u);
  EXPECT_EQ(request->min_tokens, 2u);
  EXPECT_EQ(request->stop, options.stop);
  EXPECT_EQ(request->stop_ids, options.stop_token_ids);
  EXPECT_EQ(request->n, 2u);
  EXPECT_EQ(request->logprobs, 4u);
  EXPECT_FALSE(request->draft);
  EXPECT_TRUE(request->return_token_ids);
  EXPECT_TRUE(request->ignore_eos);
  EXPECT_EQ(request->id, "id");
}

}  // namespace
}  // namespace tensorfold
